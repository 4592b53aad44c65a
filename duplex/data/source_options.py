"""Options of data sets: their kind and place, and how one without a split is divided."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from duplex.errors import UsageError

Kind = Literal["shapes", "standard", "table", "folder"]  # drawn, the benchmarks' layout, a table, state/object/*.jpg


@dataclass(frozen=True)
class SplitOptions:
    """Shares of the pairs and images that a split holds out; raises UsageError unless they lie between 0 and 1."""

    seed: int = 0
    val_unseen: float = 0.15  # share of the pairs that become unseen pairs of validation
    test_unseen: float = 0.15  # and of test
    val_images: float = 0.1  # share of the other pairs' images that go to validation
    test_images: float = 0.2  # and to test

    def __post_init__(self) -> None:
        for kind in ("unseen", "images"):
            shares = [getattr(self, f"{split}_{kind}") for split in ("val", "test")]
            if not (all(0 < share < 1 for share in shares) and sum(shares) < 1):
                raise UsageError(
                    f"split: val_{kind} and test_{kind} are {shares}; expected numbers above 0 with a sum below 1"
                )


@dataclass(frozen=True)
class SourceOptions:
    """Kind and place of a data set, and how it is split."""

    kind: Kind
    root: Path  # folder that image paths are relative to
    table: Path | None = None  # for kind "table"
    seed: int = 7  # of the drawn images of kind "shapes"
    split: SplitOptions = field(default_factory=SplitOptions)  # used if the data come without a split
    resplit: int | None = None  # number of a random re-split; None keeps the data's own split
