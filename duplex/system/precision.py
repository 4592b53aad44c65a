"""Precisions that a frozen encoder can run in; TF32 on GPUs only on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

from duplex.errors import require

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def dtype_of(precision: str) -> torch.dtype:
    """The torch dtype of numbers in a precision."""
    import torch

    types = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return types[require(precision, PRECISIONS, "precision")]


@contextmanager
def float32_arithmetic(precision: str) -> Iterator[None]:
    """Allow TF32 on GPUs in the `with` block if `precision` is "tf32", and forbid it otherwise.

    TF32 changes features by about a thousandth; torch allows it in convolutions by default. A backward pass must run
    inside the block, too.
    """
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before
