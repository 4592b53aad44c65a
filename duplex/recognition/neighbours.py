"""Search for the training images that are most similar to an image."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from duplex.data.image_files import BadImageFile, read_image

THUMBNAIL = 96  # pixels


@dataclass(frozen=True)
class Neighbours:
    """Index of training images, to find those that are most similar to an image.

    features: features of the n training images [n, d].
    manifest: the images' paths and labels.
    root: folder that the paths are relative to.
    """

    features: NDArray[np.float32]
    manifest: pd.DataFrame
    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", _unit(self.features))

    def nearest(self, feature: NDArray[np.float32], count: int) -> list[dict[str, Any]]:
        """Path, labels, cosine and thumbnail of the `count` training images nearest to a feature, best first."""
        cosines = self.features @ _unit(feature)
        best = np.argsort(-cosines, kind="stable")[:count]
        records: list[Any] = self.manifest.iloc[best][["image", "state", "object"]].to_dict("records")
        return [
            {**record, "cosine": round(float(cosine), 4), "thumbnail": thumbnail(self.root / record["image"])}
            for record, cosine in zip(records, cosines[best], strict=True)
        ]


@lru_cache(maxsize=512)
def thumbnail(path: Path) -> str | None:
    """An image file as a small JPEG in a data URL; None if it cannot be read."""
    try:
        image = read_image(path)
    except BadImageFile:
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def _unit(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12), dtype=np.float32)
