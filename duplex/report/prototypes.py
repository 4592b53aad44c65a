"""What a trained network makes of test images, as arrays: features, factors, and both kinds of prototypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from duplex.features.examples import Examples
from duplex.labels import Ints
from duplex.model.network import Network

Array = NDArray[np.float32]
BLOCK = 4096


@dataclass(frozen=True)
class Embedded:
    """A gallery of images seen through a network."""

    z: Array  # z^c [n, d], adapted, of unit length
    states: Array | None  # z^s [n, d]; None without the state and object paths
    objects: Array | None  # z^o [n, d]


@torch.no_grad()
def embed(network: Network, examples: Examples) -> Embedded:
    """The features that prototypes are compared with, and the images' state and object factors."""
    parts = [_embed_block(network, block) for block in _blocks(examples.z)]
    z = np.concatenate([part[0] for part in parts])
    if network.factors is None:
        return Embedded(z, None, None)
    return Embedded(z, np.concatenate([part[1] for part in parts]), np.concatenate([part[2] for part in parts]))


def _embed_block(network: Network, block: torch.Tensor) -> tuple[Array, ...]:
    z = network.features(block)
    factors = network.factors(z) if network.factors is not None else ()
    return tuple(tensor.cpu().numpy() for tensor in (z, *factors))


def _blocks(z: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from torch.split(z, BLOCK)


@torch.no_grad()
def semantic_rows(network: Network, compositions: Ints) -> Array:
    """t^c [C, d]"""
    rows: Array = network.prompts.encode(compositions).compositions.cpu().numpy()
    return rows


@torch.no_grad()
def visual_rows(network: Network, compositions: Ints) -> Array:
    """h [C, d] of a method with a codebook."""
    assert network.codebook is not None
    rows: Array = network.codebook.rows[torch.as_tensor(compositions)].detach().cpu().numpy()
    return rows


@torch.no_grad()
def joined(network: Network, states: Array, objects: Array) -> Array:
    """`phi(z^s_i, z^o_j)` [Q, d] (Eq. 11): state factors joined with object factors, each from an image of its own.

    Without a fusion the two lie side by side [Q, 2d], so that a cosine is the mean of the factors' cosines.
    """
    if network.factors is None or network.factors.fusion is None:
        return np.concatenate([states, objects], axis=1)
    fused: Array = network.factors.fusion(torch.from_numpy(states), torch.from_numpy(objects)).cpu().numpy()
    return fused
