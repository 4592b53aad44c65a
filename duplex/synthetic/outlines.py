"""Outlines of objects: closed contours in a frame where an object fills about the unit disc and y points down.

Contours are sampled densely, so that bent ones (melted, wavy) have no visible corners.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]  # [P, 2]
SPACING = 0.08  # distance between neighbouring points of a contour


@dataclass(frozen=True)
class Outline:
    """The shape of one drawn object: its contour, holes, and how patterns and highlights are placed on it."""

    contour: Points
    holes: tuple[Points, ...] = ()  # contours cut out of it
    round: bool = False  # whether patterns run around its centre instead of across it
    shine: tuple[float, float] = (-0.35, -0.35)  # position of the highlight on a glossy object


def _closed(corners: object) -> Points:
    """The closed polygon through `corners` as evenly spaced points [P, 2]."""
    points = np.asarray(corners, dtype=np.float64)
    pieces = []
    for start, end in zip(points, np.roll(points, -1, axis=0), strict=True):
        steps = max(1, round(float(np.hypot(*(end - start))) / SPACING))
        pieces.append(start + (end - start) * (np.arange(steps) / steps)[:, None])
    return np.concatenate(pieces)


def _polar(radius: object, count: int = 80) -> Points:
    """The contour [count, 2] at the distance `radius`, one number or one per angle, from the centre."""
    angle = np.arange(count) * (2 * np.pi / count)
    points: Points = (
        np.stack([np.cos(angle), np.sin(angle)], axis=1) * np.broadcast_to(np.asarray(radius), count)[:, None]
    )
    return points


def _regular(corners: int, inner: float | None = None, turn: float = -0.5 * np.pi) -> Points:
    """The contour of a regular polygon, or of a star if `inner` is given: the radius between its tips."""
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


def _lobes(centres: object) -> Points:
    """The outer contour of overlapping discs, as of a cloud: the farthest edge on each ray from the origin."""
    angle = np.arange(96) * (2 * np.pi / 96)
    ray = np.stack([np.cos(angle), np.sin(angle)], axis=1)  # [A, 2]
    discs = np.asarray(centres, dtype=np.float64)
    along = ray @ discs[:, :2].T  # [A, D]
    miss = (discs[:, :2] ** 2).sum(axis=1) - along**2
    reach = along + np.sqrt(np.maximum(discs[:, 2] ** 2 - miss, 0.0))
    hit = discs[:, 2] ** 2 >= miss
    points: Points = ray * np.where(hit, reach, 0.0).max(axis=1)[:, None]
    return points


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


CLOUD = [(-0.5, 0.2, 0.45), (0.5, 0.2, 0.45), (-0.18, -0.25, 0.5), (0.32, -0.15, 0.42), (0.0, 0.25, 0.45)]
PETALS = [(0.55 * np.cos(a), 0.55 * np.sin(a), 0.42) for a in np.arange(5) * 0.4 * np.pi - 0.5 * np.pi]
HOUSE = [(0, -1), (0.9, -0.15), (0.68, -0.15), (0.68, 0.85), (-0.68, 0.85), (-0.68, -0.15), (-0.9, -0.15)]
ARROW = [(1, 0), (0.25, -0.75), (0.25, -0.3), (-0.95, -0.3), (-0.95, 0.3), (0.25, 0.3), (0.25, 0.75)]
BOLT = [(0.25, -1), (-0.6, 0.15), (-0.08, 0.15), (-0.3, 1), (0.6, -0.25), (0.08, -0.25)]
CROWN = [(-0.9, -0.55), (-0.42, 0.0), (0, -0.8), (0.42, 0.0), (0.9, -0.55), (0.7, 0.7), (-0.7, 0.7)]
DOOR = [(-0.2, 0.3), (0.2, 0.3), (0.2, 0.851), (-0.2, 0.851)]
TREE = [(0, -1), (0.5, -0.3), (0.25, -0.3), (0.75, 0.5), (0.17, 0.5), (0.17, 0.95), (-0.17, 0.95), (-0.17, 0.5)]
TREE += [(-0.75, 0.5), (-0.25, -0.3), (-0.5, -0.3)]


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
