"""Block inputs in eight bits: each token has a step size of its own.

A token `y [w]` (in a feature map: one place, over all channels) is stored as `q = round(y / s)` in int8 with the scale
`s = max_i |y_i| / 127` in float16, and read as `s q`: off by at most half a step, and the rounding of float16.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.features.layout import Half

LARGEST_CODE = 127
ROWS = 4096  # dequantised at once


def quantize(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes q (int8, of the shape of `y`) and scales s (float16) of tokens.

    y: [B, T, w] or [B, C, H, W] float16; s: [B, T] or [B, H, W].
    """
    axis = 1 if y.ndim == 4 else 2
    wide = y.float()
    s = (wide.abs().amax(axis, keepdim=True) / LARGEST_CODE).half()
    q = (wide / s.float()).nan_to_num(0, 0, 0).round().clamp(-LARGEST_CODE, LARGEST_CODE)  # 0 / 0: a token of zeros
    return q.to(torch.int8), s.squeeze(axis)


def dequantize(q: NDArray[np.int8], s: Half) -> Half:
    """Return s q in float16, of the shape of `q`; shapes as in `quantize`."""
    axis = 1 if q.ndim == 4 else 2
    y = np.empty(q.shape, np.float16)
    for start in range(0, len(q), ROWS):
        rows = slice(start, start + ROWS)
        y[rows] = q[rows] * np.expand_dims(s[rows], axis).astype(np.float32)
    return y
