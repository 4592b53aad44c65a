"""Tokens in eight bits: each in steps of a size of its own.

A token `y [w]`, which in a feature map is one place over all channels, is kept as `q = round(y / s)` in int8 with
`s = max_i |y_i| / 127` in float16, and read as `s q` in float16: no number is off by more than half a step and what
float16 rounds, of the step too (which counts where all of a token is below some 1e-3). Half the bytes of float16, and
two more a token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Half = NDArray[np.float16]
MOST = 127
ROWS = 4096  # restored at once


def coded(y: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T, w] or [B, C, H, W] float16 -> q int8 of that shape, and s [B, T] or [B, H, W] float16."""
    axis, wide = 1 if y.ndim == 4 else 2, y.float()
    s = (wide.abs().amax(axis, keepdim=True) / MOST).half()
    q = (wide / s.float()).nan_to_num(0, 0, 0).round().clamp(-MOST, MOST)  # 0 / 0: a token of zeros
    return q.to(torch.int8), s.squeeze(axis)


def restored(q: NDArray[np.int8], s: Half) -> Half:
    """s q, of the codes' shape."""
    axis, found = 1 if q.ndim == 4 else 2, np.empty(q.shape, np.float16)
    for start in range(0, len(q), ROWS):
        rows = slice(start, start + ROWS)
        found[rows] = q[rows] * np.expand_dims(s[rows], axis).astype(np.float32)
    return found
