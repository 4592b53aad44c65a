"""All runs -> aggregate metrics, figures, the page."""

from __future__ import annotations

from duplex.artifacts import ArtifactPaths
from duplex.params import Params
from duplex.report.aggregate import aggregate, read_metrics, write_json


def run(params: Params, paths: ArtifactPaths | None = None) -> None:
    """Gather the metrics of every run that params.yaml names."""
    paths = paths or ArtifactPaths()
    names = params.run
    runs = {
        (dataset, method): [read_metrics(paths.run(dataset, method, seed).metrics) for seed in names.seeds]
        for dataset in names.datasets
        for method in names.methods
    }
    write_json(aggregate(runs), paths.metrics)
