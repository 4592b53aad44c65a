"""Retrieve test images with prototypes and with swapped factors, and measure how well that works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from duplex.evaluation.accumulate import Floats
from duplex.evaluation.vectors import nearest, precision, silhouette, unit
from duplex.features.tokens import Examples
from duplex.labels import Bools, Ints, LabelSpace
from duplex.methods.base import Inspectable

NEAREST = 4  # images per prototype, as in the paper's Fig. 7
SWAP_NEAREST = 5  # images per swap, as in its Fig. 8
LOWER = slice(2, 5)  # the ranks at which the paper finds that objects dominate
SEPARATED = 20  # most populous pairs whose separation is measured, as in its Fig. 10
BLOCK = 4096  # images at a time
Array = NDArray[np.float32]


@dataclass(frozen=True)
class ImageFeatures:
    """Features of test images, as the method compares them with its prototypes."""

    z: Array | None  # z^c [n, d], of unit length; None if the method has none
    text_space: Array | None  # [n, d] features that semantic prototypes are compared with
    states: Array | None  # z^s [n, d]; None without state and object factors
    objects: Array | None  # z^o [n, d]

    def in_space_of(self, prototype_kind: str) -> Array:
        """The features compared with prototypes of the kind `semantic` or `visual`."""
        features = self.text_space if prototype_kind == "semantic" else self.z
        assert features is not None
        return features


def image_features(method: Inspectable, examples: Examples) -> ImageFeatures:
    inputs = examples.inputs
    starts = range(0, len(next(iter(inputs.values()))), BLOCK)
    blocks = []
    for start in starts:
        blocks.append({name: values[start : start + BLOCK] for name, values in inputs.items()})

    def joined(parts: Iterable[torch.Tensor]) -> Array:
        return torch.cat(list(parts)).cpu().numpy()

    z = None if method.features is None else joined(map(method.features, blocks))
    text_space = z
    if method.text_space_features is not None:
        text_space = joined(map(method.text_space_features, blocks))
    if method.factors is None:
        return ImageFeatures(z, text_space, None, None)
    states, objects = zip(*map(method.factors, blocks), strict=True)
    return ImageFeatures(z, text_space, joined(states), joined(objects))


@dataclass(frozen=True)
class Retrieval:
    """A method with its features and prototypes, and the test images."""

    method: Inspectable
    labels: LabelSpace
    test: Examples

    @property
    def compositions(self) -> Ints:
        return self.test.compositions.cpu().numpy()

    @cached_property
    def features(self) -> ImageFeatures:
        return image_features(self.method, self.test)

    @property
    def can_retrieve(self) -> bool:
        has_any = self.method.semantic or self.method.visual
        return self.features.z is not None and bool(has_any)

    def prototypes(self, compositions: Ints) -> dict[str, Array]:
        """Kind (`semantic`, `visual`) -> prototypes [C, d], for the method's kinds."""
        kinds = {"semantic": self.method.semantic, "visual": self.method.visual}
        return {name: rows(compositions).cpu().numpy() for name, rows in kinds.items() if rows is not None}

    def joined(self, states: Array, objects: Array) -> Array:
        """Factors [n, d] joined by the learned fusion (the paper's Eq. 11) or concatenated."""
        if self.method.fuse is None:
            return np.concatenate([states, objects], axis=1)
        return np.asarray(self.method.fuse(torch.from_numpy(states), torch.from_numpy(objects)).cpu())

    def nearest_to_prototypes(self, kind: str, prototypes: Array) -> Ints:
        """Rows of the `NEAREST` test images nearest to each prototype of a kind [C, 4]."""
        return nearest(prototypes, self.features.in_space_of(kind), NEAREST)[0]


@dataclass(frozen=True)
class Swaps:
    """For each test pair that two test images can give: the state of A joined with the object of B."""

    wanted: Ints  # the pair [Q]
    sources: Ints  # rows of A and B [Q, 2]
    rows: Ints  # of the nearest other test images [Q, k]
    cosines: Floats  # [Q, k]

    def first_right(self, compositions: Ints) -> Bools:
        return np.asarray(compositions[self.rows[:, 0]] == self.wanted)


def swaps_of(retrieval: Retrieval) -> Swaps | None:
    """One swap per test pair, from the first images that have one of its words; None if there is none."""
    states, objects = retrieval.features.states, retrieval.features.objects
    found = [_sources_of_swap(retrieval, pair) for pair in np.unique(retrieval.compositions).tolist()]
    swaps = [swap for swap in found if swap is not None]
    others = min(SWAP_NEAREST, len(retrieval.test) - 2)
    if not swaps or others < 1 or states is None or objects is None:
        return None
    wanted, a, b = np.array(swaps).T
    swapped = retrieval.joined(states[a], objects[b])
    rows, cosines = nearest(swapped, retrieval.joined(states, objects), SWAP_NEAREST + 2)
    is_source = (rows == a[:, None]) | (rows == b[:, None])
    order = np.argsort(is_source, axis=1, kind="stable")[:, :others]
    nearest_rows = np.take_along_axis(rows, order, axis=1)
    nearest_cosines = np.take_along_axis(cosines, order, axis=1)
    return Swaps(wanted, np.stack([a, b], axis=1), nearest_rows, nearest_cosines)


def _sources_of_swap(retrieval: Retrieval, wanted: int) -> tuple[int, int, int] | None:
    compositions = retrieval.compositions
    labels = retrieval.labels
    has_state = labels.state_of(compositions) == wanted // len(labels.objects)
    has_object = labels.object_of(compositions) == wanted % len(labels.objects)
    a = np.flatnonzero(has_state & ~has_object)
    b = np.flatnonzero(has_object & ~has_state)
    return (wanted, int(a[0]), int(b[0])) if a.size and b.size else None


def retrieval_numbers(retrieval: Retrieval) -> dict[str, float]:
    """What the paper says of Fig. 7 to 10, as percentages; empty for methods without both kinds of prototypes.

    * `precision_KIND`: images of a pair among the four nearest to its prototype, mean over test pairs.
    * `centre_KIND`: 100 times the cosine of a pair's prototype and the mean of its images.
    * `separation`: 100 times the silhouette of the most populous pairs' features z^c;
      `separation_frozen`: the same of the encoder's features.
    * `swap_first`, `swap_state`, `swap_object`: swaps whose nearest image shows the pair; images at
      ranks three to five that show its state, and its object.
    """
    method, features = retrieval.method, retrieval.features
    if method.semantic is None or method.visual is None or features.z is None:
        return {}
    compositions = retrieval.compositions
    pairs, place, counts = np.unique(compositions, return_inverse=True, return_counts=True)
    numbers = {}
    for kind, prototypes in retrieval.prototypes(pairs).items():
        rows = retrieval.nearest_to_prototypes(kind, prototypes)
        numbers[f"precision_{kind}"] = 100 * precision(rows, compositions, pairs)
        images = unit(features.in_space_of(kind))
        sums = np.zeros((len(pairs), images.shape[1]))
        np.add.at(sums, place, images)
        cosines = np.sum(unit(sums) * unit(prototypes), axis=1)
        numbers[f"centre_{kind}"] = 100 * float(cosines.mean())
    populous = np.argsort(-counts, kind="stable")[:SEPARATED]
    shown = np.isin(place, populous)
    spaces = {"separation": features.z}
    if "cls" in retrieval.test.inputs:
        spaces["separation_frozen"] = retrieval.test.inputs["cls"].float().cpu().numpy()
    for name, vectors in spaces.items():
        if min(counts[populous]) > 1 and len(populous) > 1:
            numbers[name] = 100 * silhouette(vectors[shown], place[shown])
    return numbers | _swap_numbers(retrieval)


def _swap_numbers(retrieval: Retrieval) -> dict[str, float]:
    swaps = swaps_of(retrieval)
    if swaps is None:
        return {}
    labels, found = retrieval.labels, retrieval.compositions[swaps.rows]  # [Q, k]
    wanted = swaps.wanted[:, None]
    right = {
        "swap_state": labels.state_of(found) == labels.state_of(wanted),
        "swap_object": labels.object_of(found) == labels.object_of(wanted),
    }
    numbers = {"swap_first": 100 * float(swaps.first_right(retrieval.compositions).mean())}
    for name, hits in right.items():
        if found.shape[1] == SWAP_NEAREST:
            numbers[name] = 100 * float(hits[:, LOWER].mean())
    return numbers
