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
from duplex.features.tokens import Some, Streamed
from duplex.features.views import Viewed, Views
from duplex.labels import SPLITS, Ints, LabelSpace

Arrays = Mapping[str, np.ndarray | Streamed | Some]  # what is cached of some rows


@dataclass(frozen=True)
class Examples:
    """The readable images of one split."""

    rows: Ints  # manifest rows [n]
    inputs: Mapping[str, Tensor]  # what is cached of them: {"cls": [n, d], "patch": [n, T, w]}
    compositions: Tensor  # [n]
    views: Views | None = None  # of the same images, to train on

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def z(self) -> Tensor:
        """The CLS features [n, d]."""
        return self.inputs["cls"]

    def to(self, device: torch.device) -> Examples:
        inputs = {name: values.to(device) for name, values in self.inputs.items()}
        views = None if self.views is None else self.views.to(device)
        return Examples(self.rows, inputs, self.compositions.to(device), views)


def join(
    manifest: pd.DataFrame, labels: LabelSpace, inputs: Arrays, bad: np.ndarray, viewed: Viewed | None = None
) -> dict[str, Examples]:
    """Examples of each split. Pictures that could not be read are left out, and reported by the evaluation; so are, of
    training's, those that have a view that could not be encoded."""
    if len(manifest) != len(bad):
        raise DuplexError(f"the manifest has {len(manifest)} rows, the cache {len(bad)}; `dvc repro extract` mends it")
    compositions = torch.from_numpy(labels.index(manifest["state"].tolist(), manifest["object"].tolist()))
    splits = manifest["split"].to_numpy()
    rows = {split: np.flatnonzero((splits == split) & ~bad) for split in SPLITS}
    views = None
    if viewed is not None:
        places = np.searchsorted(np.flatnonzero(splits == "train"), rows["train"])  # among the training pictures
        whole = viewed.whole[places]
        rows["train"], places = rows["train"][whole], places[whole]
        views = Views(viewed.count, _of(viewed.inputs, viewed.rows(places)))
    return {
        split: Examples(chosen, _of(inputs, chosen), compositions[chosen], views if split == "train" else None)
        for split, chosen in rows.items()
    }


def _of(inputs: Arrays, rows: Ints) -> dict[str, Any]:
    """CLS features in float32, tokens as they are cached: they are large, and may stay on the disk."""
    chosen: dict[str, Any] = {
        name: torch.from_numpy(values[rows]) if isinstance(values, np.ndarray) else values.at(rows)
        for name, values in inputs.items()
    }
    return {name: values.float() if name == "cls" else values for name, values in chosen.items()}
