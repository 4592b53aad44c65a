"""Another compositional split of a data set that has one: which pairs are unseen is drawn anew, and nothing else.

How sure a comparison is depends on which pairs happen to be unseen; several draws say how much. As many pairs become
unseen, and as large a share of the seen pairs' images leaves training, as in the split that the data set came with.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from duplex.data.dataset import Dataset, labels_of
from duplex.data.split import make_split
from duplex.data.split_options import SplitOptions
from duplex.errors import UsageError

FIRST_SEED = 1_000_000  # far from the seeds that people give to a split of their own


def split_name(dataset: str, number: int) -> str:
    """What params.yaml calls a data set's split; they count from 1."""
    return f"{dataset}-split{number}"


def resplit(data: Dataset, number: int) -> Dataset:
    """The same rows in the same order, split anew. The same number gives the same split."""
    rows = data.manifest
    made = make_split(rows, shares(rows, FIRST_SEED + number))
    manifest = rows.assign(split=made.split.to_numpy())
    short = {"unseen pairs fewer than in the split it came with": made.short} if made.short else {}
    return replace(data, manifest=manifest, labels=labels_of(manifest), notes={**data.notes, **short}, made_split=True)


def shares(rows: pd.DataFrame, seed: int) -> SplitOptions:
    """Of a split that is there: what part of the pairs it holds out, and of the seen pairs' images."""
    pairs = pd.Series(list(zip(rows["state"], rows["object"], strict=True)), rows.index)
    seen = pairs.isin(pairs[rows["split"] == "train"])
    held, given = [], []
    for split in ("val", "test"):
        here = rows["split"] == split
        held.append(pairs[here & ~seen].nunique() / pairs.nunique())
        given.append(float((here & seen).sum() / seen.sum()))
    if not all((*held, *given)):
        raise UsageError("a split is drawn anew only where validation and test have seen and unseen pairs to imitate")
    return SplitOptions(seed, *held, *given)
