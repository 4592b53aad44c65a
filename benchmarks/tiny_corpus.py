"""The training corpus of the tiny CLIP: drawn images of a mild style, with partly wrong or incomplete captions.

It has more states and objects than the benchmark and images with two states, and shares neither seed, style nor any
image with it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from duplex.data.shapes import LOOKS, MILD, OUTLINES, Look, draw_image, random_stream

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
    return draw_image(kind, look, MILD, rng), _caption(names, kind, rng)


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
