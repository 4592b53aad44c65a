"""Cached features joined with labels: what training and evaluation hold in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.tokens import Streamed
from duplex.labels import SPLITS, Ints, LabelSpace


@dataclass(frozen=True)
class Examples:
    """The readable images of one split."""

    rows: Ints  # manifest rows [n]
    inputs: Mapping[str, Tensor]  # what is cached of them: {"cls": [n, d], "patch": [n, T, w]}
    compositions: Tensor  # [n]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def z(self) -> Tensor:
        """The CLS features [n, d]."""
        return self.inputs["cls"]

    def to(self, device: torch.device) -> Examples:
        inputs = {name: values.to(device) for name, values in self.inputs.items()}
        return Examples(self.rows, inputs, self.compositions.to(device))


def join(
    manifest: pd.DataFrame, labels: LabelSpace, inputs: Mapping[str, np.ndarray | Streamed], bad: np.ndarray
) -> dict[str, Examples]:
    """Examples of each split. Pictures that could not be read are left out; the evaluation reports their number."""
    if len(manifest) != len(bad):
        raise DuplexError(f"the manifest has {len(manifest)} rows, the cache {len(bad)}; `dvc repro extract` mends it")
    compositions = labels.index(manifest["state"].tolist(), manifest["object"].tolist())
    splits = manifest["split"].to_numpy()
    return {split: _pick(np.flatnonzero((splits == split) & ~bad), inputs, compositions) for split in SPLITS}


def _pick(rows: Ints, inputs: Mapping[str, np.ndarray | Streamed], compositions: Ints) -> Examples:
    """CLS features in float32, tokens as they are cached: they are large, and may stay on the disk."""
    chosen: dict[str, Any] = {
        name: values.at(rows) if isinstance(values, Streamed) else torch.from_numpy(values[rows])
        for name, values in inputs.items()
    }
    chosen = {name: values.float() if name == "cls" else values for name, values in chosen.items()}
    return Examples(rows, chosen, torch.from_numpy(compositions[rows]))
