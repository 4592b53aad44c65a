"""Measure `in_distribution`: python -m benchmarks.unknown [--encoder NAME] [--weights FILE] [--json] NAME=SOURCE ...

Each source, a folder or a table of labelled images (TABLE:FOLDER of its images), gets a detector of unknown images, as
training fits it. Listed in per cent: the test images of seen and of unseen pairs that it keeps, and the images of every
other source that it refuses. `textures` is drawn: seven textures in eight colours. `unlike` are those that resemble no
drawn image that the detector is fitted with. Fine-tuned blocks change nothing, as distances are those of the encoder's
own features.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.measure import emit, options, say
from duplex import load_dataset
from duplex.data.shapes import OBJECTS, STATES
from duplex.training.novelty import NoveltyDetector

SIDE, DRAWN = 96, 20  # pixels; images of a pair
COLOURS = {
    "red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200), "yellow": (220, 200, 60),
    "grey": (128, 128, 128), "brown": (120, 80, 40), "pink": (230, 130, 180), "cyan": (60, 190, 200),
}  # fmt: skip
TEXTURES = ("noise", "gradient", "grating", "clouds", "tiles", "cells", "cracks")
UNLIKE = OBJECTS[4:7]  # tiles, cells and cracks, as `draw_textures` names them


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--weights")
    given = parser.parse_args()
    sets = {}
    with TemporaryDirectory() as folder:
        draw_textures(Path(folder))
        for text in [*given.sources, f"textures={folder}"]:
            name, place = text.split("=", 1)
            source, _, images = place.partition(":")
            sets[name] = load_dataset(source, images=images or None, encoder=given.encoder, weights=given.weights)
        record = {name: measured(name, sets) for name in sets}
    emit(record) if given.json else say(str(record))


def draw_textures(root: Path) -> None:
    """Draw a folder with a state per colour and an object per texture, named by words that each encoder knows."""
    for i, rgb in enumerate(COLOURS.values()):
        for j, texture in enumerate(TEXTURES):
            place = root / STATES[i] / OBJECTS[j]
            place.mkdir(parents=True)
            for number in range(DRAWN):
                rng = np.random.default_rng([0, i, j, number])
                low = np.array(rgb) * rng.uniform(0.2, 0.5)
                high = np.clip(np.array(rgb) * rng.uniform(0.9, 1.2) + rng.normal(0, 12, 3), 0, 255)
                light = np.clip(plane(texture, rng), 0, 1)[..., None]
                image = low + (high - low) * light + rng.normal(0, rng.uniform(0, 10), (SIDE, SIDE, 1))
                drawn = Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))
                drawn.save(place / f"{number:03d}.png")


def plane(texture: str, rng: np.random.Generator) -> Any:
    """The light [SIDE, SIDE] of a texture, mostly in 0 to 1."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE - 0.5
    turn, rate = rng.uniform(0, np.pi), rng.uniform(5, 14)
    along = x * np.cos(turn) + y * np.sin(turn)
    across = y * np.cos(turn) - x * np.sin(turn)

    def soft(cells: int) -> Any:
        grid = Image.fromarray(rng.random((cells, cells)).astype(np.float32))
        return np.asarray(grid.resize((SIDE, SIDE), Image.Resampling.BICUBIC))

    points = rng.random((int(rng.integers(12, 40)), 2)) - 0.5
    far = np.sort(np.hypot(x[..., None] - points[:, 0], y[..., None] - points[:, 1]), -1)
    return {
        "noise": lambda: rng.random((SIDE, SIDE)),
        "gradient": lambda: along + 0.5,
        "grating": lambda: 0.5 + 0.5 * np.sin(2 * np.pi * rate * along),
        "clouds": lambda: 0.6 * soft(4) + 0.4 * soft(10),
        "tiles": lambda: (np.floor(rate * along) + np.floor(rate * across)) % 2,
        "cells": lambda: 4 * far[..., 0],
        "cracks": lambda: 12 * (far[..., 1] - far[..., 0]),
    }[texture]()


def measured(name: str, sets: dict[str, Any]) -> dict[str, float]:
    """Percentages for the detector of one source: `kept` of its test images, `refused` of the others' images."""
    inputs, labels = sets[name].inputs(), sets[name].labels
    own = inputs.examples
    detector = NoveltyDetector.fit(own["train"], own["val"], labels, inputs.negatives)
    is_seen = torch.from_numpy(labels.is_seen(own["test"].compositions.numpy()))
    groups = {"kept_seen": own["test"].cls[is_seen], "kept_unseen": own["test"].cls[~is_seen]}
    for other, data in sets.items():
        if other == name:
            continue
        split = data.inputs().examples
        cls = torch.cat([part.cls for part in split.values()])
        groups[f"refused_{other}"] = cls
        if other == "textures":
            rows = np.concatenate([part.rows for part in split.values()])
            unlike = data.manifest["object"].isin(UNLIKE).to_numpy()[rows]
            groups["refused_unlike"] = cls[torch.from_numpy(unlike)]
    record = {}
    for what, cls in groups.items():
        kept = 100 * float((detector.distances(cls) <= detector.threshold).double().mean())
        record[what] = round(100 - kept if what.startswith("refused") else kept, 1)
    return record


if __name__ == "__main__":
    main()
