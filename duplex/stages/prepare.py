"""Write a data set's manifest, labels and statistics; the images of the embedded benchmark `shapes` are drawn first."""

from __future__ import annotations

import sys

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.dataset_source import ensure_images, load_source
from duplex.data.manifest import write_manifest
from duplex.data.prepared_source import write_source
from duplex.data.stats import count_dataset
from duplex.features.feature_file import feature_keys
from duplex.system.files import write_json


def prepare(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write a data set's manifest, labels, statistics, and the source's options and digest (to notice changes).

    Prints notes on rows of the source that were left out.
    """
    source = params.dataset(dataset).source
    data = load_source(source, feature_keys(params.dataset(dataset).features, source))
    for note, count in data.notes.items():
        print(f"{dataset}: {note}: {count:,}", file=sys.stderr)
    ensure_images(source, data.manifest)
    write_manifest(data.manifest, paths.manifest(dataset))
    data.labels.save(paths.labels(dataset))
    write_json(paths.statistics(dataset), count_dataset(data.labels, data.manifest).to_dict())
    write_source(source, paths.source(dataset))
