"""Options of data sets: their kind and location, and the split to make for data without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from duplex.errors import UsageError
from duplex.options import STRICT, Count, Seed, Share

CHECKED = ConfigDict(**STRICT, extra="forbid")  # of values in params.yaml
Kind = Literal["shapes", "standard", "table", "folder"]  # drawn, the benchmarks' layout, a table, state/object/*.jpg


@dataclass(frozen=True)
class SplitOptions:
    """Shares of pairs and images that a random split holds out for validation and test.

    Raises UsageError unless the shares are above 0, and those of pairs and of images each have a sum below 1.
    """

    seed: Seed = 0  # of the random choice
    val_unseen: Share = 0.15  # share of the pairs that are unseen, with images in validation only
    test_unseen: Share = 0.15  # share of the pairs that are unseen, with images in test only
    val_images: Share = 0.1  # share of each seen pair's images
    test_images: Share = 0.2  # share of each seen pair's images
    __pydantic_config__ = CHECKED

    def __post_init__(self) -> None:
        for kind in ("unseen", "images"):
            shares = [getattr(self, f"{split}_{kind}") for split in ("val", "test")]
            if not (all(0 < share < 1 for share in shares) and sum(shares) < 1):
                raise UsageError(
                    f"split: val_{kind} and test_{kind} are {shares}; expected numbers above 0 with a sum below 1"
                )


@dataclass(frozen=True)
class SourceOptions:
    """Kind (folder, table, benchmark or drawn) and location of a data set, and how it is split."""

    kind: Kind
    root: Path  # folder that image paths are relative to
    table: Path | None = None  # for kind "table"
    seed: Seed = 7  # of the drawn images of kind "shapes"
    split: SplitOptions = field(default_factory=SplitOptions)  # the split to make for data without one
    resplit: Count | None = None  # number of a new random split (`duplex data split`); null: the data set's own
    __pydantic_config__ = CHECKED

    @property
    def recorded_root(self) -> str | None:
        """The folder of the images as params.yaml gives it, which a feature cache records.

        None for the drawn benchmark `shapes`, whose images are the same in every folder.
        """
        return None if self.kind == "shapes" else self.root.as_posix()
