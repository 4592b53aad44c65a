"""The training corpus of the tiny CLIP: drawn images of a mild style, with partly wrong or incomplete captions.

It has more states and objects than the benchmark and images with two states, and shares neither seed, style nor any
image with it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from duplex.data import shapes
from duplex.data.shapes import (
    ImageStyle,
    Look,
    Outline,
    Points,
    _closed,
    _lobes,
    _polar,
    _regular,
    draw_image,
    random_stream,
)


def _leaf() -> Points:
    t = np.linspace(0, np.pi, 40, endpoint=False)
    x = np.concatenate([np.cos(t), -np.cos(t)])
    y = np.concatenate([0.5 * np.sin(t) ** 1.5, -0.5 * np.sin(t) ** 1.5])
    return np.stack([x, y], axis=1)


def _mushroom() -> Points:
    t = np.linspace(np.pi, 2 * np.pi, 30)
    cap = np.stack([np.cos(t), 0.05 + 0.95 * np.sin(t)], axis=1)
    return _closed(np.concatenate([cap, [[0.32, 0.12], [0.4, 0.95], [-0.4, 0.95], [-0.32, 0.12]]]))


def _fish() -> Points:
    t = np.linspace(0.13 * np.pi, 1.87 * np.pi, 46)
    body = np.stack([-0.75 * np.cos(t) - 0.2, 0.55 * np.sin(t)], axis=1) * [-1.0, 1.0]
    return _closed(np.concatenate([body - [0.4, 0.0], [[0.95, -0.5], [0.8, 0.0], [0.95, 0.5]]]))


PETALS = [(0.55 * np.cos(a), 0.55 * np.sin(a), 0.42) for a in np.arange(5) * 0.4 * np.pi - 0.5 * np.pi]
BOLT = [(0.25, -1), (-0.6, 0.15), (-0.08, 0.15), (-0.3, 1), (0.6, -0.25), (0.08, -0.25)]
CROWN = [(-0.9, -0.55), (-0.42, 0.0), (0, -0.8), (0.42, 0.0), (0.9, -0.55), (0.7, 0.7), (-0.7, 0.7)]
TREE = [(0, -1), (0.5, -0.3), (0.25, -0.3), (0.75, 0.5), (0.17, 0.5), (0.17, 0.95), (-0.17, 0.95), (-0.17, 0.5)]
TREE += [(-0.75, 0.5), (-0.25, -0.3), (-0.5, -0.3)]
OUTLINES: dict[str, Outline] = {
    **shapes.OUTLINES,
    "diamond": Outline(_closed([(0, -1), (0.62, 0), (0, 1), (-0.62, 0)])),
    "hexagon": Outline(_regular(6)),
    "oval": Outline(_polar(0.95) * [1.0, 0.6], round=True),
    "bolt": Outline(_closed(BOLT), shine=(-0.1, -0.2)),
    "flower": Outline(_lobes([*PETALS, (0.0, 0.0, 0.3)]), round=True, shine=(0.0, -0.5)),
    "tree": Outline(_closed(TREE), shine=(0.0, -0.4)),
    "crown": Outline(_closed(CROWN), shine=(-0.4, 0.3)),
    "leaf": Outline(_leaf(), shine=(-0.2, -0.15)),
    "fish": Outline(_fish(), shine=(-0.4, -0.2)),
    "mushroom": Outline(_mushroom(), shine=(-0.3, -0.4)),
}
LOOKS: dict[str, Look] = {
    **shapes.LOOKS,
    "plain": Look(),
    "wavy": Look(bend="wavy"),
    "long": Look(stretch=1.7, scale=0.85),
    "huge": Look(scale=1.45),
    "bright": Look(light=(1.25, 1.45)),
    "orange": Look(hue=28.0, saturation=(0.8, 1.0), value=(0.85, 1.0)),
    "purple": Look(hue=280.0, value=(0.4, 0.8)),
    "pink": Look(hue=335.0, saturation=(0.3, 0.5), value=(0.9, 1.0)),
    "brown": Look(hue=24.0, saturation=(0.5, 0.75), value=(0.3, 0.5)),
    "cyan": Look(hue=182.0, value=(0.75, 1.0)),
    "white": Look(hue=0.0, saturation=(0.0, 0.05), value=(0.93, 1.0)),
    "black": Look(hue=0.0, saturation=(0.0, 0.1), value=(0.0, 0.12)),
    "gray": Look(hue=0.0, saturation=(0.0, 0.05), value=(0.4, 0.6)),
}
MILD = ImageStyle((0.26, 0.36), 0.1, 15.0, 0.08, 0.15, 0, 0.55, (0.0, 0.03), 0.0, 6.0, 0.0)

SEED = 2026
KINDS = tuple(OUTLINES)
COLOURS = tuple(name for name, look in LOOKS.items() if look.hue is not None)
TREATMENTS = tuple(name for name, look in LOOKS.items() if look.hue is None)
TEMPLATES = (
    *("a photo of {}", "a photo of {}", "a photo of a {}", "a photo of the {}", "a picture of {}", "a picture of a {}"),
    *("a drawing of {}", "a drawing of a {}", "an image of a {}", "an image of {}", "this is a {}", "the {}", "{}"),
)
ENDINGS = (" on a background", " in the picture", " on paper", " in the middle")
BOTH = 0.35  # share of images with a treatment and a named colour
ENDED = 0.2  # share of captions with an ending
STATE_MISSING, STATE_WRONG = 0.25, 0.08
OBJECT_MISSING, OBJECT_WRONG = 0.1, 0.08


def training_example(number: int, seed: int = SEED) -> tuple[Image.Image, str]:
    """An image of the corpus and its caption, a pure function of both arguments."""
    rng = random_stream(seed, f"corpus/{number}")
    kind = KINDS[rng.integers(len(KINDS))]
    names, look = _look(rng)
    return draw_image(kind, OUTLINES[kind], look, MILD, rng), _caption(names, kind, rng)


def _look(rng: np.random.Generator) -> tuple[list[str], Look]:
    """The names of one or two states, and the look of both together."""
    name = (*TREATMENTS, *COLOURS)[rng.integers(len(LOOKS))]
    look = LOOKS[name]
    if name in COLOURS or rng.random() >= BOTH:
        return [name], look
    colour = COLOURS[rng.integers(len(COLOURS))]
    ink = LOOKS[colour]
    return [name, colour], replace(look, hue=ink.hue, saturation=ink.saturation, value=ink.value)


def _caption(names: list[str], kind: str, rng: np.random.Generator) -> str:
    words = [_corrupt(name, tuple(LOOKS), STATE_MISSING, STATE_WRONG, rng) for name in names]
    words.append(_corrupt(kind, KINDS, OBJECT_MISSING, OBJECT_WRONG, rng) or "shape")
    text = TEMPLATES[rng.integers(len(TEMPLATES))].format(" ".join(word for word in words if word))
    return text + (ENDINGS[rng.integers(len(ENDINGS))] if rng.random() < ENDED else "")


def _corrupt(word: str, others: tuple[str, ...], missing: float, wrong: float, rng: np.random.Generator) -> str:
    chance = rng.random()
    if chance < missing:
        return ""
    return others[rng.integers(len(others))] if chance < missing + wrong else word
