"""The stage `extract`: images -> features of the frozen encoder; and `duplex cache verify`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from duplex.artifacts import ArtifactPaths
from duplex.data.sources import draw_missing_images
from duplex.data.tables import read_manifest, read_table
from duplex.encoders.base import Encoder, load_encoder
from duplex.errors import UsageError
from duplex.features.extract import ExtractionReport, ExtractionSettings, bad_images
from duplex.features.extract import extract as encode
from duplex.features.file import DATASETS, IMPORTED, open_cache, read_features
from duplex.features.imported import import_features
from duplex.features.inspect import verify
from duplex.project.prepare import require_images
from duplex.project.run import ProjectData
from duplex.system.files import sha256, write_text


def extract(
    data: ProjectData, *, out: Path | None = None, shard: tuple[int, int] | None = None, fresh: bool = False
) -> ExtractionReport:
    """Encode images, or import features, into `out` or the data set's own cache."""
    features = data.entry.features
    place = out or data.paths.features(data.dataset)
    stamp = data.stamp("extract") if out is None and shard is None else None
    if features is not None:
        if shard is not None:
            imported = f"{data.dataset} has imported features, {features}"
            raise UsageError(f"{imported}, so nothing is encoded; leave out --shard")
        report = _import_features(data, features, place)
    else:
        images, settings = extraction_inputs(data)
        if data.entry.encoder.name == IMPORTED:
            raise UsageError(
                f"the data set {data.dataset!r} has no known encoder, so its images cannot be "
                f"encoded; set `features` in params.yaml or datasets/{data.dataset}.yaml to the "
                "file of imported features"
            )
        reuse = [data.paths.features(name) for name in data.params.datasets] if shard is None else []
        report = encode(images, place, _image_encoder(data), settings, shard=shard, reuse=reuse, fresh=fresh)
    write_extraction_summary(report.path)
    if stamp is not None:
        data.write_stamp("extract", stamp)
    return report


def _import_features(data: ProjectData, features: Path, out: Path) -> ExtractionReport:
    data.require("prepare")
    began = time.monotonic()
    manifest = data.paths.manifest(data.dataset)
    images = read_manifest(manifest)["image"].tolist()
    table = data.entry.source.table
    listed = list(dict.fromkeys(read_table(table)["image"])) if table else None  # the features' rows
    max_bad = data.params.extraction.max_bad
    import_features(features, len(images), sha256(manifest), out, images, max_bad, listed)
    statuses = read_features(out).statuses
    return ExtractionReport(out, len(images), 0, time.monotonic() - began, bad_images(statuses, images))


def verify_cache(data: ProjectData, path: Path, *, sample: int, seed: int) -> dict[str, Any]:
    """Encode a sample of a cache's images again; returns their number and the lowest cosine."""
    images, settings = extraction_inputs(data)
    encoder = _image_encoder(data)
    return verify(path, encoder, images, settings.root, settings.manifest_sha256, sample=sample, seed=seed)


def extraction_inputs(data: ProjectData) -> tuple[list[str], ExtractionSettings]:
    """Image paths, and settings for encoding them; missing images of `shapes` are drawn first."""
    source = data.entry.source
    settings = data.params.extraction
    manifest_path = data.paths.manifest(data.dataset)
    data.require("prepare")
    manifest = read_manifest(manifest_path)
    draw_missing_images(source, manifest)
    images = manifest["image"].tolist()
    require_images(data.dataset, source.root, images)
    return images, ExtractionSettings(
        root=source.root,
        manifest_sha256=sha256(manifest_path),
        recorded_root=source.recorded_root,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        tokens=settings.tokens,
        block_inputs=data.params.block_inputs(data.dataset),
        pixels=data.params.pixels(data.dataset),
        max_bad=settings.max_bad,
    )


def write_extraction_summary(cache: Path) -> None:
    """Write extraction.json beside a data set's own cache, and delete its outdated stamp."""
    paths = ArtifactPaths(cache.parent.parent)
    dataset = cache.parent.name
    if cache != paths.features(dataset) or not paths.manifest(dataset).exists():
        return
    paths.stamp(dataset, "extract").unlink(missing_ok=True)
    with open_cache(cache) as file:
        statuses = file["status"][...]
        size = sum(file[name].nbytes for name in DATASETS if name in file)
    bad = bad_images(statuses, read_manifest(paths.manifest(dataset))["image"].tolist())
    record: dict[str, Any] = {"rows": len(statuses), "bytes": size, "bad": len(bad)}
    record["bad_images"] = [asdict(image) for image in bad]
    write_text(paths.extraction(dataset), json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _image_encoder(data: ProjectData) -> Encoder:
    entry = data.entry.encoder
    device = data.params.device
    options: Any = {"precision": entry.precision, "resize": entry.resize}
    return load_encoder(entry.name, entry.weights, towers="image", device=device, **options)
