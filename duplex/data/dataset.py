"""A data set in memory: its manifest, its labels and what was left out on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from duplex.data.manifest import COLUMNS
from duplex.data.names import check_labels
from duplex.data.split import make_split
from duplex.data.split_options import SplitOptions
from duplex.errors import DuplexError
from duplex.labels import SPLITS, LabelSpace


@dataclass(frozen=True)
class Dataset:
    manifest: pd.DataFrame  # columns image, state, object, split; one row an image
    labels: LabelSpace
    notes: dict[str, int] = field(default_factory=dict)  # what was left out or is short -> how many
    made_split: bool = False  # whether the split is ours, made by its options


def labels_of(manifest: pd.DataFrame) -> LabelSpace:
    """The labels of a data set whose rows are all there is: a pair is listed by the splits that show it."""
    pairs = {}
    for split in SPLITS:
        rows = manifest.loc[manifest["split"] == split, ["state", "object"]].drop_duplicates()
        pairs[split] = list(zip(rows["state"], rows["object"], strict=True))
    return LabelSpace.from_pairs(pairs)


def from_rows(frame: pd.DataFrame, options: SplitOptions, place: object) -> Dataset:
    """A data set from rows of one's own: image, state, object and, where it is given, split."""
    if frame.empty:
        raise DuplexError(f"{place} lists no images")
    check_labels(frame["state"], "state", place)
    check_labels(frame["object"], "object", place)
    repeated = frame.duplicated()
    notes = {"rows that repeat another row": int(repeated.sum())}
    frame = frame[~repeated].reset_index(drop=True)
    twice = frame["image"].duplicated()
    if twice.any():
        image = frame.loc[twice, "image"].iloc[0]
        raise DuplexError(f"{place}: the image {image!r} has two different rows; an image has one label and one split")
    made_split = "split" not in frame
    if made_split:
        made = make_split(frame, options, place)
        frame = frame.assign(split=made.split)
        notes["unseen pairs fewer than asked for, so that every primitive stays in training"] = made.short
    for split in SPLITS:
        if not (frame["split"] == split).any():
            raise DuplexError(f"{place} has no {split} images; list some, or leave the split out to have one made")
    notes = {text: count for text, count in notes.items() if count}
    return Dataset(frame[COLUMNS], labels_of(frame), notes, made_split)
