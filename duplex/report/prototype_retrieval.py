"""Retrieve the test images nearest to a method's prototypes, and the texts (semantic prototypes) nearest to images.

Nearest means the largest cosine, as in the Duplex paper's qualitative figure. The bias on unseen pairs is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.retrieval import nearest, precision
from duplex.features.examples import Examples
from duplex.labels import Bools, Ints, LabelSpace
from duplex.methods.base import Inspectable
from duplex.report.blocks import (
    Block,
    Gallery,
    Group,
    Line,
    Note,
    Strip,
    Table,
    TableCell,
    TableRow,
    Thumb,
    columns,
    text_cell,
)
from duplex.report.table_cells import json_pointer
from duplex.report.thumbnails import Thumbnails

TOP, SHOWN = 4, 4
TEXTS = 3  # nearest texts of an image
Array = NDArray[np.float32]
BLOCK = 4096


@dataclass(frozen=True)
class EmbeddedImages:
    """A trained method's features of the test images, and their state and object parts if it computes such factors."""

    z: Array | None  # z^c [n, d], of unit length; None if the method has none
    text_space: Array | None  # [n, d] features that semantic prototypes are compared with
    states: Array | None  # z^s [n, d]; None without state and object factors
    objects: Array | None  # z^o [n, d]

    def in_space_of(self, prototype_kind: str) -> Array:
        """Return the image features that a method compares with its prototypes of a kind: `semantic` or `visual`."""
        features = self.text_space if prototype_kind == "semantic" else self.z
        assert features is not None
        return features


def embed(method: Inspectable, examples: Examples) -> EmbeddedImages:
    """Return images' features and their factors (state and object parts), computed by a method in batches of images."""
    inputs = examples.inputs
    starts = range(0, len(next(iter(inputs.values()))), BLOCK)
    blocks = [{name: values[start : start + BLOCK] for name, values in inputs.items()} for start in starts]
    z = None if method.features is None else torch.cat([method.features(block) for block in blocks]).cpu().numpy()
    in_text_space = method.text_space_features
    text_space = z if in_text_space is None else torch.cat([in_text_space(block) for block in blocks]).cpu().numpy()
    if method.factors is None:
        return EmbeddedImages(z, text_space, None, None)
    states, objects = zip(*(method.factors(block) for block in blocks), strict=True)
    return EmbeddedImages(z, text_space, torch.cat(states).cpu().numpy(), torch.cat(objects).cpu().numpy())


def prototypes_of(method: Inspectable, compositions: Ints) -> dict[str, Array]:
    """Return a method's prototypes of C compositions: kind (`semantic`, `visual`) -> [C, d], for kinds that it has."""
    kinds = {"semantic": method.semantic, "visual": method.visual}
    return {name: rows(compositions).cpu().numpy() for name, rows in kinds.items() if rows is not None}


def fuse_factors(method: Inspectable, states: Array, objects: Array) -> Array:
    """Join state parts [Q, d] of image features with object parts [Q, d] of other images' features, to features [Q, d].

    The method's learned fusion is used (the Duplex paper's Eq. 11). Without one, the parts are concatenated [Q, 2d],
    so that the cosine of two results is the mean of the parts' cosines.
    """
    if method.fuse is None:
        return np.concatenate([states, objects], axis=1)
    return np.asarray(method.fuse(torch.from_numpy(states), torch.from_numpy(objects)).cpu())


@dataclass(frozen=True)
class RetrievalContext:
    """What retrieval needs: a method with features and prototypes, the test images and their thumbnails."""

    method: Inspectable
    labels: LabelSpace
    test: Examples
    images: Sequence[str]  # names of the test images
    thumbnails: Thumbnails

    @property
    def compositions(self) -> Ints:
        return self.test.compositions.cpu().numpy()

    @cached_property
    def embedded_images(self) -> EmbeddedImages:
        """Features of the test images, and their state and object parts (factors), computed by the method once."""
        return embed(self.method, self.test)


def prototype_blocks(context: RetrievalContext, file: str) -> tuple[list[Block], dict[str, Any]]:
    """Return report blocks on the test images nearest to each prototype, and the table's numbers for a JSON file.

    The blocks are a table of precisions and a gallery.

    file: path that the numbers will be written to, which the table cites.
    """
    if context.embedded_images.z is None or not (context.method.semantic or context.method.visual):
        return [Note("The method has no prototypes.")], {}
    present = np.unique(context.compositions)
    masks = masks_of(context.labels.seen[present])
    numbers: dict[str, Any] = {"precision_at_4": {}}
    for kind, prototypes in prototypes_of(context.method, present).items():
        rows, _ = nearest(prototypes, context.embedded_images.in_space_of(kind), TOP)
        numbers["precision_at_4"][kind] = {
            name: 100 * precision(rows[mask], context.compositions, present[mask]) for name, mask in masks.items()
        }
    note = "Share of the four nearest test images that have the prototype's label, mean over the test pairs, percent."
    titles = {kind: f"{kind} prototypes" for kind in numbers["precision_at_4"]}
    caption = "Precision among the four nearest images"
    table = shares_table(caption, "of", numbers, file, "precision_at_4", titles, note)
    return [table, _prototype_gallery(context, present)], numbers


@dataclass(frozen=True)
class Hit:
    """Test image found by retrieval, with its cosine to the query."""

    row: int  # among the test images
    image: str
    label: str
    cosine: float
    right: bool  # whether it is labelled with the composition that was looked for


def prototype_hits(context: RetrievalContext, composition: int, top: int) -> dict[str, list[Hit]]:
    """Return the `top` test images nearest to each prototype of a composition: kind (`semantic`, `visual`) -> hits.

    Raise `UsageError` if the method has no prototypes.
    """
    if context.embedded_images.z is None or not (context.method.semantic or context.method.visual):
        raise UsageError("this method has no prototypes; choose another with --method")
    hits = {}
    for kind, prototype in prototypes_of(context.method, np.array([composition])).items():
        rows, cosines = nearest(prototype, context.embedded_images.in_space_of(kind), top)
        hits[kind] = hits_of(context, rows[0], cosines[0], composition)
    return hits


def hits_of(context: RetrievalContext, rows: Ints, cosines: Floats, wanted: int) -> list[Hit]:
    """Return a `Hit` (name, label, cosine, whether right) per retrieved test image.

    rows: indices of the retrieved test images.
    cosines: their cosines to the query.
    wanted: the composition whose images count as right; -1: no image counts as right.
    """
    labels = context.compositions
    return [
        Hit(row, context.images[row], context.labels.name(int(labels[row])), cosine, bool(labels[row] == wanted))
        for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True)
    ]


def masks_of(seen: Bools) -> dict[str, Bools]:
    """Return the masks of the `seen`, `unseen` and `all` images or pairs by name, for percentages per group.

    seen: mask of the images of seen pairs, or of the seen pairs. Empty masks are left out.
    """
    masks: dict[str, Bools] = {"seen": seen, "unseen": ~seen, "all": np.ones_like(seen)}
    return {name: mask for name, mask in masks.items() if mask.any()}


def shares_table(
    caption: str, heading: str, numbers: Mapping[str, Any], file: str, key: str, titles: Mapping[str, str], note: str
) -> Table:
    """Return a table of percentages by row and by group of pairs (seen, unseen, all).

    numbers: record of the JSON file `file`; `numbers[key]` is row name -> group of pairs -> percentage.
    heading: title of the first column.
    file: path of the JSON file, which cells cite.
    titles: row name -> text of the first column.
    """
    rows = []
    for name, title in titles.items():
        shares = numbers[key][name]
        cells = [
            TableCell(f"{value:.1f}", value, json_pointer(file, key, name, kind)) for kind, value in shares.items()
        ]
        rows.append(TableRow([text_cell(title), *cells]))
    return Table(caption, columns(heading, *shares), rows, note)


def _prototype_gallery(context: RetrievalContext, present: Ints) -> Gallery:
    counts = np.bincount(context.compositions, minlength=context.labels.size)[present]
    order = present[np.argsort(-counts, kind="stable")]
    seen, half, groups = context.labels.seen[order], SHOWN // 2, []
    for composition in (*order[seen][:half].tolist(), *order[~seen][:half].tolist()):  # those with the most images
        hits = prototype_hits(context, composition, TOP)
        strips = [
            Strip(f"nearest to the {kind} prototype", [thumb(context, hit) for hit in nearest_images])
            for kind, nearest_images in hits.items()
        ]
        kind = "seen" if context.labels.seen[composition] else "unseen"
        groups.append(Group(f"{context.labels.name(composition)} ({kind})", strips))
    return Gallery(groups, "Test images nearest to a pair's prototypes, with their labels and cosines.")


def thumb(context: RetrievalContext, hit: Hit) -> Thumb:
    """Return a retrieved test image as a report thumbnail, with its label and cosine."""
    alt, lines = f"test image labelled {hit.label}", [Line(f"cosine {hit.cosine:.3f}")]
    return Thumb(context.thumbnails(hit.image), hit.label, alt, hit.right, lines)


@dataclass(frozen=True)
class RetrievedTexts:
    """Texts (semantic prototypes) nearest to each test image, for the report; empty if the method has none."""

    lines: Mapping[int, Sequence[Line]] = field(default_factory=dict)  # by row of the manifest
    blocks: Sequence[Block] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)  # cited by `blocks`


def nearest_texts(context: RetrievalContext) -> tuple[Ints, Floats] | None:
    """Return the compositions of the three texts (semantic prototypes) nearest to each test image, and the cosines.

    Both are [n, 3], the nearest first. None if the method has no semantic prototypes.
    """
    if context.method.semantic is None or context.embedded_images.text_space is None:
        return None
    candidates = context.labels.candidates("closed", "test")
    texts = context.method.semantic(candidates).cpu().numpy()
    places, cosines = nearest(context.embedded_images.text_space, texts, TEXTS)
    return candidates[places], cosines


def retrieve_texts(context: RetrievalContext, file: str) -> RetrievedTexts:
    """Return the texts (semantic prototypes) nearest to each test image, and a table of how often they are right.

    file: path that the table's numbers will be written to as JSON, which the table cites.
    """
    nearest_three = nearest_texts(context)
    if nearest_three is None:
        return RetrievedTexts()
    compositions, cosines = nearest_three
    right: Bools = compositions == context.compositions[:, None]
    names = [context.labels.names(column) for column in compositions.T]
    lines = {
        row: [Line(f"{cosines[i, k]:.3f} {names[k][i]}", bool(right[i, k])) for k in range(len(names))]
        for i, row in enumerate(context.test.rows.tolist())
    }
    hits = {"first": right[:, 0], "among_three": np.any(right, axis=1)}
    masks = masks_of(context.labels.seen[context.compositions])
    shares = {name: {kind: 100 * float(hit[mask].mean()) for kind, mask in masks.items()} for name, hit in hits.items()}
    numbers = {"texts": shares}
    titles = {"first": "the nearest text", "among_three": "one of the nearest three"}
    note = "Share of test images whose label it is, by cosine of feature and semantic prototype, closed world, percent."
    table = shares_table("Image to text", "label is", numbers, file, "texts", titles, note)
    return RetrievedTexts(lines, [table], numbers)
