"""Manifest and encoder -> feature cache."""

from __future__ import annotations

import json

from duplex.artifacts import ArtifactPaths
from duplex.data.manifest import manifest_hash, read_manifest
from duplex.data.source import ensure_pictures
from duplex.encoders import load_encoder
from duplex.features.extraction import ExtractionReport
from duplex.features.extraction import extract as encode
from duplex.params import Params


def extract(params: Params, dataset: str, paths: ArtifactPaths | None = None) -> ExtractionReport:
    """Encode a data set's pictures once; say how many could not be read."""
    paths = paths or ArtifactPaths()
    entry, settings = params.dataset(dataset), params.extraction
    manifest_path = paths.manifest(dataset)
    manifest = read_manifest(manifest_path)
    ensure_pictures(entry.source, manifest)
    wanted = entry.encoder
    encoder = load_encoder(
        wanted.name, wanted.weights, towers="image", device=params.device, precision=wanted.precision
    )
    report = encode(
        manifest["image"].tolist(),
        entry.source.root,
        paths.features(dataset),
        encoder,
        manifest_sha256=manifest_hash(manifest_path),
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        tokens=settings.tokens,
        max_bad=settings.max_bad,
    )
    record = {"rows": report.rows, "bad": len(report.bad), "bad_images": [vars(bad) for bad in report.bad]}
    paths.extraction(dataset).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return report
