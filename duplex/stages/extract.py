"""Manifest and encoder -> feature cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.manifest import manifest_hash, read_manifest
from duplex.data.source import ensure_pictures
from duplex.data.tree import PictureTree
from duplex.encoders import load_encoder
from duplex.errors import UsageError
from duplex.features.copy_cache import reuse
from duplex.features.extraction import ExtractionReport
from duplex.features.extraction import extract as encode
from duplex.features.identity import IMPORTED, Identity, cache_identity
from duplex.features.layout import FIRST_BAD, FORMS, open_file, reason
from duplex.system.files import write_text


def extract(
    params: Params, dataset: str, paths: ArtifactPaths | None = None, *, out: Path | None = None, **options: Any
) -> ExtractionReport:
    """Encode a data set's pictures once; say how many could not be read. `options` are those of the extraction that
    params.yaml does not hold, such as a shard or a limit."""
    paths = paths or ArtifactPaths()
    manifest, common = extraction_of(params, dataset, paths)
    entry = params.dataset(dataset).encoder
    if entry.name == IMPORTED:
        again = f"`duplex cache import FILE --dataset {dataset}`, then under DVC `dvc commit -f extract@{dataset}`"
        raise UsageError(f"the features of {dataset} were brought along and are not encoded here; {again}")
    encoder = load_encoder(entry.name, entry.weights, towers="image", device=params.device, precision=entry.precision)
    out, settings = out or paths.features(dataset), {**common, **options}
    if not options.get("fresh") and options.get("shard") is None and options.get("limit") is None:
        _reuse(params, dataset, paths, manifest, encoder.identity, out, settings)
    report = encode(manifest, out=out, encoder=encoder, **settings)
    note_extraction(report.path)
    return report


def extract_views(
    params: Params, dataset: str, paths: ArtifactPaths | None = None, **options: Any
) -> ExtractionReport | None:
    """Encode the views of a data set's training pictures, where params.yaml asks for some. `views.json` beside their
    cache says how many there are, none included."""
    paths = paths or ArtifactPaths()
    report, out = None, paths.views(dataset)
    if params.augmentation(dataset) is not None:
        images, settings = views_of(params, dataset, paths)
        entry = params.dataset(dataset).encoder
        loading = {"device": params.device, "precision": entry.precision}
        encoder = load_encoder(entry.name, entry.weights, towers="image", **loading)
        report = encode(images, out=out, encoder=encoder, **{**settings, **options})
    note_views(params, dataset, paths)
    return report


def views_of(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[list[str], dict[str, Any]]:
    """A data set's training pictures, and how their views are extracted."""
    manifest, common = extraction_of(params, dataset, paths)
    training = read_manifest(paths.manifest(dataset))["split"] == "train"
    images = [image for image, wanted in zip(manifest, training, strict=True) if wanted]
    return images, {**common, "deep_rows": None, "augmentation": params.augmentation(dataset)}


def note_views(params: Params, dataset: str, paths: ArtifactPaths) -> None:
    augmentation = params.augmentation(dataset)
    record = {"views": "0"} if augmentation is None else augmentation.identity
    write_text(paths.views(dataset).with_name("views.json"), json.dumps(record, indent=2) + "\n")


def _reuse(
    params: Params,
    dataset: str,
    paths: ArtifactPaths,
    images: list[str],
    encoder: Identity,
    out: Path,
    settings: Mapping[str, Any],
) -> None:
    """Take over the rows of a data set that differs in its split alone, where it has been extracted. Whichever comes
    first is encoded, so that the order of the stages does not matter."""
    own, kept = params.dataset(dataset).source, {key: settings[key] for key in ("tokens", "depth", "bits")}
    if settings["deep_rows"] is not None:  # those of another split
        return
    wanted = cache_identity(encoder, settings["manifest_sha256"], **kept)
    for name, entry in params.datasets.items():
        manifest, cache = paths.manifest(name), paths.features(name)
        same = entry.source.model_copy(update={"resplit": own.resplit}) == own
        if name == dataset or not same or not manifest.exists() or not cache.exists():
            continue
        expected = cache_identity(encoder, manifest_hash(manifest), **kept)
        if read_manifest(manifest)["image"].tolist() == images and reuse(cache, expected, out, wanted):
            print(f"{dataset}: the same pictures as {name}'s: {cache} is copied", file=sys.stderr)
            return


def note_extraction(cache: Path) -> None:
    """Write `extraction.json` beside a data set's own cache, however it was made: its size, what could not be read."""
    paths, dataset = ArtifactPaths(cache.parent.parent), cache.parent.name
    if cache != paths.features(dataset) or not paths.manifest(dataset).exists():
        return
    with open_file(cache) as file:
        marks, size = file["mark"][...], sum(file[name].nbytes for name in FORMS if name in file)
    images = read_manifest(paths.manifest(dataset))["image"]
    rows = np.flatnonzero(marks >= FIRST_BAD).tolist()
    bad = [{"row": row, "image": images[row], "reason": reason(marks[row])} for row in rows]
    record = {"rows": len(marks), "bytes": size, "bad": len(bad), "bad_images": bad}
    write_text(paths.extraction(dataset), json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def extraction_of(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[list[str], dict[str, Any]]:
    """A data set's pictures, there to be read, and what params.yaml says about extracting them."""
    entry, settings = params.dataset(dataset), params.extraction
    manifest_path = paths.manifest(dataset)
    manifest = read_manifest(manifest_path)
    ensure_pictures(entry.source, manifest)
    if entry.source.root.is_dir():
        tree = PictureTree(entry.source.root)
        for image in manifest["image"]:
            tree.has(image)  # refuses a link that leaves the root; a missing picture is marked
    deep_rows = None if entry.encoder.deep_test else (manifest["split"] != "test").to_numpy()
    return manifest["image"].tolist(), {
        "root": entry.source.root,
        "manifest_sha256": manifest_hash(manifest_path),
        "batch_size": settings.batch_size,
        "num_workers": settings.num_workers,
        "tokens": settings.tokens,
        "depth": params.depth(dataset),
        "bits": entry.encoder.bits,
        "deep_rows": deep_rows,
        "max_bad": settings.max_bad,
    }
