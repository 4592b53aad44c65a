"""Search for the training images that are most similar to an image."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from duplex.data.image_files import thumbnail
from duplex.evaluation.retrieval import most_similar

cached_thumbnail = lru_cache(maxsize=512)(thumbnail)


@dataclass(frozen=True)
class Neighbours:
    """Index of n training images, to find those that are most similar to an image."""

    features: NDArray[np.float32]  # [n, d]
    manifest: pd.DataFrame  # paths and labels, one line per image
    root: Path  # folder that the paths are relative to

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", _unit(self.features))

    def nearest(self, feature: NDArray[np.float32], count: int) -> list[dict[str, Any]]:
        """Path, labels, cosine and thumbnail of the `count` training images nearest to a feature, best first."""
        best, cosines = most_similar(_unit(feature)[None], self.features, count)
        records: list[Any] = self.manifest.iloc[best[0]][["image", "state", "object"]].to_dict("records")
        return [
            {**record, "cosine": round(float(cosine), 4), "thumbnail": cached_thumbnail(self.root / record["image"])}
            for record, cosine in zip(records, cosines[0], strict=True)
        ]


def _unit(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12), dtype=np.float32)
