"""The embedded benchmark `shapes`: small drawn images of objects in states, with held-out compositions.

Every image is a pure function of the seed and its file name: an object's outline with the look of
a state, in a style (background, light and noise). The training images of the packaged tiny CLIP
are drawn by the same functions.

Outlines are closed contours in coordinates where an object fills about the unit disc and y points
down; they are sampled densely, so that bent ones show no corners. Several looks depend on the
object.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from duplex.data.images import image_fault
from duplex.data.tables import COLUMNS
from duplex.errors import DuplexError
from duplex.system.files import replace_file, sha256, write_text
from duplex.system.processes import track

Points = NDArray[np.float64]  # [P, 2]
Plane = NDArray[np.floating[Any]]  # [H, W] in 0..1
Canvas = NDArray[np.floating[Any]]  # [H, W, 3] in 0..1
Range = tuple[float, float]  # limits of a random number
Pair = tuple[str, str]
SIDE = 64  # width and height of an image in pixels
FINE = 2  # factor by which masks are drawn larger, then averaged down
SPACING = 0.08  # distance between neighbouring points of a contour


@dataclass(frozen=True)
class Outline:
    """The shape of one kind of drawn object: its contour, holes, and place of the highlight."""

    contour: Points
    holes: tuple[Points, ...] = ()  # contours cut out of it
    round: bool = False  # whether patterns run around its centre instead of across it
    shine: tuple[float, float] = (-0.35, -0.35)  # position of the highlight on a glossy object


def _closed(corners: object) -> Points:
    points = np.asarray(corners, dtype=np.float64)
    pieces = []
    for start, end in zip(points, np.roll(points, -1, axis=0), strict=True):
        steps = max(1, round(float(np.hypot(*(end - start))) / SPACING))
        pieces.append(start + (end - start) * (np.arange(steps) / steps)[:, None])
    return np.concatenate(pieces)


def _polar(radius: object, count: int = 80) -> Points:
    angle = np.arange(count) * (2 * np.pi / count)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points: Points = circle * np.broadcast_to(np.asarray(radius), count)[:, None]
    return points


def _regular(corners: int, inner: float | None = None, turn: float = -0.5 * np.pi) -> Points:  # with `inner`, a star
    count = corners if inner is None else 2 * corners
    radius = np.where(np.arange(count) % 2 == 0, 1.0, 1.0 if inner is None else inner)
    angle = turn + np.arange(count) * (2 * np.pi / count)
    return _closed(np.stack([np.cos(angle), np.sin(angle)], axis=1) * radius[:, None])


def _heart() -> Points:
    angle = np.arange(80) * (2 * np.pi / 80)
    x = 16 * np.sin(angle) ** 3
    y = 13 * np.cos(angle) - 5 * np.cos(2 * angle) - 2 * np.cos(3 * angle) - np.cos(4 * angle)
    return np.stack([x, -y - 2.0], axis=1) / 16.5


def _moon() -> Points:
    outer = np.linspace(0.22 * np.pi, 1.78 * np.pi, 60)
    tip = np.cos(outer[0]), np.sin(outer[0])
    centre = 0.62
    radius = np.hypot(tip[0] - centre, tip[1])
    bend = np.arctan2(tip[1], tip[0] - centre)
    inner = np.linspace(2 * np.pi - bend, bend, 44)[1:-1]
    arcs = [(np.cos(outer), np.sin(outer)), (centre + radius * np.cos(inner), radius * np.sin(inner))]
    points: Points = np.concatenate([np.stack(arc, axis=1) for arc in arcs]) + np.array([0.25, 0.0])
    return points


def _drop() -> Points:
    angle = np.arange(80) * (2 * np.pi / 80)
    return np.stack([0.78 * np.sin(angle) * np.sin(angle / 2) ** 1.3, -np.cos(angle)], axis=1)


def _lobes(centres: object) -> Points:  # of overlapping discs: the farthest edge on each ray from the origin
    angle = np.arange(96) * (2 * np.pi / 96)
    ray = np.stack([np.cos(angle), np.sin(angle)], axis=1)  # [A, 2]
    discs = np.asarray(centres, dtype=np.float64)
    along = ray @ discs[:, :2].T  # [A, D]
    miss = (discs[:, :2] ** 2).sum(axis=1) - along**2
    reach = along + np.sqrt(np.maximum(discs[:, 2] ** 2 - miss, 0.0))
    hit = discs[:, 2] ** 2 >= miss
    points: Points = ray * np.where(hit, reach, 0.0).max(axis=1)[:, None]
    return points


CLOUD = [(-0.5, 0.2, 0.45), (0.5, 0.2, 0.45), (-0.18, -0.25, 0.5), (0.32, -0.15, 0.42), (0.0, 0.25, 0.45)]
HOUSE = [(0, -1), (0.9, -0.15), (0.68, -0.15), (0.68, 0.85), (-0.68, 0.85), (-0.68, -0.15), (-0.9, -0.15)]
ARROW = [(1, 0), (0.25, -0.75), (0.25, -0.3), (-0.95, -0.3), (-0.95, 0.3), (0.25, 0.3), (0.25, 0.75)]
DOOR = [(-0.2, 0.3), (0.2, 0.3), (0.2, 0.851), (-0.2, 0.851)]


def _cross(arm: float = 0.3, reach: float = 0.95) -> Points:
    quarter = [(arm, -reach), (arm, -arm), (reach, -arm)]
    turns = [(quarter, 1, 0), (quarter, 0, 1), (quarter, -1, 0), (quarter, 0, -1)]
    return _closed([(c * x - s * y, s * x + c * y) for corners, c, s in turns for x, y in corners])


OUTLINES: dict[str, Outline] = {
    "circle": Outline(_polar(0.9), round=True),
    "star": Outline(_regular(5, inner=0.42), shine=(0.0, -0.35)),
    "heart": Outline(_heart(), shine=(-0.45, -0.4)),
    "arrow": Outline(_closed(ARROW), shine=(0.45, -0.15)),
    "moon": Outline(_moon(), round=True, shine=(-0.45, -0.3)),
    "square": Outline(_closed([(-0.78, -0.78), (0.78, -0.78), (0.78, 0.78), (-0.78, 0.78)])),
    "triangle": Outline(_regular(3), shine=(0.0, -0.25)),
    "cross": Outline(_cross(), shine=(0.0, -0.55)),
    "ring": Outline(_polar(0.95), holes=(_polar(0.5, 48),), round=True, shine=(-0.5, -0.5)),
    "drop": Outline(_drop(), round=True, shine=(-0.3, 0.25)),
    "house": Outline(_closed(HOUSE), holes=(_closed(DOOR),), shine=(-0.3, -0.3)),
    "cloud": Outline(_lobes(CLOUD), shine=(-0.15, -0.35)),
}


@dataclass(frozen=True)
class Look:
    """How a state makes a drawn object look; with the defaults, a plain object in any colour."""

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
}


def bend_contour(points: Points, kind: str, phase: float) -> Points:
    """Bend a contour [P, 2] into drips (`kind` "melted") or ripples ("wavy"); `phase` shifts them along it."""
    x, y = points[:, 0], points[:, 1]
    if kind == "melted":  # low parts run down in drips, the rest sags
        drip = 0.5 + 0.5 * np.sin(7.0 * x + phase)
        low = np.clip(0.6 + y, 0.0, None)
        return np.stack([x * (1.0 + 0.12 * low), 0.8 * y + 0.42 * drip * low**1.3 - 0.15], axis=1)
    angle, radius = np.arctan2(y, x), np.hypot(x, y)  # wavy
    ripple = 1.0 + 0.13 * np.sin(11.0 * angle + phase)
    return np.stack([x, y], axis=1) * np.where(radius > 0, ripple, 1.0)[:, None]


def pattern_plane(kind: str, outline: Outline, frame: tuple[Plane, Plane], pitch: float, phase: float) -> Plane:
    """A pattern in two colours: the share of the second colour in each pixel [H, W].

    frame: the pixels' coordinates (u, v) [H, W] in the object's frame.
    pitch: width of a stripe, as a fraction of the object's radius; phase: shift in radians.
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
    share: Plane = np.clip(0.5 + 2.5 * wave, 0.0, 1.0).astype(np.float32)
    return share


_ROWS, _COLUMNS = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) + np.float32(0.5)


@dataclass(frozen=True)
class ImageStyle:
    """How drawn images look and vary at random; lengths are fractions of the image's side, `haze` is in pixels."""

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


HARSH = ImageStyle(
    (0.23, 0.36), 0.14, 24.0, 0.17, 0.7, 2, 0.38, (0.01, 0.045), 0.27, 16.0, 0.5, lean=30.0, lamp=(1.0, 0.8, 0.6)
)  # fmt: skip


def random_stream(seed: int, name: str) -> np.random.Generator:
    """The random generator of a seed and a name; it is the same on every machine, and each name has its own."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def draw_image(kind: str, outline: Outline, look: Look, style: ImageStyle, rng: np.random.Generator) -> Image.Image:
    """Draw a random `SIDE` x `SIDE` RGB image of an object named `kind`; all randomness comes from `rng`."""
    ground = _background(style, rng)
    place = _Place.drawn(look, style, rng)
    mask = _mask(outline, look, place, rng)
    ink = _ink(kind, outline, look, style, place, ground, rng=rng)
    alpha = mask * (1.0 - _within(look.fade, rng))
    canvas = ground + (ink - ground) * alpha[..., None]
    canvas = _scraps(canvas, style, rng, mask)
    return _camera(canvas, look, style, rng)


@dataclass(frozen=True)
class _Place:
    centre: NDArray[np.float64]  # [2] in pixels
    matrix: NDArray[np.float64]  # [2, 2] from the object's frame to pixels
    pixels: float  # the object's radius

    @classmethod
    def drawn(cls, look: Look, style: ImageStyle, rng: np.random.Generator) -> _Place:
        radius = _within(style.radius, rng) * look.scale * SIDE
        angle = np.deg2rad(style.lean + _spread(style.turn, rng))
        squeeze = 1.0 - style.squeeze * rng.random()
        narrow = (squeeze, 1.0) if rng.random() < 0.5 else (1.0, squeeze)
        axes = (radius * look.stretch * narrow[0], radius * narrow[1])
        cos, sin = np.cos(angle), np.sin(angle)
        centre = SIDE * (0.5 + style.shift * (2.0 * rng.random(2) - 1.0))
        return cls(centre, np.array([[cos, -sin], [sin, cos]]) * np.array(axes), radius)

    def to_pixels(self, points: Points, look: Look, phase: float) -> Points:
        turned = points @ (self.matrix / self.pixels).T
        bent = turned if look.bend is None else bend_contour(turned, look.bend, phase)
        return bent * self.pixels + self.centre

    def object_coordinates(self) -> tuple[Plane, Plane]:
        inverse = np.linalg.inv(self.matrix).astype(np.float32)
        x, y = _COLUMNS - np.float32(self.centre[0]), _ROWS - np.float32(self.centre[1])
        return inverse[0, 0] * x + inverse[0, 1] * y, inverse[1, 0] * x + inverse[1, 1] * y


def _within(limits: Range, rng: np.random.Generator) -> float:
    return limits[0] + (limits[1] - limits[0]) * float(rng.random())


def _spread(limit: float, rng: np.random.Generator) -> float:
    return limit * (2.0 * float(rng.random()) - 1.0)


def _mask(outline: Outline, look: Look, place: _Place, rng: np.random.Generator) -> Plane:
    phase = 2 * np.pi * float(rng.random())
    contours = [place.to_pixels(points, look, phase) for points in (outline.contour, *outline.holes)]
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
    kind: str, look: Look, style: ImageStyle, away: NDArray[np.float32], rng: np.random.Generator
) -> NDArray[np.float32]:
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


def _ink(
    kind: str, outline: Outline, look: Look, style: ImageStyle, place: _Place, ground: Canvas, rng: np.random.Generator
) -> Canvas:
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


def _background(style: ImageStyle, rng: np.random.Generator) -> Canvas:
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
    coarse = Image.fromarray((255 * rng.random((cells, cells))).astype(np.uint8))
    return np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float32) / 255


def _scraps(canvas: Canvas, style: ImageStyle, rng: np.random.Generator, mask: Plane) -> Canvas:
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


def _camera(canvas: Canvas, look: Look, style: ImageStyle, rng: np.random.Generator) -> Image.Image:
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


SEED = 7
STATES, OBJECTS = tuple(LOOKS), tuple(OUTLINES)
STAMP = ".drawn"  # file in the root of the images: seed and hash of the code that drew them
UNFINISHED = "unfinished\n"

ABSENT = 48  # a quarter of all 192 pairs: in no split, distractors of the open world
UNSEEN = 24  # pairs of val alone, and of test alone; the other 96 are trained on
SEEN = 24  # training pairs that are in val, too, and as many in test
HELD_OUT_IMAGES = (18, 32)  # least and most images of a pair in val or test
HEAD = 240  # training images of the r-th pair: max(TAIL, HEAD / r ** SLOPE)
SLOPE = 0.7
TAIL = 8


def shapes_manifest(seed: int = SEED, *, scale: float = 1.0) -> pd.DataFrame:
    """Make the manifest of `shapes`, or of a part: each pair keeps the share `scale` of its images, at least one."""
    rng = random_stream(seed, "manifest")
    train, val_unseen, test_unseen = _pairs(rng)
    ranks = 1.0 + np.arange(len(train))
    listed: dict[str, list[tuple[Pair, int]]] = {
        "train": list(zip(train, np.maximum(TAIL, HEAD / ranks**SLOPE).round().astype(int).tolist(), strict=True))
    }
    for split, unseen in (("val", val_unseen), ("test", test_unseen)):
        pairs = [*(train[i] for i in rng.permutation(len(train))[:SEEN]), *unseen]
        counts = rng.integers(HELD_OUT_IMAGES[0], HELD_OUT_IMAGES[1] + 1, size=len(pairs)).tolist()
        listed[split] = list(zip(pairs, counts, strict=True))
    return _table(listed, scale)


def _pairs(rng: np.random.Generator) -> tuple[list[Pair], list[Pair], list[Pair]]:  # training, unseen of val, of test
    states, objects = rng.permutation(STATES).tolist(), rng.permutation(OBJECTS).tolist()
    # Two rounds along diagonals: each state and each object is in at least two training pairs.
    rounds = max(len(states), len(objects))
    cover = {(states[i % len(states)], objects[(i + k) % len(objects)]) for k in (0, 1) for i in range(rounds)}
    rest = [(s, o) for s in STATES for o in OBJECTS if (s, o) not in cover]
    rest = [rest[i] for i in rng.permutation(len(rest))]
    train = [*sorted(cover), *rest[2 * UNSEEN + ABSENT :]]
    return [train[i] for i in rng.permutation(len(train))], rest[:UNSEEN], rest[UNSEEN : 2 * UNSEEN]


def _table(listed: dict[str, list[tuple[Pair, int]]], scale: float) -> pd.DataFrame:
    used: dict[Pair, int] = {}
    rows = []
    for split, pairs in listed.items():
        for (state, kind), count in sorted(pairs):
            first = used.get((state, kind), 0)
            used[state, kind] = first + max(1, round(count * scale))
            numbers = range(first, used[state, kind])
            rows += [(f"{state}_{kind}/{number:04d}.png", state, kind, split) for number in numbers]
    return pd.DataFrame(rows, columns=COLUMNS, dtype=str)


def draw(image: str, seed: int = SEED) -> Image.Image:
    """Draw the `shapes` image with a file name such as `striped_heart/0007.png`."""
    state, _, kind = Path(image).parent.name.partition("_")
    if state not in STATES or kind not in OBJECTS:
        raise DuplexError(f"the data set shapes has no image {image!r}; give one that its manifest lists")
    return draw_image(kind, OUTLINES[kind], LOOKS[state], HARSH, random_stream(seed, image))


def render_images(manifest: pd.DataFrame, root: Path, seed: int = SEED) -> int:
    """Draw images of `shapes` that are missing, damaged or outdated; returns their number."""
    stamp, wanted = root / STAMP, _stamp(seed)
    current = stamp.is_file() and stamp.read_text(encoding="utf-8", errors="replace") == wanted
    if not current:
        foreign = None if stamp.exists() else next((name for name in manifest["image"] if (root / name).exists()), None)
        if foreign:
            raise DuplexError(
                f"{root} holds {foreign} from another source; move that folder, or set another `root` for the drawn "
                "images in params.yaml"
            )
        write_text(stamp, UNFINISHED)  # if this is interrupted, old and new images are mixed and must be drawn again
    missing = [name for name in manifest["image"] if not current or image_fault(root / name)]
    for name in track(missing, "drawing images", len(missing)):
        with replace_file(root / name, sync=False) as scratch:
            draw(name, seed).save(scratch, format="PNG", compress_level=1)
    if not current:
        write_text(stamp, wanted)
    return len(missing)


def _stamp(seed: int) -> str:
    return f"seed {seed}\ndrawing {sha256(Path(__file__))}\n"
