"""Random re-splits of a data set: the same images with other unseen pairs.

Results depend on which pairs happen to be unseen; several re-splits measure how much. The numbers of unseen pairs and
the shares of the seen pairs' images in validation and test are those of the data set's own split.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from duplex.data.dataset import LabelledImages, labels_of
from duplex.data.source_options import SplitOptions
from duplex.data.split import make_split
from duplex.errors import UsageError

FIRST_SEED = 1_000_000  # far from usual seeds of `split:`, which would give related splits


def split_name(dataset: str, number: int) -> str:
    """Return the name of a re-split in params.yaml; numbers start at 1."""
    return f"{dataset}-split{number}"


def resplit(data: LabelledImages, number: int) -> LabelledImages:
    """Return a data set with the same rows in the same order and another split; equal numbers give equal splits."""
    rows = data.manifest
    result = make_split(rows, shares(rows, FIRST_SEED + number))
    manifest = rows.assign(split=result.split.to_numpy())
    short = {"unseen pairs fewer than in the data set's own split": result.short} if result.short else {}
    return replace(data, manifest=manifest, labels=labels_of(manifest), notes={**data.notes, **short}, made_split=True)


def shares(rows: pd.DataFrame, seed: int) -> SplitOptions:
    """Return the options of a manifest's own split: the shares of pairs and of the seen pairs' images held out."""
    pairs = pd.Series(list(zip(rows["state"], rows["object"], strict=True)), rows.index)
    seen = pairs.isin(pairs[rows["split"] == "train"])
    unseen_pairs, seen_images = [], []
    for split in ("val", "test"):
        here = rows["split"] == split
        unseen_pairs.append(pairs[here & ~seen].nunique() / pairs.nunique())
        seen_images.append(float((here & seen).sum() / seen.sum()))
    if not all((*unseen_pairs, *seen_images)):
        raise UsageError("a re-split needs seen and unseen pairs in validation and in test; this data set lacks some")
    return SplitOptions(seed, *unseen_pairs, *seen_images)
