"""The encoder that `duplex fit` chooses, and what is known of published encoders without building them.

encoders.csv    one row per published weights (`python -m benchmarks.encoder_table`): width, size, licence, and
                whether prompts can be encoded and blocks fine-tuned
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from duplex.config.params import EncoderParams
from duplex.encoders.base import (
    PACKAGED,
    CatalogEntry,
    EncoderFamily,
    MissingWeights,
    is_reachable,
    missing_weights,
    unknown_words,
)
from duplex.errors import UsageError
from duplex.labels import LabelSpace, prompt_name

TABLE = Path(__file__).with_name("encoders.csv")
COLUMNS = ("encoder", "weights", "width", "megabytes", "licence", "text", "blocks")
LONGEST = 1800.0  # seconds that encoding may take on a CPU
SHOWN = 2  # other encoders with a text tower, in the line on them
FASTEST = 0.1  # seconds per image of the encoders that remain where none is fast enough
# Encoders with a text tower, the most accurate without training (ImageNet, as published) first -> published weights,
# seconds per image on one CPU core
OFFERS = {
    "PE-Core-L-14-336": ("meta", 3.3),
    "ViT-L-16-SigLIP2-256": ("webli", 1.4),
    "ViT-B-16-SigLIP2": ("webli", 0.3),
    "MobileCLIP2-S2": ("dfndr2b", 0.22),
    "ViT-L-14-quickgelu": ("openai", 1.4),
    "ViT-B-32-SigLIP2-256": ("webli", 0.1),
    "PE-Core-S-16-384": ("meta", 0.28),
    "MobileCLIP2-S0": ("dfndr2b", 0.08),
    "ViT-B-16-quickgelu": ("openai", 0.3),
    "ViT-B-32-quickgelu": ("openai", 0.08),
}
# Without a text tower, to be tried beside one of these
BESIDE = {
    "timm:vit_base_patch16_dinov3": ("lvd1689m", 0.4),
    "timm:vit_small_patch16_dinov3": ("lvd1689m", 0.1),
}
RESEARCH = "for research only, commercial use is not allowed"
LICENCES = {  # as the hub writes them -> in words
    "apache-2.0": "Apache 2.0",
    "mit": "MIT",
    "apple-amlr": f"apple-amlr: {RESEARCH}",
    "cc-by-nc-4.0": "CC BY-NC 4.0: commercial use is not allowed",
    "fair-noncommercial-research-license": f"FAIR noncommercial: {RESEARCH}",
}
RESTRICTED = ("apple-amlr", "cc-by-nc-4.0", "fair-noncommercial-research-license")  # forbid commercial use


@dataclass(frozen=True)
class PublishedEncoder:
    """What encoders.csv says about one encoder with one of its published weights."""

    encoder: str
    weights: str  # tag; empty if there is none
    width: int  # of the features
    megabytes: int | None  # of all parameters in float32; None: unknown
    licence: str  # as the hub writes it; empty: unknown
    text: bool  # whether prompts can be encoded
    blocks: bool  # whether the last blocks of the image tower can be fine-tuned

    def describe(self) -> str:
        """Size and licence in words."""
        size = "" if self.megabytes is None else f"{_gigabytes(1e6 * self.megabytes)}, "
        return size + licence_words(self.licence)


def licence_words(licence: str) -> str:
    """A licence in words that say whether commercial use is allowed, if that is known."""
    if not licence:
        return "licence: see its model card"
    words = LICENCES.get(licence, f"{licence}: read its terms before commercial use")
    return f"licence {words}"


@cache
def published_encoders() -> tuple[PublishedEncoder, ...]:
    """All rows of encoders.csv."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(
            PublishedEncoder(
                encoder=row["encoder"],
                weights=row["weights"],
                width=int(row["width"]),
                megabytes=int(row["megabytes"]) if row["megabytes"] else None,
                licence=row["licence"],
                text=row["text"] == "yes",
                blocks=row["blocks"] == "yes",
            )
            for row in csv.DictReader(file)
        )


@cache
def find_published(encoder: str, weights: str | None) -> PublishedEncoder | None:
    """What is known of an encoder with published weights; None if nothing."""
    found = [row for row in published_encoders() if (row.encoder, row.weights) == (encoder, weights or "")]
    return found[0] if found else None


def choose_encoder(labels: LabelSpace, images: int, *, gpu: bool, cores: int) -> tuple[EncoderParams, str]:
    """The most accurate encoder that needs at most half an hour (with a GPU: any time), and why.

    Weights on disk come first. Weights that may not be used commercially are never downloaded unasked.
    """
    machine = "a GPU" if gpu else f"{cores} cores and no GPU"
    why = f"{machine}, {images:,} images"
    absent: dict[str, tuple[EncoderParams, MissingWeights]] = {}
    for name in _in_time(images, gpu=gpu, cores=cores):
        entry = EncoderParams(name=name, weights=OFFERS[name][0])
        missing = missing_weights(name, entry.weights)
        licence = _licence(entry)
        if missing is None:
            return entry, f"{why}, weights on disk, {licence_words(licence)}"
        if licence not in RESTRICTED:
            absent[name] = entry, missing
    if not unknown_words(PACKAGED, prompt_words(labels)):
        return EncoderParams(name=PACKAGED), "the packaged encoder knows all words"
    for entry, missing in absent.values():
        if is_reachable(missing.address):
            size = _gigabytes(missing.size) if missing.size else "weights"
            return entry, f"{why}, {size} to download, {licence_words(_licence(entry))}"
    raise UsageError(
        f"the weights of {', '.join(absent)} are not on this computer, and none can be downloaded; connect to "
        "the network and run the same command again, or give --encoder local-dir:FOLDER, where FOLDER holds an "
        "open_clip model"
    )


def other_offers(chosen: EncoderParams, images: int, *, gpu: bool, cores: int) -> str:
    """One line on other encoders that are fast enough, with size and licence."""
    parts = []
    for name in _in_time(images, gpu=gpu, cores=cores):
        weights = OFFERS[name][0]
        if name != chosen.name and weights != "openai":
            parts.append(_offer(name, weights))
    del parts[SHOWN:]
    names = [name for name, (_, seconds) in BESIDE.items() if gpu or seconds * images / cores <= LONGEST]
    beside = (names or list(BESIDE)[-1:])[0]
    parts.append(f"images alone, {_offer(beside, BESIDE[beside][0])}")
    return f"other encoders (`duplex encoders` lists all): {'; '.join(parts)}"


def list_encoders(families: Iterable[EncoderFamily]) -> list[dict[str, Any]]:
    """Facts on each encoder that a family or encoders.csv lists, by name; None: unknown."""
    listed: dict[str, CatalogEntry] = {}
    for family in families:
        listed |= {entry.name: entry for entry in family.catalog()}
    known: dict[str, list[PublishedEncoder]] = {name: [] for name in listed}
    for row in published_encoders():
        known.setdefault(row.encoder, []).append(row)
    return [_facts(name, listed.get(name), rows) for name, rows in known.items()]


def _facts(name: str, entry: CatalogEntry | None, rows: list[PublishedEncoder]) -> dict[str, Any]:
    if entry is None:
        tags = tuple(row.weights for row in rows)
        on_disk = tuple(tag for tag in tags if missing_weights(name, tag) is None)
        entry = CatalogEntry(name, rows[0].width, tags, on_disk)
    facts: dict[str, Any] = {"megabytes": None, "text": None, "blocks": None}
    if rows:
        facts = {key: getattr(rows[0], key) for key in facts}
    licences = {row.weights: row.licence for row in rows if row.weights in entry.tags}
    names = dict.fromkeys(licences.get(tag) or "see its model card" for tag in entry.tags)
    short = [f"{each} (no commercial use)" if each in RESTRICTED else each for each in names]
    return {**asdict(entry), **facts, "licences": licences, "licence": ", ".join(short) or "-"}


def _offer(name: str, weights: str) -> str:
    known = find_published(name, weights)
    return f"--encoder {name} --weights {weights}" + ("" if known is None else f" ({known.describe()})")


def _in_time(images: int, *, gpu: bool, cores: int) -> list[str]:
    """Names of the offers that encode the images in half an hour, or of the fastest."""
    names = [name for name, (_, seconds) in OFFERS.items() if gpu or seconds * images / cores <= LONGEST]
    return names or [name for name, (_, seconds) in OFFERS.items() if seconds <= FASTEST]


def _licence(entry: EncoderParams) -> str:
    known = find_published(entry.name, entry.weights)
    return "" if known is None else known.licence


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def prompt_words(labels: LabelSpace) -> Sequence[str]:
    """The names of all states and objects, as prompts write them."""
    return [prompt_name(name) for name in (*labels.states, *labels.objects)]
