"""Pictures for the tests."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_pictures(root: Path, count: int, seed: int = 0, size: tuple[int, int] = (48, 40)) -> list[str]:
    random = np.random.default_rng(seed)
    root.mkdir(parents=True, exist_ok=True)
    names = [f"{index:05d}.jpg" for index in range(count)]
    for name in names:
        Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(size).save(root / name, quality=90)
    return names
