"""The tiny CLIP that ships with the package: half-precision weights and only the vocabulary that it has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from duplex.errors import DuplexError

ROWS = "token_rows"


def read_weights(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The full state: tokens without a stored row are NaN, which the text tower refuses by name."""
    stored = _read(path)
    rows = stored.pop(ROWS).long()
    for name in list(stored):
        if name.endswith("token_embedding.weight"):
            full = torch.full(expected[name].shape, torch.nan)
            full[rows] = stored[name].float()
            stored[name] = full
    return {name: tensor.to(expected[name].dtype) for name, tensor in stored.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DuplexError(f"{path} cannot be read ({error}); reinstall the package") from error
