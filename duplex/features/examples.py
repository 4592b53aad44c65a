"""Cached features joined with labels: the data that training and evaluation work on.

A cache of views (random crops of training images, of which every epoch draws one per image) is a feature cache: with v
views per image, row `i v + k` is view `k` of the data set's `i`-th training image. Evaluation, and whatever a method
computes from the training images before and between epochs, read the plain images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.tokens import DiskTokens
from duplex.labels import SPLITS, Ints, LabelSpace

if TYPE_CHECKING:
    import pandas as pd

Arrays = Mapping[str, np.ndarray | DiskTokens]  # rows of a cache, by input name


@dataclass(frozen=True)
class ViewCache:
    """The cached encoder outputs of all views of a data set's N training images."""

    count: int  # views per image, v
    inputs: Arrays  # [N v, ...]
    bad: NDArray[np.bool_]  # [N v]

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Mask [N] of the training images whose views were all encoded."""
        return np.logical_not(self.bad.reshape(-1, self.count).any(axis=1))

    def rows(self, images: Ints) -> Ints:
        """Return the cache rows of all views of the training images with these numbers."""
        return (images[:, None] * self.count + np.arange(self.count)).ravel()


@dataclass(frozen=True)
class SplitViews:
    """The cached views of a split's n images, v per image: {"cls": [n v, d], "block_inputs": [n v, ...]}."""

    count: int  # views per image, v
    inputs: Mapping[str, Tensor | DiskTokens]

    def draw(self, generator: torch.Generator) -> dict[str, Any]:
        """Return the features of one random view of every image: {name: [n, ...]}."""
        images = len(self.inputs["cls"]) // self.count
        rows = torch.arange(images) * self.count + torch.randint(self.count, (images,), generator=generator)
        return {
            name: values.at(rows.numpy()) if isinstance(values, DiskTokens) else values[rows.to(values.device)]
            for name, values in self.inputs.items()
        }

    def to(self, device: torch.device) -> SplitViews:
        return SplitViews(self.count, {name: values.to(device) for name, values in self.inputs.items()})


@dataclass(frozen=True)
class Examples:
    """The cached features and labels of the readable images of one split."""

    rows: Ints  # manifest rows [n]
    inputs: Mapping[str, Tensor]  # cached inputs: {"cls": [n, d], "patch": [n, T, w], …}
    compositions: Tensor  # label of each image [n]
    views: SplitViews | None = None  # views of the same images, to train on

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cls(self) -> Tensor:
        """The CLS features [n, d]."""
        return self.inputs["cls"]

    def to(self, device: torch.device) -> Examples:
        inputs = {name: values.to(device) for name, values in self.inputs.items()}
        views = None if self.views is None else self.views.to(device)
        return Examples(self.rows, inputs, self.compositions.to(device), views)


def join(
    manifest: pd.DataFrame, labels: LabelSpace, inputs: Arrays, bad: np.ndarray, view_cache: ViewCache | None = None
) -> dict[str, Examples]:
    """Return the examples (cached features with labels) of each split.

    Images that could not be read (mask `bad`, [N]) are left out, and so are training images with a view that could not
    be encoded. Raises `DuplexError` if cache and manifest differ in length.
    """
    if len(manifest) != len(bad):
        raise DuplexError(f"the manifest has {len(manifest)} rows, the cache {len(bad)}; run `dvc repro extract`")
    compositions = torch.from_numpy(labels.index(manifest["state"].tolist(), manifest["object"].tolist()))
    splits = manifest["split"].to_numpy()
    rows = {split: np.flatnonzero((splits == split) & ~bad) for split in SPLITS}
    views = None
    if view_cache is not None:
        images = np.searchsorted(np.flatnonzero(splits == "train"), rows["train"])  # numbers among the training images
        complete = view_cache.complete[images]
        rows["train"] = rows["train"][complete]
        views = SplitViews(view_cache.count, _select(view_cache.inputs, view_cache.rows(images[complete])))
    return {
        split: Examples(chosen, _select(inputs, chosen), compositions[chosen], views if split == "train" else None)
        for split, chosen in rows.items()
    }


def _select(inputs: Arrays, rows: Ints) -> dict[str, Any]:
    """Return some rows of each input: CLS features in float32, tokens as cached (large, maybe on the disk)."""
    selected: dict[str, Any] = {
        name: values.at(rows) if isinstance(values, DiskTokens) else torch.from_numpy(values[rows])
        for name, values in inputs.items()
    }
    return {name: values.float() if name == "cls" else values for name, values in selected.items()}
