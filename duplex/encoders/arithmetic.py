"""TF32 on GPUs only where it was asked for.

By default torch lets cuDNN's convolutions round their factors to TF32's ten bits of mantissa, which changes features
by about a thousandth. Here "fp32" means float32, and the faster "tf32" is a precision of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_arithmetic(precision: str) -> Iterator[None]:
    """Allow TF32 in convolutions and matrix products inside the block if `precision` is "tf32", and forbid it
    otherwise. A backward pass must run inside the block, too. No effect without a GPU."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before
