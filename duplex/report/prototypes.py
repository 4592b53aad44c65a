"""What a trained method makes of test images, as arrays: features, factors, and both kinds of prototypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from duplex.features.examples import Examples
from duplex.labels import Ints
from duplex.methods.inspectable import Exhibits, Inputs

Array = NDArray[np.float32]
BLOCK = 4096


@dataclass(frozen=True)
class Embedded:
    """A gallery of images seen through a method."""

    z: Array | None  # z^c [n, d], adapted, of unit length; None where the method has no such thing
    spoken: Array | None  # [n, d] what semantic prototypes are compared with: z^c, or a space of their own
    states: Array | None  # z^s [n, d]; None without state and object factors
    objects: Array | None  # z^o [n, d]

    def beside(self, kind: str) -> Array:
        """The images' features in the space of a kind of prototypes."""
        found = self.spoken if kind == "semantic" else self.z
        assert found is not None
        return found


def embed(method: Exhibits, examples: Examples) -> Embedded:
    """The features that prototypes are compared with, and the images' state and object factors."""
    blocks = list(_blocks(examples.inputs))
    z = None if method.features is None else _joined([method.features(block) for block in blocks])
    spoken = z if method.spoken is None else _joined([method.spoken(block) for block in blocks])
    if method.factors is None:
        return Embedded(z, spoken, None, None)
    states, objects = zip(*(method.factors(block) for block in blocks), strict=True)
    return Embedded(z, spoken, _joined(states), _joined(objects))


def _joined(parts: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> Array:
    return np.concatenate([part.cpu().numpy() for part in parts])


def _blocks(inputs: Inputs) -> Iterator[Inputs]:
    for start in range(0, len(next(iter(inputs.values()))), BLOCK):
        yield {name: values[start : start + BLOCK] for name, values in inputs.items()}


def prototypes_of(method: Exhibits, compositions: Ints) -> dict[str, Array]:
    """The kinds of prototypes that a method has, of some compositions, by name: t^c, h [C, d]."""
    kinds = {"semantic": method.semantic, "visual": method.visual}
    return {name: rows(compositions).cpu().numpy() for name, rows in kinds.items() if rows is not None}


def joined(method: Exhibits, states: Array, objects: Array) -> Array:
    """`phi(z^s_i, z^o_j)` [Q, d] (Eq. 11): state factors joined with object factors, each from an image of its own.

    Without a fusion the two lie side by side [Q, 2d], so that a cosine is the mean of the factors' cosines.
    """
    if method.joined is None:
        return np.concatenate([states, objects], axis=1)
    fused: Array = method.joined(torch.from_numpy(states), torch.from_numpy(objects)).cpu().numpy()
    return fused
