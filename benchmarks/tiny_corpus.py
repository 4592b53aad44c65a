"""The training corpus of the tiny CLIP: drawn images with partly wrong or incomplete captions.

No image of it shows a state of the benchmark `shapes` on an object of the benchmark: the benchmark's states appear on
further objects alone, and its objects in further states and colours alone. Seeds differ from the benchmark's, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from benchmarks.tiny_drawing import (
    FURTHER_COLOURS,
    FURTHER_OUTLINES,
    FURTHER_TREATMENTS,
    LOOKS,
    FurtherLook,
    draw,
    random_style,
)
from duplex.data import shapes
from duplex.data.shapes import Look, random_stream

SEED = 2026
STATES = tuple(LOOKS)
COLOURS = tuple(name for name in STATES if LOOKS[name].hue is not None)
TEMPLATES = (
    *("a photo of {}", "a photo of {}", "a photo of a {}", "a photo of the {}", "a picture of {}", "a picture of a {}"),
    *("a drawing of {}", "a drawing of a {}", "an image of a {}", "an image of {}", "this is a {}", "the {}", "{}"),
)
ENDINGS = (" on a background", " in the picture", " on paper", " in the middle")
BENCHMARK_OBJECT = 0.4  # share of images that show an object of the benchmark
BENCHMARK_STATE = 0.55  # share of the other images that show a state of the benchmark
BOTH = 0.35  # share of images with a treatment and a named colour
ENDED = 0.2  # share of captions with an ending
STATE_MISSING, STATE_WRONG = 0.25, 0.08
OBJECT_MISSING, OBJECT_WRONG = 0.1, 0.08


@dataclass(frozen=True)
class Item:
    """What an image of the corpus shows, and what its caption says."""

    kind: str
    states: tuple[str, ...]  # one, or a treatment and a colour
    ink: str | None  # name of its colour, also where `states` has none; None: any colour
    second: str | None  # the same for its second colour
    caption: str

    @property
    def look(self) -> Look:
        look = LOOKS[self.states[0]]
        if self.ink is None:
            return look
        ink = LOOKS[self.ink]
        return replace(look, hue=ink.hue, saturation=ink.saturation, value=ink.value)


def corpus_item(number: int, seed: int = SEED) -> Item:
    """What image `number` of the corpus shows, a pure function of both arguments."""
    rng = random_stream(seed, f"item/{number}")
    if rng.random() < BENCHMARK_OBJECT:
        kind, names = _one(tuple(shapes.OUTLINES), rng), _FURTHER
    else:
        kind = _one(tuple(FURTHER_OUTLINES), rng)
        names = _BENCHMARK if rng.random() < BENCHMARK_STATE else _FURTHER
    state = _one((*names.treatments, *names.colours), rng)
    states: tuple[str, ...] = (state,)
    # On an object of the benchmark, each colour is a further one: a plain heart in any colour may be a red heart.
    clean = kind in shapes.OUTLINES
    ink = state if state in names.colours else _one(tuple(FURTHER_COLOURS), rng) if clean else None
    if state not in names.colours and rng.random() < BOTH:
        ink = ink or _one(COLOURS, rng)
        states = (state, ink)
    second = _one(tuple(FURTHER_COLOURS), rng) if clean else None
    return Item(kind, states, ink, second, _caption(states, kind, names, rng))


def training_example(number: int, seed: int = SEED) -> tuple[Image.Image, Item]:
    """Image `number` of the corpus and what it shows."""
    item = corpus_item(number, seed)
    rng = random_stream(seed, f"image/{number}")
    second = FurtherLook() if item.second is None else LOOKS[item.second]
    return draw(item.kind, item.look, second, random_style(rng), rng), item


@dataclass(frozen=True)
class _Names:
    treatments: tuple[str, ...]
    colours: tuple[str, ...]


_FURTHER = _Names(tuple(FURTHER_TREATMENTS), tuple(FURTHER_COLOURS))
_BENCHMARK = _Names(
    tuple(name for name, look in shapes.LOOKS.items() if look.hue is None),
    tuple(name for name, look in shapes.LOOKS.items() if look.hue is not None),
)


def _one(names: tuple[str, ...], rng: np.random.Generator) -> str:
    return names[rng.integers(len(names))]


def _caption(states: tuple[str, ...], kind: str, names: _Names, rng: np.random.Generator) -> str:
    # Wrong words are drawn from those of the same rule, so that no caption names a pair of the benchmark either.
    kinds = tuple(shapes.OUTLINES if kind in shapes.OUTLINES else FURTHER_OUTLINES)
    others = (*names.treatments, *names.colours)
    words = [_corrupt(name, others, STATE_MISSING, STATE_WRONG, rng) for name in states]
    words.append(_corrupt(kind, kinds, OBJECT_MISSING, OBJECT_WRONG, rng) or "shape")
    text = _one(TEMPLATES, rng).format(" ".join(word for word in words if word))
    return text + (_one(ENDINGS, rng) if rng.random() < ENDED else "")


def _corrupt(word: str, others: tuple[str, ...], missing: float, wrong: float, rng: np.random.Generator) -> str:
    chance = rng.random()
    if chance < missing:
        return ""
    return _one(others, rng) if chance < missing + wrong else word
