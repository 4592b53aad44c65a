"""Count the states, objects, pairs and images of a data set; compare with the counts that benchmarks publish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from duplex.labels import GROUPS, SPLITS, LabelSpace, frequency_groups


@dataclass(frozen=True)
class SplitCounts:
    """Numbers of seen pairs, unseen pairs and images of a split."""

    seen: int  # listed pairs that are in training
    unseen: int  # listed pairs that are not
    images: int | None  # None if only pair lists are known


@dataclass(frozen=True)
class DatasetStatistics:
    """Numbers of states, objects, pairs and images of a data set."""

    states: int
    objects: int
    splits: dict[str, SplitCounts]
    shares: dict[str, dict[str, float]] | None  # split -> frequency group -> share of the split's images

    def to_dict(self) -> dict[str, Any]:
        train = self.splits["train"]
        return {
            "states": self.states,
            "objects": self.objects,
            "train": {"seen": train.seen, "images": train.images},
            "val": vars(self.splits["val"]).copy(),
            "test": vars(self.splits["test"]).copy(),
            "shares": self.shares and {group: self.shares["train"][group] for group in GROUPS[:3]},
        }


def count_dataset(labels: LabelSpace, manifest: pd.DataFrame | None = None) -> DatasetStatistics:
    """Count the listed pairs of a data set, and its images if there is a table of them (manifest)."""
    seen = labels.seen
    shares: dict[str, dict[str, float]] | None = None
    images: dict[str, int | None] = dict.fromkeys(SPLITS)
    if manifest is not None:
        compositions = labels.index(manifest["state"].tolist(), manifest["object"].tolist())
        rows = {split: compositions[(manifest["split"] == split).to_numpy()] for split in SPLITS}
        images = {split: len(rows[split]) for split in SPLITS}
        groups = frequency_groups(rows["train"], labels.size)
        shares = {}
        for split in SPLITS:
            counted = np.bincount(groups.groups_of(rows[split]), minlength=len(GROUPS))
            shares[split] = {name: float(counted[i] / max(1, counted.sum())) for i, name in enumerate(GROUPS)}
    counts = {}
    for split in SPLITS:
        known = int(seen[labels.pairs[split]].sum())
        counts[split] = SplitCounts(known, len(labels.pairs[split]) - known, images[split])
    return DatasetStatistics(len(labels.states), len(labels.objects), counts, shares)


def statistics_text(name: str, stats: DatasetStatistics) -> str:
    """A data set's statistics as text: a table of its counts, and the share of images in each frequency group.

    Groups of compositions are head, medium, tail (by number of training images) and unseen.
    """
    header = ["", "|S|", "|O|", "|S|x|O|", "C_s", "X_s", "val C_s", "C_u", "imgs", "test C_s", "C_u", "imgs"]
    train = stats.splits["train"]
    counts = [stats.states, stats.objects, stats.states * stats.objects, train.seen, train.images]
    for split in ("val", "test"):
        counts += vars(stats.splits[split]).values()
    cells = [name, *("-" if count is None else f"{count:,}" for count in counts)]
    lines = _aligned([header, cells])
    if stats.shares:
        body = [[split, *(f"{stats.shares[split][group]:.1%}" for group in GROUPS)] for split in SPLITS]
        lines += ["", *_aligned([["images in", *GROUPS], *body])]
    return "\n".join(lines)


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def _published(states: int, objects: int, **splits: tuple[int, int, int]) -> DatasetStatistics:
    counts = {split: SplitCounts(*numbers) for split, numbers in splits.items()}
    return DatasetStatistics(states, objects, counts, None)


# The paper prints 19,191 test images for MIT-States, a misprint: the published split has 12,995.
# For C-GQA's validation pairs many papers, this one too, print the seen and the unseen count the wrong way round.
PUBLISHED_COUNTS = {
    "mit-states": _published(115, 245, train=(1262, 0, 30338), val=(300, 300, 10420), test=(400, 400, 12995)),
    "ut-zappos": _published(16, 12, train=(83, 0, 22998), val=(15, 15, 3214), test=(18, 18, 2914)),
    "cgqa": _published(413, 674, train=(5592, 0, 26920), val=(1040, 1252, 7280), test=(888, 923, 5098)),
}


def published_differences(name: str, stats: DatasetStatistics) -> list[str]:
    """One line per count of a data set that differs from the published count.

    The list is empty for a data set without published counts.
    """
    published = PUBLISHED_COUNTS.get(name)
    if published is None:
        return []
    rows = [("states", stats.states, published.states), ("objects", stats.objects, published.objects)]
    for split, counts in stats.splits.items():
        for field, what in (("seen", "seen pairs"), ("unseen", "unseen pairs"), ("images", "images")):
            rows.append((f"{split} {what}", getattr(counts, field), getattr(published.splits[split], field)))
    return [f"{what}: {count:,}, published {known:,}" for what, count, known in rows if count not in (None, known)]
