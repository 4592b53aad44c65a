"""Data root (or the renderer) -> manifest, labels, statistics."""

from __future__ import annotations

import json
import sys

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.manifest import write_manifest
from duplex.data.source import ensure_pictures, load_source
from duplex.data.stats import statistics
from duplex.system.files import write_text


def prepare(params: Params, dataset: str, paths: ArtifactPaths | None = None) -> None:
    """Write the manifest of a data set, its labels and its statistics."""
    paths = paths or ArtifactPaths()
    source = params.dataset(dataset).source
    data = load_source(source)
    for what, count in data.notes.items():
        print(f"{dataset}: {what}: {count:,}", file=sys.stderr)
    ensure_pictures(source, data.manifest)
    write_manifest(data.manifest, paths.manifest(dataset))
    data.labels.save(paths.labels(dataset))
    record = statistics(data.labels, data.manifest).to_dict()
    write_text(paths.statistics(dataset), json.dumps(record, indent=2) + "\n")
