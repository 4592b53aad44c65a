"""Augment training images on the device, each by a single homography and bilinear sampling.

Coordinates x, y run from -1 to 1 between the outer edges of an image. At the place p = (x, y, 1),
in homogeneous coordinates, the augmented image has the colour that the image has at M p, with

    M = C F P R

where the crop C, the flip F, the perspective P and the rotation R are random for each image; the
identity matrix stands for those that are not chosen.

Strengths are those of published code: flip, perspective and rotation of CSP and Troika
(github.com/BatsResearch/csp, github.com/bighuang624/Troika), the crop of CAILA; apart from the
angle, these are torchvision's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

FLIPPED = 0.5  # share of images
WARPED = 0.5  # share of images that are seen in perspective
DISTORTION = 0.5  # largest distance by which a corner moves to the centre
DEGREES = 5.0  # largest angle of rotation
SMALLEST_AREA = 0.08  # of a crop, as a share of the image
WIDEST = 4 / 3  # ratio of a crop's sides
TRIES = 10  # crops that are drawn until one fits into the image, which else stays whole
EXACT = torch.float64  # of matrices, whose products neither TF32 nor bfloat16 may round


def draw_matrices(count: int, names: Collection[str], device: torch.device) -> Tensor:
    """Random matrices [B, 3, 3] of `count` images, the products M of those that `names` chooses."""
    matrices = _identities(count, device)
    for name in [name for name in DRAWN if name in names]:
        matrices = matrices @ DRAWN[name](count, device)
    return matrices


def warp(pixels: Tensor, matrices: Tensor) -> Tensor:
    """Transform pixels [B, 3, R, R] uint8 by homographies [B, 3, 3]; black outside."""
    height, width = pixels.shape[2:]
    x = _centres(width, pixels.device)
    y = _centres(height, pixels.device)[:, None]
    rows = matrices.float()[:, :, :, None, None]  # [B, 3, 3, 1, 1]
    seen = [rows[:, k, 0] * x + rows[:, k, 1] * y + rows[:, k, 2] for k in range(3)]  # [B, R, R]
    grid = torch.stack(seen[:2], dim=-1) / seen[2][..., None]
    return grid_sample(pixels.float(), grid, align_corners=False).round().to(torch.uint8)


def _centres(count: int, device: torch.device) -> Tensor:
    return (2 * torch.arange(count, device=device) + 1).float() / count - 1


def draw_crops(count: int, device: torch.device) -> Tensor:
    """Random matrices [B, 3, 3] that enlarge a part (of random area and ratio) to the whole."""
    drawn = torch.rand(4, count, TRIES, dtype=EXACT, device=device)
    area = SMALLEST_AREA + (1 - SMALLEST_AREA) * drawn[0]
    ratio = torch.exp(math.log(WIDEST) * (2 * drawn[1] - 1))
    sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()])  # [2, B, TRIES]
    fits = (sides <= 1).all(0)
    image = torch.arange(count, device=device)
    first = fits.int().argmax(1)
    sides = torch.where(fits[image, first], sides[:, image, first], 1.0)
    places = (1 - sides) * (2 * drawn[2:, image, first] - 1)
    crops = _identities(count, device)
    crops[:, [0, 1], [0, 1]] = sides.T
    crops[:, :2, 2] = places.T
    return crops


def draw_flips(count: int, device: torch.device) -> Tensor:
    """Random matrices [B, 3, 3] that mirror each image left to right with the probability `FLIPPED`."""
    flips = _identities(count, device)
    flips[:, 0, 0] = torch.where(torch.rand(count, device=device) < FLIPPED, -1.0, 1.0)
    return flips


def draw_perspectives(count: int, device: torch.device) -> Tensor:
    """Random matrices [B, 3, 3] that may (probability `WARPED`) move corners to the centre."""
    corners = torch.tensor([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=EXACT, device=device)
    distances = DISTORTION * torch.rand(count, 4, 2, dtype=EXACT, device=device)
    warped = torch.rand(count, device=device) < WARPED
    return homographies(corners * (1 - distances * warped[:, None, None]), corners)


def homographies(places: Tensor, shown: Tensor) -> Tensor:
    """Homographies [B, 3, 3] that map each image's points `places` [B, 4, 2] to `shown` [4, 2]."""
    x, y = places.unbind(-1)  # [B, 4]
    u, v = shown.unbind(-1)
    zero = torch.zeros_like(x)
    one = torch.ones_like(x)
    horizontal = torch.stack([x, y, one, zero, zero, zero, -u * x, -u * y], dim=-1)
    vertical = torch.stack([zero, zero, zero, x, y, one, -v * x, -v * y], dim=-1)
    numbers = torch.linalg.solve(torch.cat([horizontal, vertical], dim=1), torch.cat([u, v]).expand(len(x), 8))
    return torch.cat([numbers, one[:, :1]], dim=1).view(-1, 3, 3)


def draw_rotations(count: int, device: torch.device) -> Tensor:
    """Random matrices [B, 3, 3] that rotate each image about its centre."""
    angles = math.radians(DEGREES) * (2 * torch.rand(count, dtype=EXACT, device=device) - 1)
    rotations = _identities(count, device)
    rotations[:, 0, 0] = rotations[:, 1, 1] = angles.cos()
    rotations[:, 0, 1] = -angles.sin()
    rotations[:, 1, 0] = angles.sin()
    return rotations


def _identities(count: int, device: torch.device) -> Tensor:
    return torch.eye(3, dtype=EXACT, device=device).repeat(count, 1, 1)


Draw = Callable[[int, torch.device], Tensor]
DRAWN: dict[str, Draw] = {  # in the order of the matrices' product
    "crop": draw_crops,
    "flip": draw_flips,
    "perspective": draw_perspectives,
    "rotation": draw_rotations,
}
