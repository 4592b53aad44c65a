"""A data set in memory: table of images (manifest), labels and notes on rows left out; random re-splits of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from duplex.data.manifest import COLUMNS
from duplex.data.source_options import SplitOptions
from duplex.data.split import SplitResult, make_split, split_by_content
from duplex.errors import DuplexError, UsageError
from duplex.labels import SPLITS, LabelSpace


@dataclass(frozen=True)
class LabelledImages:
    """A data set in memory: table of images, labels, and notes on rows that were left out, such as repeated rows."""

    manifest: pd.DataFrame  # columns image, state, object, split; one row per image
    labels: LabelSpace
    notes: dict[str, int] = field(default_factory=dict)  # description of rows left out or pairs lacking -> count
    made_split: bool = False  # whether this package made the split
    contents: tuple[str, ...] | None = None  # key of each row's image content, where the split was made by contents


def labels_of(manifest: pd.DataFrame) -> LabelSpace:
    """The states and objects in a table of images (manifest), and per split the pairs that its images show.

    This is for data sets that do not come with lists of pairs.
    """
    pairs = {}
    for split in SPLITS:
        rows = manifest.loc[manifest["split"] == split, ["state", "object"]].drop_duplicates()
        pairs[split] = list(zip(rows["state"], rows["object"], strict=True))
    return LabelSpace.from_pairs(pairs)


def from_rows(
    frame: pd.DataFrame,
    options: SplitOptions,
    place: object,
    contents: Callable[[Sequence[str]], Sequence[str]] | None = None,
) -> LabelledImages:
    """Make a data set from a table with the columns image, state, object and, optionally, split.

    Without the column split, the rows are split at random.

    Args:
        contents: returns a key per image, equal for images of equal content, which a random split keeps together.
    """
    if frame.empty:
        raise DuplexError(f"{place} lists no images")
    repeated = frame.duplicated()
    notes = {"rows left out because they repeat another row": int(repeated.sum())}
    frame = frame[~repeated].reset_index(drop=True)
    twice = frame["image"].duplicated()
    if twice.any():
        image = frame.loc[twice, "image"].iloc[0]
        raise DuplexError(f"{place}: the image {image!r} has two different rows; an image has one label and one split")
    made_split = "split" not in frame
    keys = None
    if made_split:
        keys = None if contents is None else tuple(contents(frame["image"].tolist()))
        result = _split(frame, keys, options, place)
        frame = frame.assign(split=result.split)
        notes["unseen pairs fewer than requested, so that every state and object stays in training"] = result.short
    for split in SPLITS:
        if not (frame["split"] == split).any():
            raise DuplexError(
                f"{place} has no {split} images; list some, or leave out the column split to have one made"
            )
    notes = {text: count for text, count in notes.items() if count}
    return LabelledImages(frame[COLUMNS], labels_of(frame), notes, made_split, keys)


def _split(frame: pd.DataFrame, keys: Sequence[str] | None, options: SplitOptions, place: object) -> SplitResult:
    return make_split(frame, options, place) if keys is None else split_by_content(frame, keys, options, place)


FIRST_SEED = 1_000_000  # far from usual seeds of `split:`, which would give related splits


def split_name(dataset: str, number: int) -> str:
    """The name in params.yaml of a data set's re-split (same images, new random split), such as `zap-split1`."""
    return f"{dataset}-split{number}"


def resplit(data: LabelledImages, number: int) -> LabelledImages:
    """A data set with the same rows and another random split.

    Re-splits measure how much results depend on the choice of unseen pairs. The shares of unseen pairs and of held-out
    images stay the same. `number`: number of the re-split; the same number gives the same split.
    """
    rows = data.manifest
    result = _split(rows, data.contents, shares(rows, FIRST_SEED + number), "the data set")
    manifest = rows.assign(split=result.split.to_numpy())
    short = {"unseen pairs fewer than in the data set's own split": result.short} if result.short else {}
    return replace(data, manifest=manifest, labels=labels_of(manifest), notes={**data.notes, **short}, made_split=True)


def shares(rows: pd.DataFrame, seed: int) -> SplitOptions:
    """The split options that describe an existing split: shares of unseen pairs and of held-out images.

    Raises UsageError if validation or test lacks seen or unseen pairs.
    """
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
