"""Check image features that a user computed, and convert them from arrays or tensors to a float32 matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from duplex.errors import UsageError

SHORTEST = 1e-12  # length of a feature below which `torch.nn.functional.normalize` does not make it a unit vector


def as_numpy(value: Any) -> Any:
    """A tensor as a NumPy array, floats in float32 (NumPy has no bfloat16); other values unchanged.

    Raises UsageError for a sparse, quantised or meta tensor, and for a NumPy array with masked numbers.
    """
    if np.ma.is_masked(value):
        raise UsageError("features is a masked array with masked numbers; leave their images out")
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise UsageError(
            f"features is a tensor of {value.layout}, {value.dtype} on {value.device}; "
            "expected a dense tensor with values"
        )
    values = value.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()


def checked_features(features: Any) -> NDArray[np.float32]:
    """Features, one row per image, as float32 [N, d].

    Raises UsageError for another shape, for numbers that are not finite, and for a row of zeros.
    """
    try:
        values = np.asarray(as_numpy(features))
    except ValueError:
        raise UsageError("features has rows of different lengths; expected floats [images, width]") from None
    if values.ndim != 2 or values.dtype.kind != "f" or 0 in values.shape:
        raise UsageError(f"features has the shape {values.shape} of {values.dtype}; expected floats [images, width]")
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.array(values, dtype=np.float32)
        length = np.sqrt(np.square(single).sum(axis=1))
    for is_bad, problem in (
        (~np.isfinite(single).all(axis=1), "NaN or infinity"),
        (~np.isfinite(length), "numbers so large that their squares overflow"),
        (length < SHORTEST, "only zeros, or numbers that are nearly zero,"),
    ):
        bad = np.flatnonzero(is_bad)
        if bad.size:
            raise UsageError(
                f"features has {problem} in {bad.size} of {len(single)} rows, first in row {bad[0]}; "
                "leave these images out"
            )
    return single
