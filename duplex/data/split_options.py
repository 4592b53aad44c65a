"""What a split to be made takes from the data: the one home of these options and their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from duplex.errors import UsageError


@dataclass(frozen=True)
class SplitOptions:
    """Shares of the pairs that become unseen, and of the seen pairs' images that leave training."""

    seed: int = 0
    val_unseen: float = 0.15
    test_unseen: float = 0.15
    val_images: float = 0.1
    test_images: float = 0.2

    def __post_init__(self) -> None:
        for kind in ("unseen", "images"):
            shares = [getattr(self, f"{split}_{kind}") for split in ("val", "test")]
            if not (all(0 < share < 1 for share in shares) and sum(shares) < 1):
                raise UsageError(f"split: val_{kind} and test_{kind} are {shares}; each is above 0, together below 1")
