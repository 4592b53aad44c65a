"""All runs -> aggregate metrics, figures, the page."""

from __future__ import annotations

from duplex.artifacts import ArtifactPaths
from duplex.params import Params
from duplex.report.aggregate import aggregate, write_aggregate


def run(params: Params, paths: ArtifactPaths | None = None) -> None:
    """Gather the metrics of every run that params.yaml names."""
    paths = paths or ArtifactPaths()
    names = params.run
    runs = {
        (dataset, method): [paths.run(dataset, method, seed).metrics for seed in names.seeds]
        for dataset in names.datasets
        for method in names.methods
    }
    write_aggregate(aggregate(runs), paths.metrics)
