"""What the training corpus of the tiny CLIP draws besides the benchmark's: further objects, states and styles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageFilter

from duplex.data import shapes
from duplex.data.shapes import (
    SIDE,
    Canvas,
    ImageStyle,
    Look,
    Outline,
    Plane,
    Points,
    _background,
    _blotches,
    _camera,
    _closed,
    _colour,
    _ink,
    _lobes,
    _mask,
    _Place,
    _polar,
    _regular,
    _scraps,
    _within,
)


def _arc(start: float, end: float, radius: object, centre: tuple[float, float] = (0.0, 0.0), count: int = 30) -> Points:
    """Points from angle `start` to `end`, in half turns; y points down, so 0.5 is the bottom."""
    angle = np.pi * np.linspace(start, end, count)
    points: Points = np.stack([np.cos(angle), np.sin(angle)], axis=1) * np.asarray(radius) + np.array(centre)
    return points


def _path(*pieces: object) -> Points:
    """A closed contour through corners and arcs."""
    return _closed(np.concatenate([np.atleast_2d(np.asarray(piece, dtype=np.float64)) for piece in pieces]))


def _mirrored(*half: tuple[float, float]) -> Points:
    """A closed contour from the corners of its right half, from top to bottom."""
    return _closed([*half, *((-x, y) for x, y in reversed(half) if x != 0.0)])


def _leaf() -> Points:
    t = np.linspace(0, np.pi, 40, endpoint=False)
    x = np.concatenate([np.cos(t), -np.cos(t)])
    y = np.concatenate([0.5 * np.sin(t) ** 1.5, -0.5 * np.sin(t) ** 1.5])
    return np.stack([x, y], axis=1)


def _fish() -> Points:
    t = np.linspace(0.13 * np.pi, 1.87 * np.pi, 46)
    body = np.stack([-0.75 * np.cos(t) - 0.2, 0.55 * np.sin(t)], axis=1) * [-1.0, 1.0]
    return _closed(np.concatenate([body - [0.4, 0.0], [[0.95, -0.5], [0.8, 0.0], [0.95, 0.5]]]))


def _gear() -> Points:
    angle = np.arange(96) * (2 * np.pi / 96)
    return _polar(np.where(np.sin(8 * angle) > 0, 0.95, 0.7), 96)


def _butterfly() -> Points:
    angle = np.arange(96) * (2 * np.pi / 96)
    points: Points = _polar(0.3 + 0.75 * np.abs(np.sin(2 * angle)) ** 0.8, 96) * [1.0, 0.85]
    return points


PETALS = [(0.55 * np.cos(a), 0.55 * np.sin(a), 0.42) for a in np.arange(5) * 0.4 * np.pi - 0.5 * np.pi]
BOLT = [(0.25, -1), (-0.6, 0.15), (-0.08, 0.15), (-0.3, 1), (0.6, -0.25), (0.08, -0.25)]
CROWN = [(-0.9, -0.55), (-0.42, 0.0), (0, -0.8), (0.42, 0.0), (0.9, -0.55), (0.7, 0.7), (-0.7, 0.7)]
CLOVER = [(0, -0.5, 0.42), (0.48, 0.12, 0.42), (-0.48, 0.12, 0.42), (0, 0, 0.3), (0, 0.55, 0.2), (0, 0.85, 0.15)]
APPLE = [(-0.32, 0.1, 0.55), (0.32, 0.1, 0.55), (0, 0.3, 0.6), (0, -0.3, 0.3), (0.12, -0.8, 0.17), (0.05, -0.55, 0.2)]
BONE = [(-0.68, -0.22, 0.28), (-0.68, 0.22, 0.28), (0.68, -0.22, 0.28), (0.68, 0.22, 0.28), (-0.3, 0, 0.2)]
BONE += [(0.3, 0, 0.2), (-0.5, 0, 0.25), (0.5, 0, 0.25), (0, 0, 0.2)]
HAMMER = [(-0.75, -0.85), (0.45, -0.85), (0.85, -0.4), (0.13, -0.35), (0.13, 0.95), (-0.17, 0.95), (-0.17, -0.3)]
HAMMER += [(-0.75, -0.3)]
BELL = [(0, -0.9), (0.3, -0.8), (0.48, -0.5), (0.55, 0.2), (0.9, 0.6), (0.2, 0.6), (0.15, 0.85), (0, 0.9)]  # right half
CACTUS = [(-0.2, 0.95), (-0.2, 0.4), (-0.75, 0.4), (-0.75, -0.3), (-0.45, -0.3), (-0.45, 0.1), (-0.2, 0.1)]
CACTUS += [(-0.2, -0.95), (0.2, -0.95), (0.2, -0.1), (0.45, -0.1), (0.45, -0.55), (0.75, -0.55), (0.75, 0.2)]
CACTUS += [(0.2, 0.2), (0.2, 0.95)]
BOAT = [(-0.95, 0.3), (-0.1, 0.3), (-0.1, -0.9), (0.7, 0.1), (0.05, 0.1), (0.05, 0.3), (0.95, 0.3)]
BOAT += [(0.6, 0.85), (-0.6, 0.85)]
FLAG = [(-0.7, -0.95), (-0.5, -0.95), (0.9, -0.8), (0.6, -0.4), (0.9, 0.0), (-0.5, 0.05), (-0.5, 0.95), (-0.7, 0.95)]
KEY = [(-0.16, -0.22), (0.95, -0.14), (0.95, 0.42), (0.72, 0.42), (0.72, 0.14), (0.5, 0.14), (0.5, 0.36)]
KEY += [(0.3, 0.36), (0.3, 0.14)]
SPOKES = tuple(
    _path(_arc(k / 2 + 0.08, k / 2 + 0.42, 0.72, count=12), _arc(k / 2 + 0.36, k / 2 + 0.14, 0.26, count=4))
    for k in range(4)
)
FURTHER_OUTLINES: dict[str, Outline] = {
    "diamond": Outline(_closed([(0, -1), (0.62, 0), (0, 1), (-0.62, 0)])),
    "hexagon": Outline(_regular(6)),
    "pentagon": Outline(_regular(5)),
    "trapezoid": Outline(_mirrored((0.45, -0.65), (0.95, 0.65))),
    "oval": Outline(_polar(0.95) * [1.0, 0.6], round=True),
    "egg": Outline(_polar(0.85) * [0.8, 1.1] + [0.0, 0.05], round=True),
    "bolt": Outline(_closed(BOLT), shine=(-0.1, -0.2)),
    "flower": Outline(_lobes([*PETALS, (0.0, 0.0, 0.3)]), round=True, shine=(0.0, -0.5)),
    "clover": Outline(_closed(_lobes(CLOVER)), round=True),
    "tree": Outline(
        _mirrored((0, -1), (0.5, -0.3), (0.25, -0.3), (0.75, 0.5), (0.17, 0.5), (0.17, 0.95)), shine=(0.0, -0.4)
    ),
    "cactus": Outline(_closed(CACTUS), shine=(0.0, -0.6)),
    "crown": Outline(_closed(CROWN), shine=(-0.4, 0.3)),
    "leaf": Outline(_leaf(), shine=(-0.2, -0.15)),
    "fish": Outline(_fish(), shine=(-0.4, -0.2)),
    "butterfly": Outline(_butterfly(), shine=(-0.5, -0.4)),
    "mushroom": Outline(
        _path(_arc(1, 2, (1.0, 0.95), (0, 0.05)), [[0.32, 0.12], [0.4, 0.95], [-0.4, 0.95], [-0.32, 0.12]]),
        shine=(-0.3, -0.4),
    ),
    "umbrella": Outline(
        _path(
            _arc(1, 2, (0.95, 0.85)),
            _arc(0, -1, (0.31, 0.16), (0.64, 0.0), 8),
            [[0.08, 0.0], [0.08, 0.9], [-0.08, 0.9], [-0.08, 0.0]],
            _arc(0, -1, (0.31, 0.16), (-0.64, 0.0), 8),
        ),
        shine=(-0.3, -0.4),
    ),
    "apple": Outline(_closed(_lobes(APPLE)), round=True),
    "shield": Outline(
        _path([[-0.8, -0.85], [0, -0.7], [0.8, -0.85]], _arc(0, 0.5, (0.8, 1.0)), _arc(0.5, 1, (0.8, 1.0)))
    ),
    "bell": Outline(_mirrored(*BELL), shine=(-0.2, -0.2)),
    "bottle": Outline(_mirrored((0.17, -1), (0.17, -0.45), (0.45, -0.1), (0.45, 0.95)), shine=(-0.15, 0.2)),
    "hourglass": Outline(
        _mirrored((0.7, -0.95), (0.7, -0.75), (0.12, 0.0), (0.7, 0.75), (0.7, 0.95)), shine=(-0.2, -0.6)
    ),
    "cup": Outline(
        _path(
            [[-0.8, -0.7], [0.45, -0.7], [0.45, -0.45]],
            _arc(-0.5, 0.5, (0.45, 0.45), (0.5, 0.0), 16),
            [[0.3, 0.75], [-0.65, 0.75]],
        ),
        holes=(_path(_arc(-0.5, 0.5, (0.25, 0.25), (0.5, 0.0), 12)),),
        shine=(-0.4, -0.3),
    ),
    "boat": Outline(_closed(BOAT), shine=(0.0, 0.5)),
    "flag": Outline(_closed(FLAG), shine=(0.0, -0.5)),
    "rocket": Outline(
        _mirrored((0, -1), (0.3, -0.55), (0.35, 0.2), (0.75, 0.65), (0.75, 0.9), (0.3, 0.65), (0.15, 0.95)),
        shine=(-0.1, -0.3),
    ),
    "key": Outline(
        _path(_arc(0.15, 1.85, 0.42, (-0.55, 0.0)), KEY), holes=(_polar(0.2, 30) - [0.58, 0.0],), shine=(-0.6, -0.3)
    ),
    "hammer": Outline(_closed(HAMMER), shine=(-0.4, -0.6)),
    "spade": Outline(
        _path(
            [[0, -1]],
            _arc(-0.15, 0.7, 0.42, (0.42, 0.15), 16),
            [[0.25, 0.95], [-0.25, 0.95]],
            _arc(0.3, 1.15, 0.42, (-0.42, 0.15), 16),
        ),
        shine=(-0.3, 0.0),
    ),
    "arch": Outline(
        _path(_arc(1, 2, 0.9, (0, -0.0)), [[0.9, 0.9], [0.45, 0.9]], _arc(2, 1, 0.45), [[-0.45, 0.9], [-0.9, 0.9]]),
        shine=(-0.5, -0.4),
    ),
    "gear": Outline(_gear(), holes=(_polar(0.28, 30),), round=True, shine=(-0.35, -0.35)),
    "wheel": Outline(_polar(0.95), holes=SPOKES, round=True, shine=(-0.6, -0.6)),
    "bone": Outline(_closed(_lobes(BONE)), shine=(0.0, -0.1)),
    "lock": Outline(
        _path(
            [[-0.7, -0.05], [-0.5, -0.05]],
            _arc(1, 2, (0.5, 0.75), (0, -0.2)),
            [[0.5, -0.05], [0.7, -0.05], [0.7, 0.9], [-0.7, 0.9]],
        ),
        holes=(_path([[-0.27, -0.05]], _arc(1, 2, (0.27, 0.48), (0, -0.2), 16), [[0.27, -0.05]]),),
        shine=(-0.3, 0.2),
    ),
}


@dataclass(frozen=True)
class FurtherLook(Look):
    """A look with what only the corpus draws; each name selects a branch in `draw`."""

    contour: str | None = None  # spiky, slanted or swirled: bends the contour
    bite: bool = False  # a round piece is missing at the edge
    second: str | None = None  # zigzag, halved, marbled, bordered or scratched: where the second colour is
    around: str | None = None  # shadowed or glowing: what surrounds the object
    whole: str | None = None  # pixelated, grainy, framed, foggy or doubled: changes the whole image


FURTHER_TREATMENTS: dict[str, FurtherLook] = {
    "plain": FurtherLook(),
    "wavy": FurtherLook(bend="wavy"),
    "long": FurtherLook(stretch=1.7, scale=0.85),
    "huge": FurtherLook(scale=1.45),
    "bright": FurtherLook(light=(1.25, 1.45)),
    "spiky": FurtherLook(contour="spiky"),
    "slanted": FurtherLook(contour="slanted"),
    "swirled": FurtherLook(contour="swirled"),
    "bitten": FurtherLook(bite=True),
    "zigzag": FurtherLook(second="zigzag"),
    "halved": FurtherLook(second="halved"),
    "marbled": FurtherLook(second="marbled"),
    "bordered": FurtherLook(second="bordered"),
    "scratched": FurtherLook(second="scratched"),
    "shadowed": FurtherLook(around="shadowed"),
    "glowing": FurtherLook(around="glowing"),
    "pixelated": FurtherLook(whole="pixelated"),
    "grainy": FurtherLook(whole="grainy"),
    "framed": FurtherLook(whole="framed"),
    "foggy": FurtherLook(whole="foggy"),
    "doubled": FurtherLook(whole="doubled"),
}
FURTHER_COLOURS: dict[str, FurtherLook] = {  # each differs from the benchmark's four in hue, saturation or value
    "orange": FurtherLook(hue=28.0, saturation=(0.8, 1.0), value=(0.85, 1.0)),
    "purple": FurtherLook(hue=280.0, value=(0.4, 0.8)),
    "pink": FurtherLook(hue=335.0, saturation=(0.3, 0.5), value=(0.9, 1.0)),
    "brown": FurtherLook(hue=24.0, saturation=(0.5, 0.75), value=(0.3, 0.5)),
    "cyan": FurtherLook(hue=182.0, value=(0.75, 1.0)),
    "white": FurtherLook(hue=0.0, saturation=(0.0, 0.05), value=(0.93, 1.0)),
    "black": FurtherLook(hue=0.0, saturation=(0.0, 0.1), value=(0.0, 0.12)),
    "gray": FurtherLook(hue=0.0, saturation=(0.0, 0.05), value=(0.4, 0.6)),
    "lime": FurtherLook(hue=88.0, value=(0.8, 1.0)),
    "teal": FurtherLook(hue=172.0, saturation=(0.7, 1.0), value=(0.3, 0.5)),
    "navy": FurtherLook(hue=235.0, saturation=(0.7, 1.0), value=(0.2, 0.38)),
    "maroon": FurtherLook(hue=350.0, saturation=(0.7, 1.0), value=(0.25, 0.4)),
    "olive": FurtherLook(hue=62.0, saturation=(0.6, 0.9), value=(0.35, 0.5)),
    "magenta": FurtherLook(hue=308.0, saturation=(0.7, 1.0), value=(0.75, 1.0)),
    "beige": FurtherLook(hue=42.0, saturation=(0.15, 0.3), value=(0.85, 1.0)),
    "violet": FurtherLook(hue=262.0, saturation=(0.3, 0.5), value=(0.75, 1.0)),
}
OUTLINES = {**shapes.OUTLINES, **FURTHER_OUTLINES}
LOOKS: dict[str, Look] = {**shapes.LOOKS, **FURTHER_TREATMENTS, **FURTHER_COLOURS}


def random_style(rng: np.random.Generator) -> ImageStyle:
    """A style between a mild one and one somewhat harsher than the benchmark's."""
    harsh = float(rng.random())  # 0: mild, 1: harshest

    def between(mild: float, harshest: float) -> float:
        return mild + (harshest - mild) * harsh

    lamp = 1.0 - between(0.0, 0.45) * rng.random(3)
    red, green, blue = (lamp / lamp.max()).tolist()
    return ImageStyle(
        radius=(between(0.26, 0.21), 0.37),
        shift=between(0.1, 0.16),
        turn=between(12.0, 26.0),
        squeeze=between(0.08, 0.2),
        textured=between(0.15, 0.8),
        clutter=round(between(0.0, 3.0)),
        contrast=between(0.5, 0.35),
        noise=(0.0, between(0.025, 0.055)),
        wash=between(0.0, 0.32),
        tint=between(8.0, 16.0),
        haze=between(0.0, 0.6),
        lean=between(0.0, 40.0) * (2.0 * float(rng.random()) - 1.0),
        lamp=(red, green, blue),
    )


def draw(kind: str, look: Look, second: Look, style: ImageStyle, rng: np.random.Generator) -> Image.Image:
    """Draw an object as `shapes.draw_image` does, in any look of the corpus; `second`: its second colour."""
    if not isinstance(look, FurtherLook):
        return shapes.draw_image(kind, OUTLINES[kind], look, style, rng)
    outline = _reshaped(OUTLINES[kind], look, rng)
    ground = _background(style, rng)
    place = _Place.drawn(look, style, rng)
    mask = _mask(outline, look, place, rng)
    if look.around:
        ground = _surroundings(look.around, ground, mask, place, rng)
    ink = _ink(kind, outline, look, style, place, ground, rng=rng)
    if look.second:
        other = _colour(kind, second, style, ink.mean(axis=(0, 1)), rng)
        ink = ink + (other - ink) * _second_part(look.second, mask, place, rng)[..., None]
    canvas: Canvas = ground + (ink - ground) * mask[..., None]
    canvas = _scraps(canvas, style, rng, mask)
    return _finished(look.whole, _camera(_veiled(look.whole, canvas, rng), look, style, rng), rng)


def _veiled(kind: str | None, canvas: Canvas, rng: np.random.Generator) -> Canvas:
    if kind == "doubled":
        angle = 2 * np.pi * rng.random()
        move = np.rint(0.13 * SIDE * np.array([np.cos(angle), np.sin(angle)])).astype(int)
        return 0.5 * canvas + 0.5 * np.roll(canvas, tuple(move.tolist()), axis=(0, 1))
    if kind == "foggy":
        return canvas + (np.float32(0.9) - canvas) * np.float32(_within((0.45, 0.65), rng))
    if kind == "grainy":
        return canvas + np.float32(_within((0.13, 0.2), rng)) * rng.standard_normal((SIDE, SIDE, 1), dtype=np.float32)
    return canvas


def _finished(kind: str | None, image: Image.Image, rng: np.random.Generator) -> Image.Image:
    if kind == "pixelated":
        return image.resize((13, 13), Image.Resampling.BOX).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    if kind == "framed":
        width = int(rng.integers(4, 7))
        red, green, blue = rng.integers(0, 256, 3).tolist()
        sheet = Image.new("RGB", (SIDE, SIDE), (red, green, blue))
        sheet.paste(image.crop((width, width, SIDE - width, SIDE - width)), (width, width))
        return sheet
    return image


def _reshaped(outline: Outline, look: FurtherLook, rng: np.random.Generator) -> Outline:
    holes = outline.holes
    if look.bite:
        edge = outline.contour[rng.integers(len(outline.contour))]
        holes = (*holes, _polar(0.42, 30) + 1.05 * edge)
    sign = 1.0 if rng.random() < 0.5 else -1.0

    def bent(points: Points) -> Points:
        x, y = points.T
        if look.contour == "slanted":
            return np.stack([x + 0.65 * sign * y, y], axis=1)
        angle: Plane = np.arctan2(y, x)
        radius: Plane = np.hypot(x, y)
        if look.contour == "swirled":
            angle = angle + 1.3 * sign * radius
        if look.contour == "spiky":
            radius = radius * (0.85 + 0.4 * np.abs((angle * 13 / (2 * np.pi)) % 1.0 - 0.5) * 2)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)

    if look.contour is None:
        return replace(outline, holes=holes)
    return replace(outline, contour=bent(outline.contour), holes=tuple(bent(hole) for hole in holes))


def _second_part(kind: str, mask: Plane, place: _Place, rng: np.random.Generator) -> Plane:
    u, v = place.object_coordinates()
    part: Plane
    if kind == "halved":
        part = np.clip(0.5 + 12.0 * u, 0.0, 1.0)
    elif kind == "marbled":
        part = np.clip(0.5 + 4.0 * (_blotches(int(rng.integers(9, 14)), rng) - 0.5), 0.0, 1.0)
    elif kind == "bordered":
        sheet = Image.fromarray((255 * mask).astype(np.uint8))
        part = 1.0 - np.asarray(sheet.filter(ImageFilter.MinFilter(7)), dtype=np.float32) / 255
    elif kind == "zigzag":
        pitch, phase = _within((0.4, 0.55), rng), 6.28 * float(rng.random())
        tooth = 0.35 * np.abs((u / 0.5) % 2.0 - 1.0)
        part = np.clip(0.5 + 2.5 * np.sin(2 * np.pi / pitch * (v + tooth) + phase), 0.0, 1.0)
    else:  # scratched
        part = np.zeros_like(u)
        for _ in range(int(rng.integers(4, 8))):
            angle, offset = 6.28 * float(rng.random()), _within((-0.6, 0.6), rng)
            part = np.maximum(
                part, np.clip(1.6 - 22.0 * np.abs(np.cos(angle) * u + np.sin(angle) * v - offset), 0.0, 1.0)
            )
    return np.asarray(part, dtype=np.float32)


def _surroundings(kind: str, ground: Canvas, mask: Plane, place: _Place, rng: np.random.Generator) -> Canvas:
    sheet = Image.fromarray((255 * mask).astype(np.uint8))
    if kind == "glowing":
        halo = np.asarray(sheet.filter(ImageFilter.GaussianBlur(6.0)), dtype=np.float32) / 255
        return ground + (np.float32(1.0) - ground) * np.clip(1.8 * halo, 0.0, 0.9)[..., None]
    move = np.rint(0.3 * place.pixels * np.array([1.0, 1.0 if rng.random() < 0.5 else -1.0])).astype(int)
    soft = np.asarray(sheet.filter(ImageFilter.GaussianBlur(1.2)), dtype=np.float32) / 255
    shade = np.roll(soft, tuple(move.tolist()), axis=(0, 1))
    return ground * (1.0 - 0.75 * shade)[..., None]
