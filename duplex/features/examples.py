"""Cached features joined with labels: what training and evaluation hold in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.labels import SPLITS, Ints, LabelSpace


@dataclass(frozen=True)
class Examples:
    """The readable images of one split."""

    rows: Ints  # manifest rows [n]
    z: Tensor  # cached features [n, d]
    compositions: Tensor  # [n]

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> Examples:
        return Examples(self.rows, self.z.to(device), self.compositions.to(device))


def join(manifest: pd.DataFrame, labels: LabelSpace, features: np.ndarray, bad: np.ndarray) -> dict[str, Examples]:
    """Examples of each split. Pictures that could not be read are left out; the evaluation reports their number."""
    if len(manifest) != len(features):
        raise DuplexError(
            f"the manifest has {len(manifest)} rows, the cache {len(features)}; `dvc repro extract` mends it"
        )
    compositions = labels.index(manifest["state"].tolist(), manifest["object"].tolist())
    splits = manifest["split"].to_numpy()
    return {split: _pick(np.flatnonzero((splits == split) & ~bad), features, compositions) for split in SPLITS}


def _pick(rows: Ints, features: np.ndarray, compositions: Ints) -> Examples:
    return Examples(rows, torch.from_numpy(features[rows]).float(), torch.from_numpy(compositions[rows]))
