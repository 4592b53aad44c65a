"""Draw one image: a background, an object with the appearance of a state, light, blur and noise.

All randomness comes from the argument `rng`; with `random_stream` an image is a pure function of a seed and a name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from duplex.synthetic.looks import Look, Plane, Range, bend_contour, pattern_plane
from duplex.synthetic.outlines import OUTLINES, Outline, Points

SIDE = 64  # width and height of an image in pixels
FINE = 2  # factor by which masks are drawn larger, then averaged down
Canvas = NDArray[np.floating[Any]]  # [H, W, 3] in 0..1
_ROWS, _COLUMNS = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) + np.float32(0.5)


@dataclass(frozen=True)
class Style:
    """Limits of the random variation of drawn images, which make them easy or difficult to recognise.

    Lengths are fractions of the image's side.
    """

    radius: Range  # of the object
    shift: float  # of its centre, at most
    turn: float  # degrees, at most, to either side of `lean`
    squeeze: float  # relative shortening of one axis, at most
    textured: float  # share of backgrounds with a texture
    clutter: int  # largest number of strokes and discs behind and in front of the object
    contrast: float  # least distance in RGB between the colours of object and background
    noise: Range  # standard deviation of the camera's noise
    wash: float  # strength of uneven, tinted light, at most
    tint: float  # degrees by which an object's kind shifts a colour's hue, at most
    haze: float  # blur in pixels, at most, of every image
    lean: float = 0.0  # degrees by which every object is rotated
    lamp: tuple[float, float, float] = (1.0, 1.0, 1.0)  # colour of the light on everything


MILD = Style((0.26, 0.36), 0.1, 15.0, 0.08, 0.15, 0, 0.55, (0.0, 0.03), 0.0, 6.0, 0.0)
HARSH = Style(
    (0.23, 0.36), 0.14, 24.0, 0.17, 0.7, 2, 0.38, (0.01, 0.045), 0.27, 16.0, 0.5, lean=30.0, lamp=(1.0, 0.8, 0.6)
)  # fmt: skip


def random_stream(seed: int, name: str) -> np.random.Generator:
    """A random generator for a seed and a name (any text): equal on every machine, independent per name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def draw_image(kind: str, look: Look, style: Style, rng: np.random.Generator) -> Image.Image:
    """A random `SIDE` x `SIDE` RGB image of an object with the appearance of a state.

    Args:
        kind: the object, a key of `OUTLINES`.
        look: the appearance that the state gives to the object, a value of `LOOKS`.
        style: limits of the variation, such as `MILD` or `HARSH`.
        rng: source of all randomness.
    """
    ground = _background(style, rng)
    place = _Place.drawn(look, style, rng)
    outline = OUTLINES[kind]
    mask = _mask(outline, look, place, rng)
    ink = _ink(kind, look, style, place, ground, rng=rng)
    alpha = mask * (1.0 - _within(look.fade, rng))
    canvas = ground + (ink - ground) * alpha[..., None]
    canvas = _scraps(canvas, style, rng, mask)
    return _camera(canvas, look, style, rng)


@dataclass(frozen=True)
class _Place:
    """Random position, size and rotation of an object in the image."""

    centre: NDArray[np.float64]  # [2] in pixels
    matrix: NDArray[np.float64]  # [2, 2] from the object's frame to pixels
    pixels: float  # the object's radius

    @classmethod
    def drawn(cls, look: Look, style: Style, rng: np.random.Generator) -> _Place:
        radius = _within(style.radius, rng) * look.scale * SIDE
        angle = np.deg2rad(style.lean + _spread(style.turn, rng))
        squeeze = 1.0 - style.squeeze * rng.random()
        narrow = (squeeze, 1.0) if rng.random() < 0.5 else (1.0, squeeze)
        axes = (radius * look.stretch * narrow[0], radius * narrow[1])
        cos, sin = np.cos(angle), np.sin(angle)
        centre = SIDE * (0.5 + style.shift * (2.0 * rng.random(2) - 1.0))
        return cls(centre, np.array([[cos, -sin], [sin, cos]]) * np.array(axes), radius)

    def pixels_of(self, points: Points, look: Look, phase: float) -> Points:
        """Convert a contour [P, 2] from the object's frame to pixels of the image; melted and wavy ones are bent."""
        turned = points @ (self.matrix / self.pixels).T
        bent = turned if look.bend is None else bend_contour(turned, look.bend, phase)
        return bent * self.pixels + self.centre

    def object_coordinates(self) -> tuple[Plane, Plane]:
        """The coordinates (u, v) [H, W] of every pixel of the image in the object's frame."""
        inverse = np.linalg.inv(self.matrix).astype(np.float32)
        x, y = _COLUMNS - np.float32(self.centre[0]), _ROWS - np.float32(self.centre[1])
        return inverse[0, 0] * x + inverse[0, 1] * y, inverse[1, 0] * x + inverse[1, 1] * y


def _within(limits: Range, rng: np.random.Generator) -> float:
    return limits[0] + (limits[1] - limits[0]) * float(rng.random())


def _spread(limit: float, rng: np.random.Generator) -> float:
    return limit * (2.0 * float(rng.random()) - 1.0)


def _mask(outline: Outline, look: Look, place: _Place, rng: np.random.Generator) -> Plane:
    phase = 2 * np.pi * float(rng.random())
    contours = [place.pixels_of(points, look, phase) for points in (outline.contour, *outline.holes)]
    if not look.broken:
        return _drawn(contours, look, place, rng)
    return _halves(contours, look, place, rng)


def _drawn(contours: list[Points], look: Look, place: _Place, rng: np.random.Generator) -> Plane:
    sheet = Image.new("L", (SIDE * FINE, SIDE * FINE))
    pen = ImageDraw.Draw(sheet)
    width = max(2, round(0.2 * place.pixels * FINE))
    for number, contour in enumerate(contours):
        path = [tuple(point) for point in (contour * FINE).tolist()]
        if look.hollow:
            pen.line([*path, path[0], path[1]], fill=255, width=width, joint="curve")
        else:
            pen.polygon(path, fill=0 if number else 255)
        if look.furry:
            _bristle(pen, contour, place, rng)
    return np.asarray(sheet.reduce(FINE), dtype=np.float32) / 255


def _bristle(pen: ImageDraw.ImageDraw, contour: Points, place: _Place, rng: np.random.Generator) -> None:
    x, y = contour.T
    turn = 1.0 if np.dot(x, np.roll(y, -1)) > np.dot(y, np.roll(x, -1)) else -1.0  # which side is outside
    roots = np.repeat(contour, 2, axis=0)
    ahead = np.roll(roots, -2, axis=0) - roots
    normal = np.stack([ahead[:, 1], -ahead[:, 0]], axis=1) * turn
    normal /= np.maximum(np.hypot(*normal.T), 1e-9)[:, None]
    hair = normal + 0.6 * rng.standard_normal(normal.shape)
    tips = roots + hair * (place.pixels * (0.08 + 0.17 * rng.random(len(roots))))[:, None]
    for root, tip in zip((roots * FINE).tolist(), (tips * FINE).tolist(), strict=True):
        pen.line([*root, *tip], fill=255, width=FINE)


def _halves(contours: list[Points], look: Look, place: _Place, rng: np.random.Generator) -> Plane:
    """The mask [H, W] of an object that is broken along a jagged line, its halves moved apart."""
    angle = np.deg2rad(_spread(35.0, rng)) + (0.5 * np.pi if rng.random() < 0.3 else 0.0)
    across = np.array([np.cos(angle), np.sin(angle)])
    along = np.array([-across[1], across[0]])
    x, y = _COLUMNS - np.float32(place.centre[0]), _ROWS - np.float32(place.centre[1])
    run = (along[0] * x + along[1] * y) / place.pixels
    jag = 0.16 * np.abs((run * 1.6 + rng.random()) % 1.0 - 0.5) * 4 - 0.16
    side = across[0] * x + across[1] * y - place.pixels * jag  # [H, W] pixels from the cut
    move = place.pixels * (across * _within((0.1, 0.2), rng) + along * _spread(0.3, rng))
    gap = 0.05 * place.pixels + 0.5
    whole = Look(hollow=look.hollow, furry=look.furry)
    right = _drawn([contour + move for contour in contours], whole, place, rng) * np.clip(side - gap + 0.5, 0, 1)
    left = _drawn([contour - move for contour in contours], whole, place, rng) * np.clip(0.5 - side - gap, 0, 1)
    mask: Plane = np.maximum(right, left).astype(np.float32)
    return mask


def _rgb(hue: float, saturation: float, value: float) -> NDArray[np.float32]:
    k = (np.array([5.0, 3.0, 1.0]) + hue / 60.0) % 6.0
    return (value - value * saturation * np.clip(np.minimum(k, 4.0 - k), 0.0, 1.0)).astype(np.float32)


def _any_colour(rng: np.random.Generator) -> NDArray[np.float32]:
    return _rgb(360 * float(rng.random()), float(rng.random()) ** 0.7, 0.15 + 0.85 * float(rng.random()))


def _colour(
    kind: str, look: Look, style: Style, away: NDArray[np.float32], rng: np.random.Generator
) -> NDArray[np.float32]:
    """A random colour [3] for an object: its state's hue shifted by the object's tint, else any hue."""
    tint = style.tint * (2.0 * float(random_stream(0, f"tint of {kind}").random()) - 1.0)
    ink = away
    for _ in range(12):
        if look.hue is None:
            ink = _any_colour(rng)
        else:
            hue = look.hue + tint + _spread(10.0, rng)
            ink = _rgb(hue % 360, _within(look.saturation, rng), _within(look.value, rng))
        if np.linalg.norm(ink - away) >= style.contrast:
            break
    return ink


def _ink(kind: str, look: Look, style: Style, place: _Place, ground: Canvas, *, rng: np.random.Generator) -> Canvas:
    """A colour [H, W, 3] for all pixels, with a state's pattern and gloss; only the object's pixels are used."""
    outline = OUTLINES[kind]
    ink = _colour(kind, look, style, ground.mean(axis=(0, 1)), rng)
    u, v = place.object_coordinates()
    sheet: Canvas = np.broadcast_to(ink, (SIDE, SIDE, 3))
    if look.pattern is not None:
        second = _colour(kind, Look(), style, ink, rng)
        part = pattern_plane(look.pattern, outline, (u, v), _within((0.24, 0.36), rng), 6.28 * float(rng.random()))
        sheet = sheet + (second - ink) * part[..., None]
    if look.glossy:
        shade = np.clip(0.8 - 0.35 * v, 0.3, 1.15)
        spot = np.exp(-((((u - outline.shine[0]) / 0.26) ** 2 + ((v - outline.shine[1]) / 0.18) ** 2) ** 1.5))
        sheet = sheet * shade[..., None]
        sheet = sheet + (1.0 - sheet) * (0.95 * spot)[..., None]
    return np.asarray(sheet, dtype=np.float32)


def _background(style: Style, rng: np.random.Generator) -> Canvas:
    first = _any_colour(rng)
    if rng.random() >= style.textured:
        return np.broadcast_to(first, (SIDE, SIDE, 3))
    second = first + (_any_colour(rng) - first) * np.float32(_within((0.3, 0.75), rng))
    texture = int(rng.integers(3))
    angle = 2 * np.pi * float(rng.random())
    along = (np.cos(angle) * (_COLUMNS / SIDE - 0.5) + np.sin(angle) * (_ROWS / SIDE - 0.5)).astype(np.float32)
    if texture == 0:
        part = np.clip(along + 0.5, 0, 1)
    elif texture == 1:
        part = 0.5 + 0.5 * np.sin(_within((12.0, 40.0), rng) * along)
    else:
        part = _blotches(int(rng.integers(3, 9)), rng)
    canvas: Canvas = (first + (second - first) * part[..., None]).astype(np.float32)
    return canvas


def _blotches(cells: int, rng: np.random.Generator) -> Plane:
    """Smooth random values [H, W] in 0..1, from a grid of `cells` x `cells`, for textures and uneven light."""
    coarse = Image.fromarray((255 * rng.random((cells, cells))).astype(np.uint8))
    return np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float32) / 255


def _scraps(canvas: Canvas, style: Style, rng: np.random.Generator, mask: Plane) -> Canvas:
    count = int(rng.integers(style.clutter + 1))
    for _ in range(count):
        sheet = Image.new("L", (SIDE * FINE, SIDE * FINE))
        pen = ImageDraw.Draw(sheet)
        x, y, dx, dy = (FINE * SIDE * rng.random(4)).tolist()
        if rng.random() < 0.5:
            reach = 0.45
            pen.line([x, y, x + reach * (dx - x), y + reach * (dy - y)], fill=255, width=int(rng.integers(2, 6)))
        else:
            size = FINE * _within((1.0, 4.5), rng)
            pen.ellipse([x - size, y - size, x + size, y + size], fill=255)
        part = np.asarray(sheet.reduce(FINE), dtype=np.float32) / 255
        if rng.random() < 0.7:
            part = part * (1.0 - mask)
        canvas = canvas + (_any_colour(rng) - canvas) * part[..., None]
    return canvas


def _camera(canvas: Canvas, look: Look, style: Style, rng: np.random.Generator) -> Image.Image:
    if style.wash > 0:
        strength = style.wash * float(rng.random())
        wash = 1.0 - strength * _blotches(3, rng)[..., None] * (0.4 + 0.6 * rng.random(3).astype(np.float32))
        canvas = canvas * wash
    canvas = canvas * (np.float32(_within(look.light, rng)) * np.array(style.lamp, dtype=np.float32))
    blur = max(_within(look.blur, rng), style.haze * float(rng.random()) ** 2)
    if blur > 0:
        soft = Image.fromarray((255 * np.clip(canvas, 0, 1)).astype(np.uint8)).filter(ImageFilter.GaussianBlur(blur))
        canvas = np.asarray(soft, dtype=np.float32) / 255
    grain = np.float32(_within(style.noise, rng)) * rng.standard_normal(canvas.shape, dtype=np.float32)
    return Image.fromarray((255 * np.clip(canvas + grain, 0, 1) + 0.5).astype(np.uint8))
