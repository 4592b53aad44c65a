"""Run an image tower's frozen blocks once for all images, so that steps begin at the first trained block."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.encoders.base import Encoder
from duplex.encoders.image_blocks import TowerBlocks, block_count, block_input_shape, last_blocks, stem
from duplex.system.processes import ProgressBar
from duplex.system.threads import bf16_products, float32_arithmetic

AT_ONCE = 256  # images


def advanced_inputs(values: Any, tower: Encoder, stored: int, blocks: int, precision: str) -> NDArray[np.float16]:
    """Inputs of the last `blocks` blocks of all images, from those of the last `stored` ones."""
    first = last_blocks(tower, stored).blocks[: stored - blocks]
    return _run(values, tower, Tensor.float, first, precision)


def advanced_pixels(
    pixels: Any, tower: Encoder, blocks: int, precision: str, limit: float
) -> NDArray[np.float16] | None:
    """The same from pixels [N, 3, R, R]; None if the inputs exceed `limit` bytes, or float16's range."""
    size = math.prod(block_input_shape(tower, blocks)) * 2  # bytes of an image
    if len(pixels) * size > limit:
        return None
    total = block_count(tower)
    first = last_blocks(tower, total).blocks[: total - blocks]
    outputs = _run(pixels, tower, stem(tower), first, precision)
    return outputs if np.isfinite(outputs).all() else None


def _run(
    values: Any, tower: Encoder, begin: Callable[[Tensor], Tensor], first: TowerBlocks, precision: str
) -> NDArray[np.float16]:
    outputs = []
    bar = ProgressBar("images through the frozen blocks", len(values))
    with torch.no_grad(), float32_arithmetic(precision), bf16_products(precision, tower.device), bar:
        for start in range(0, len(values), AT_ONCE):
            x = begin(torch.as_tensor(values[start : start + AT_ONCE]).to(tower.device))
            for block in first:
                x = block(x)
            outputs.append(x.half().cpu().numpy())
            bar.show(start + len(x))
    return np.concatenate(outputs)
