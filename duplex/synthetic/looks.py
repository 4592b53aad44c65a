"""Looks of drawn objects: how each state ("striped", "melted") changes their geometry, colour and the whole image.

Several effects depend on the object (`Outline.round`, `Outline.shine`, its rotation and tint), so that stripes on a
ring differ from stripes on a house.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplex.synthetic.outlines import Outline, Points

Plane = NDArray[np.floating[Any]]  # [H, W] in 0..1
Range = tuple[float, float]  # limits of a random number


@dataclass(frozen=True)
class Look:
    """Appearance that a state such as "striped" gives to a drawn object. The defaults: a plain object in any colour."""

    hue: float | None = None  # degrees; None: any colour
    saturation: Range = (0.6, 1.0)
    value: Range = (0.55, 1.0)
    pattern: str | None = None  # striped, dotted or checkered: drawn in a second colour
    bend: str | None = None  # melted or wavy: bends the contour
    scale: float = 1.0  # factor of the object's size
    stretch: float = 1.0  # factor along the object's first axis
    hollow: bool = False  # only the rim is drawn
    furry: bool = False  # hairs along the rim
    broken: bool = False  # two halves, moved apart along a jagged cut
    glossy: bool = False  # shaded, with a highlight
    blur: Range = (0.0, 0.0)  # radius in pixels, over the whole image
    light: Range = (1.0, 1.0)  # factor of the whole image
    fade: Range = (0.0, 0.0)  # how transparent the object is


LOOKS: dict[str, Look] = {
    "red": Look(hue=0.0),
    "green": Look(hue=125.0),
    "blue": Look(hue=225.0),
    "yellow": Look(hue=54.0, value=(0.8, 1.0)),
    "dark": Look(light=(0.22, 0.42)),
    "faded": Look(fade=(0.5, 0.7)),
    "striped": Look(pattern="striped"),
    "dotted": Look(pattern="dotted"),
    "checkered": Look(pattern="checkered"),
    "hollow": Look(hollow=True),
    "blurry": Look(blur=(1.6, 2.6)),
    "tiny": Look(scale=0.42),
    "broken": Look(broken=True),
    "glossy": Look(glossy=True),
    "furry": Look(furry=True),
    "melted": Look(bend="melted"),
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


def bend_contour(points: Points, kind: str, phase: float) -> Points:
    """An object's contour [P, 2], a list of points (x, y), bent as the state "melted" or "wavy" bends it.

    Args:
        points: the contour after rotation; y points down.
        kind: melted or wavy.
        phase: shift of the drips or ripples along the contour, in radians.
    """
    x, y = points[:, 0], points[:, 1]
    if kind == "melted":  # low parts run down in drips, the rest sags
        drip = 0.5 + 0.5 * np.sin(7.0 * x + phase)
        low = np.clip(0.6 + y, 0.0, None)
        return np.stack([x * (1.0 + 0.12 * low), 0.8 * y + 0.42 * drip * low**1.3 - 0.15], axis=1)
    angle, radius = np.arctan2(y, x), np.hypot(x, y)  # wavy
    ripple = 1.0 + 0.13 * np.sin(11.0 * angle + phase)
    return np.stack([x, y], axis=1) * np.where(radius > 0, ripple, 1.0)[:, None]


def pattern_plane(kind: str, outline: Outline, frame: tuple[Plane, Plane], pitch: float, phase: float) -> Plane:
    """The share [H, W] of a pattern's second colour at each pixel, to draw striped, dotted or checkered objects.

    Args:
        kind: striped, dotted or checkered.
        frame: the pixels' coordinates (u, v) [H, W] in the object's frame.
        pitch: width of a stripe, as a fraction of the object's radius.
        phase: shift of the pattern, in radians.
    """
    across, along = frame
    if outline.round:  # around the centre: wedges and rings instead of bands and rows
        u, v = frame
        across, along = (1.65 / np.pi) * np.arctan2(v, u), 1.1 * np.hypot(u, v)
    beat = np.pi / pitch
    if kind == "striped":
        return _edge(np.sin(beat * across + phase))
    if kind == "checkered":
        return _edge(np.sin(beat * across + phase) * np.sin(beat * along) * 1.5)
    return _edge(np.cos(beat * across) * np.cos(beat * along + phase) - 0.42)  # dotted


def _edge(wave: Plane) -> Plane:
    """The share of a pattern's second colour: 1 where its `wave` [H, W] is positive, else 0; soft edges."""
    share: Plane = np.clip(0.5 + 2.5 * wave, 0.0, 1.0).astype(np.float32)
    return share
