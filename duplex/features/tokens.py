"""Patch tokens of a cache that holds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from duplex.features.layout import Half, open_file


def read_patches(path: Path) -> Half | None:
    """[N, T, w] float16 in memory, zero where the picture is bad; None where the cache holds none."""
    with open_file(path) as file:
        return np.asarray(file["patch"][...], dtype=np.float16) if "patch" in file else None
