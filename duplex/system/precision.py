"""Precisions that a frozen encoder can run in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from duplex.errors import require

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def dtype_of(precision: str) -> torch.dtype:
    """Return the torch type of a precision."""
    import torch

    types = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return types[require(precision, PRECISIONS, "precision")]
