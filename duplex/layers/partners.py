"""Which image of a batch an image is set beside, where a loss compares two that share a primitive."""

from __future__ import annotations

import torch
from torch import Tensor


def next_partner(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Of each image the first one after it, in the batch's order taken as a circle, that is `allowed` [B, B] and not
    itself; and whether there is one. Without one, the partner is the image itself."""
    count = len(allowed)
    place = torch.arange(count, device=allowed.device)
    after = (place[None] - place[:, None]) % max(count, 1)  # 0 is the image itself
    free = allowed & (after > 0)
    if not count:
        return place, free.any(1)
    distance = after.masked_fill(~free, count)
    found = free.any(1)
    return torch.where(found, distance.argmin(1), place), found
