"""Cached features joined with labels: the data that training and evaluation work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.tokens import DiskTokens
from duplex.labels import SPLITS, Ints, LabelSpace

if TYPE_CHECKING:
    import pandas as pd

Arrays = Mapping[str, np.ndarray | DiskTokens]  # rows of a cache, by input name


@dataclass(frozen=True)
class Examples:
    """The cached features and labels of the readable images of one split."""

    rows: Ints  # manifest rows [n]
    inputs: Mapping[str, Tensor]  # cached inputs: {"cls": [n, d], "patch": [n, T, w], …}
    compositions: Tensor  # label of each image [n]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cls(self) -> Tensor:
        """CLS features [n, d] of the split's images."""
        return self.inputs["cls"]

    def to(self, device: torch.device) -> Examples:
        inputs = {name: values.to(device) for name, values in self.inputs.items()}
        return Examples(self.rows, inputs, self.compositions.to(device))


def join(manifest: pd.DataFrame, labels: LabelSpace, inputs: Arrays, bad: np.ndarray) -> dict[str, Examples]:
    """The examples of each split, without the images that could not be read (mask `bad`, [N]).

    Raises `DuplexError` if feature cache and manifest differ in length.
    """
    if len(manifest) != len(bad):
        raise DuplexError(
            f"the manifest has {len(manifest)} rows, its feature cache {len(bad)}; run `dvc repro extract`"
        )
    compositions = torch.from_numpy(labels.index(manifest["state"].tolist(), manifest["object"].tolist()))
    splits = manifest["split"].to_numpy()
    rows = {split: np.flatnonzero((splits == split) & ~bad) for split in SPLITS}
    return {split: Examples(chosen, _select(inputs, chosen), compositions[chosen]) for split, chosen in rows.items()}


def _select(inputs: Arrays, rows: Ints) -> dict[str, Any]:
    selected: dict[str, Any] = {}
    for name, values in inputs.items():
        selected[name] = values.at(rows) if isinstance(values, DiskTokens) else torch.from_numpy(values[rows])
    selected["cls"] = selected["cls"].float()  # tokens keep the type of the cache
    return selected
