"""The training pictures that are most like a picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplex.features.image_files import BadPicture, read_picture

THUMBNAIL = 96  # pixels


@dataclass(frozen=True)
class Neighbours:
    """Unit features of training pictures, and what they show."""

    features: NDArray[np.float32]  # [n, d]
    images: Sequence[str]
    states: Sequence[str]
    objects: Sequence[str]
    root: Path

    @classmethod
    def of(
        cls,
        features: NDArray[np.float32],
        images: Sequence[str],
        states: Sequence[str],
        objects: Sequence[str],
        root: Path,
    ) -> Neighbours:
        return cls(_unit(features), images, states, objects, root)

    def of_feature(self, feature: NDArray[np.float32], count: int) -> list[dict[str, Any]]:
        """The nearest by cosine, best first; each with a thumbnail as a data address, so that no file is served."""
        cosines = self.features @ _unit(feature)
        best = np.argsort(-cosines, kind="stable")[:count]
        return [
            {
                "image": self.images[row],
                "state": self.states[row],
                "object": self.objects[row],
                "cosine": round(float(cosines[row]), 4),
                "thumbnail": thumbnail(self.root / self.images[row]),
            }
            for row in best.tolist()
        ]


@lru_cache(maxsize=512)
def thumbnail(path: Path) -> str | None:
    """A small JPEG as a data address; None where the picture is not there."""
    try:
        picture = read_picture(path)
    except BadPicture:
        return None
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def _unit(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12), dtype=np.float32)
