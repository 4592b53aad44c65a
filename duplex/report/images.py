"""Report parts on test images: nearest to prototypes, their nearest texts, swapped factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from duplex.data.images import thumbnail, uncropped_path
from duplex.errors import UsageError
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.vectors import nearest, precision
from duplex.labels import Bools, Ints
from duplex.report.blocks import (
    Block,
    Caption,
    Gallery,
    Note,
    Strip,
    Strips,
    Table,
    TableRow,
    Thumb,
    headings,
    json_pointer,
    number_cell,
    text_cell,
)
from duplex.report.retrieval import NEAREST, Retrieval, swaps_of

SHOWN, SWAPS_SHOWN = 4, 3  # pairs in the gallery of prototypes, and swaps in theirs
TEXTS_SHOWN = 3  # nearest texts of an image
Thumbnails = Callable[[str], str | None]  # data URI of an image, by its name in the manifest


def thumbnail_reader(root: Path) -> Thumbnails:
    """A function: path of an image below `root` -> its thumbnail; None if unreadable."""
    return lambda image: thumbnail(root / image)


def missing_images_note(root: Path, images: Sequence[str], dataset: str) -> list[Block]:
    """One note if none of a data set's images exists in `root`; otherwise an empty list."""
    if any((root / uncropped_path(image)).is_file() for image in images):
        return []
    return [Note(f"The images of {dataset} are not on this machine (expected in {root}); only labels are shown.")]


@dataclass(frozen=True)
class RetrievalContext(Retrieval):
    """What is retrieved, and the test images with thumbnails."""

    images: Sequence[str]  # names of the test images
    thumbnails: Thumbnails


@dataclass(frozen=True)
class Hit:
    """A test image near a prototype or swapped factors."""

    row: int  # among the test images
    image: str
    label: str
    cosine: float
    right: bool  # whether it is labelled with the composition that was looked for


def prototype_hits(context: RetrievalContext, composition: int, top: int) -> dict[str, list[Hit]]:
    """Kind of prototype -> the `top` test images nearest to that of the composition."""
    if not context.can_retrieve:
        raise UsageError("the run's method has no prototypes; choose one that has some, such as `--method duplex`")
    hits = {}
    for kind, prototype in context.prototypes(np.array([composition])).items():
        rows, cosines = nearest(prototype, context.features.in_space_of(kind), top)
        hits[kind] = _hits(context, rows[0], cosines[0], composition)
    return hits


def _hits(context: RetrievalContext, rows: Ints, cosines: Floats, wanted: int) -> list[Hit]:
    labels = context.compositions
    hits = []
    for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True):
        name = context.labels.name(int(labels[row]))
        hits.append(Hit(row, context.images[row], name, cosine, bool(labels[row] == wanted)))
    return hits


def _thumb(context: RetrievalContext, hit: Hit) -> Thumb:
    alt = f"test image labelled {hit.label}"
    lines = [Caption(f"cosine {hit.cosine:.3f}")]
    return Thumb(context.thumbnails(hit.image), hit.label, alt, hit.right, lines)


def _masks(seen: Bools) -> dict[str, Bools]:
    masks: dict[str, Bools] = {"seen": seen, "unseen": ~seen, "all": np.ones_like(seen)}
    return {name: mask for name, mask in masks.items() if mask.any()}


def _shares_table(
    caption: str, heading: str, numbers: Mapping[str, Any], place: tuple[str, str], titles: Mapping[str, str], note: str
) -> Table:
    rows = []
    for name, title in titles.items():
        cells = [number_cell(value, source=json_pointer(*place, name, kind)) for kind, value in numbers[name].items()]
        rows.append(TableRow([text_cell(title), *cells]))
    return Table(caption, headings(heading, *numbers[next(iter(titles))]), rows, note)


def prototype_blocks(context: RetrievalContext, file: str) -> tuple[list[Block], dict[str, Any]]:
    """Blocks on images nearest to prototypes, and the numbers that they cite from `file`."""
    if not context.can_retrieve:
        return [Note("The method has no prototypes.")], {}
    present = np.unique(context.compositions)
    shares = {}
    for kind, prototypes in context.prototypes(present).items():
        rows = context.nearest_to_prototypes(kind, prototypes)
        shares[kind] = {
            name: 100 * precision(rows[mask], context.compositions, present[mask])
            for name, mask in _masks(context.labels.seen[present]).items()
        }
    note = "Share of the four nearest test images that have the prototype's label, mean over the test pairs, percent."
    titles = {kind: f"{kind} prototypes" for kind in shares}
    caption = "Precision among the four nearest images"
    table = _shares_table(caption, "of", shares, (file, "precision_at_4"), titles, note)
    return [table, _prototype_gallery(context, present)], {"precision_at_4": shares}


def _prototype_gallery(context: RetrievalContext, present: Ints) -> Gallery:
    counts = np.bincount(context.compositions, minlength=context.labels.size)[present]
    order = present[np.argsort(-counts, kind="stable")]
    seen = context.labels.seen[order]
    groups = []
    for kind, pairs in (("seen", order[seen]), ("unseen", order[~seen])):
        for composition in pairs[: SHOWN // 2].tolist():
            strips = [
                Strip(f"nearest to the {prototype} prototype", [_thumb(context, hit) for hit in hits])
                for prototype, hits in prototype_hits(context, composition, NEAREST).items()
            ]
            groups.append(Strips(f"{context.labels.name(composition)} ({kind})", strips))
    return Gallery(groups, "Test images nearest to a pair's prototypes, with their labels and cosines.")


@dataclass(frozen=True)
class RetrievedTexts:
    """The texts (semantic prototypes) nearest to test images; empty without texts."""

    lines: Mapping[int, Sequence[Caption]] = field(default_factory=dict)  # by row of the manifest
    blocks: Sequence[Block] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)  # cited by `blocks`


def nearest_texts(context: RetrievalContext) -> tuple[Ints, Floats] | None:
    """The three nearest texts of each test image [n, 3], with cosines; None without texts."""
    text_space = context.features.text_space
    if context.method.semantic is None or text_space is None:
        return None
    candidates = context.labels.candidates("closed", "test")
    places, cosines = nearest(text_space, context.method.semantic(candidates).cpu().numpy(), TEXTS_SHOWN)
    return candidates[places], cosines


def retrieve_texts(context: RetrievalContext, file: str) -> RetrievedTexts:
    """Find each test image's nearest texts, and the share of right ones, cited from `file`."""
    found = nearest_texts(context)
    if found is None:
        return RetrievedTexts()
    compositions, cosines = found
    right: Bools = compositions == context.compositions[:, None]
    names = [context.labels.names(column) for column in compositions.T]
    lines = {}
    for i, row in enumerate(context.test.rows.tolist()):
        texts = [f"{cosines[i, k]:.3f} {column[i]}" for k, column in enumerate(names)]
        lines[row] = [Caption(text, bool(right[i, k])) for k, text in enumerate(texts)]
    hits = {"first": right[:, 0], "among_three": np.any(right, axis=1)}
    masks = _masks(context.labels.seen[context.compositions])
    shares = {}
    for name, hit in hits.items():
        shares[name] = {kind: 100 * float(hit[mask].mean()) for kind, mask in masks.items()}
    titles = {"first": "the nearest text", "among_three": "one of the nearest three"}
    note = "Share of test images whose label it is, by cosine of feature and semantic prototype, closed world, percent."
    table = _shares_table("Image to text", "label is", shares, (file, "texts"), titles, note)
    return RetrievedTexts(lines, [table], {"texts": shares})


def swap_parts(context: RetrievalContext, file: str) -> tuple[list[Block], dict[str, Any]]:
    """Blocks on swapped factors of test images, and the numbers that they cite from `file`."""
    if context.features.states is None or context.features.objects is None:
        return [Note("The method has no state and object factors to swap.")], {}
    numbers, gallery = _swap_all(context)
    forms = {"questions": "{}", "first_right": "{:.1f}"}
    cells = [number_cell(value, forms[key], json_pointer(file, "swap", key)) for key, value in numbers.items()]
    header = headings("swaps", "nearest image right, %", texts=0)[: len(cells)]
    note = "One swap per test pair: how often the nearest other image shows exactly the state of A and the object of B."
    return [Table("Swapped factors", header, [TableRow(cells)], note), gallery], {"swap": numbers}


def _swap_all(context: RetrievalContext) -> tuple[dict[str, float], Gallery]:
    found = swaps_of(context)
    if found is None:
        return {"questions": 0}, Gallery([], "No two test images have a state and an object of another test pair.")
    groups = []
    for q in np.argsort(context.labels.seen[found.wanted], kind="stable")[:SWAPS_SHOWN].tolist():
        wanted = int(found.wanted[q])
        sources = found.sources[q].tolist()
        hits = _hits(context, found.rows[q], found.cosines[q], wanted)
        groups.append((q, _swap_group(context, sources, wanted, [_thumb(context, hit) for hit in hits])))
    joined = "concatenated with" if context.method.fuse is None else "joined by φ (Eq. 11) with"
    caption = f"The state of A {joined} the object of B, and the test images nearest to it (A and B left out)."
    strips = [group for _, group in sorted(groups, key=lambda pair: pair[0])]
    first_right = 100 * float(np.mean(found.first_right(context.compositions)))
    return {"questions": len(found.wanted), "first_right": first_right}, Gallery(strips, caption)


def _swap_group(context: RetrievalContext, sources: Sequence[int], wanted: int, thumbs: list[Thumb]) -> Strips:
    pair = []
    for row, role in zip(sources, ("A: its state", "B: its object"), strict=True):
        name = context.labels.name(int(context.compositions[row]))
        uri = context.thumbnails(context.images[row])
        pair.append(Thumb(uri, name, f"source image {role}", None, [Caption(role)]))
    strips = [Strip("sources", pair), Strip("nearest to A's state and B's object", thumbs)]
    return Strips(f"→ {context.labels.name(wanted)}", strips)
