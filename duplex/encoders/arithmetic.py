"""What a GPU's float32 products are made of.

torch lets cuDNN's convolutions round their factors to TF32's ten bits of mantissa unless told otherwise, a thousandth
of a feature, under the name of float32. Here fp32 means fp32, and tf32, which is faster, has to be asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """TF32 in convolutions and matrix products inside, or not at all. A backward pass belongs inside too: it follows
    what holds when it runs. Without a GPU there is nothing to choose, and no GPU is looked for."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, products.allow_tf32
    cudnn.allow_tf32 = products.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.allow_tf32, products.allow_tf32 = before
