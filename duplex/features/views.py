"""Views of training images in memory or on the disk, of which every epoch draws one an image.

A cache of views is a cache: row `i v + k` is view `k` of the data set's `i`-th training picture. Evaluation, and what a
method makes of the training images before and between epochs, read the plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.features.tokens import Some, Streamed
from duplex.labels import Ints


@dataclass(frozen=True)
class Viewed:
    """A cache of views, whole: those of all training pictures of a data set."""

    count: int  # v
    inputs: Mapping[str, np.ndarray | Streamed | Some]  # [N v, ...]
    bad: NDArray[np.bool_]  # [N v]

    @property
    def whole(self) -> NDArray[np.bool_]:
        """[N] Of which pictures every view was encoded."""
        return np.logical_not(self.bad.reshape(-1, self.count).any(axis=1))

    def rows(self, pictures: Ints) -> Ints:
        """Of all views of some pictures."""
        return (pictures[:, None] * self.count + np.arange(self.count)).ravel()


@dataclass(frozen=True)
class Views:
    """What is cached of the views of a split's images: {"cls": [n v, d], "deep": [n v, ...]}."""

    count: int  # v
    inputs: Mapping[str, Tensor | Streamed]

    def drawn(self, order: torch.Generator) -> dict[str, Any]:
        """One view of every image [n, ...]."""
        images = len(self.inputs["cls"]) // self.count
        rows = torch.arange(images) * self.count + torch.randint(self.count, (images,), generator=order)
        return {
            name: values.at(rows.numpy()) if isinstance(values, Streamed) else values[rows.to(values.device)]
            for name, values in self.inputs.items()
        }

    def to(self, device: torch.device) -> Views:
        return Views(self.count, {name: values.to(device) for name, values in self.inputs.items()})
