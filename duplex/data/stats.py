"""Statistics of a data set, as in the paper's table, and the shares of images per frequency group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from duplex.labels import GROUPS, SPLITS, Ints, LabelSpace, frequency_groups


@dataclass(frozen=True)
class SplitCounts:
    """Numbers of pairs and images of a split."""

    seen: int  # listed pairs that are in training
    unseen: int  # listed pairs that are not
    images: int | None  # None if only pair lists are known


@dataclass(frozen=True)
class DatasetStatistics:
    """Counts of a data set."""

    states: int
    objects: int
    splits: dict[str, SplitCounts]
    shares: dict[str, dict[str, float]] | None  # split -> frequency group -> share of the split's images

    def to_dict(self) -> dict[str, Any]:
        train, val, test = (self.splits[split] for split in SPLITS)
        return {
            "states": self.states,
            "objects": self.objects,
            "train": {"seen": train.seen, "images": train.images},
            "val": {"seen": val.seen, "unseen": val.unseen, "images": val.images},
            "test": {"seen": test.seen, "unseen": test.unseen, "images": test.images},
            "shares": self.shares and {group: self.shares["train"][group] for group in GROUPS[:3]},
        }


def statistics(labels: LabelSpace, manifest: pd.DataFrame | None = None) -> DatasetStatistics:
    """Count the listed pairs, and the images of a manifest if there is one."""
    seen, shares = labels.seen, None
    images: dict[str, int | None] = dict.fromkeys(SPLITS)
    if manifest is not None:
        compositions = labels.index(manifest["state"].tolist(), manifest["object"].tolist())
        rows = {split: compositions[(manifest["split"] == split).to_numpy()] for split in SPLITS}
        images = {split: len(rows[split]) for split in SPLITS}
        shares = _shares(labels.size, rows)
    counts = {}
    for split in SPLITS:
        known = int(seen[labels.pairs[split]].sum())
        counts[split] = SplitCounts(known, len(labels.pairs[split]) - known, images[split])
    return DatasetStatistics(len(labels.states), len(labels.objects), counts, shares)


def _shares(size: int, rows: dict[str, Ints]) -> dict[str, dict[str, float]]:
    groups = frequency_groups(rows["train"], size)
    shares = {}
    for split in SPLITS:
        counted = np.bincount(groups.of(rows[split]), minlength=len(GROUPS))
        shares[split] = {name: float(counted[i] / max(1, counted.sum())) for i, name in enumerate(GROUPS)}
    return shares


def statistics_text(name: str, stats: DatasetStatistics) -> str:
    """Return the paper's row of counts as text, and the shares of images below it."""
    header = ["", "|S|", "|O|", "|S|x|O|", "C_s", "X_s", "val C_s", "C_u", "imgs", "test C_s", "C_u", "imgs"]
    train, val, test = (stats.splits[split] for split in SPLITS)
    counts = [stats.states, stats.objects, stats.states * stats.objects, train.seen, train.images]
    counts += [val.seen, val.unseen, val.images, test.seen, test.unseen, test.images]
    cells = [name, *("-" if count is None else f"{count:,}" for count in counts)]
    lines = _aligned([header, cells])
    if stats.shares:
        body = [[split, *(f"{stats.shares[split][group]:.1%}" for group in GROUPS)] for split in SPLITS]
        lines += ["", *_aligned([["images in", *GROUPS], *body])]
    return "\n".join(lines)


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
