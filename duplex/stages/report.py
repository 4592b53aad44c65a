"""All runs -> aggregate metrics, figures, the page."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

from duplex.artifacts import ArtifactPaths
from duplex.features.layout import open_file, read_identity
from duplex.files import replaced
from duplex.params import Params
from duplex.progress import Live
from duplex.report.aggregate import Aggregate, aggregate, write_json
from duplex.report.material import DatasetMaterial, Material, read_run, read_tree
from duplex.report.numbers import Tree
from duplex.report.page import write_report
from duplex.report.provenance import find_provenance
from duplex.report.sections import build_report
from duplex.report.series import curve_table, training_table
from duplex.stages.pictured import pictured


def run(params: Params, paths: ArtifactPaths | None = None) -> Path:
    """Gather the metrics of every run that params.yaml names and lay them out; returns the page."""
    paths = paths or ArtifactPaths()
    names = params.run
    runs: dict[tuple[str, str], list[Tree]] = {}
    absent: dict[str, list[str]] = {}
    for dataset, method, seed in product(names.datasets, names.methods, names.seeds):
        found = read_tree(paths.run(dataset, method, seed).metrics)
        if found is None:
            absent.setdefault(dataset, []).append(f"{method} seed {seed}")
        else:
            runs.setdefault((dataset, method), []).append(found)
    summary = aggregate(runs)
    write_json(summary, paths.metrics)
    material = replace(gather(params, summary, paths), absent=absent)
    with Live("report", len(names.datasets)) as live:
        shown = {}
        for done, dataset in enumerate(names.datasets, 1):
            shown[dataset] = pictured(params, dataset, paths)
            live.show(done)
    report = build_report(material, find_provenance(), {dataset: one.parts for dataset, one in shown.items()})
    numbers = {name: record for one in shown.values() for name, record in one.numbers.items()}
    page = write_report(report, paths.report, paths.plots / "figures", numbers)
    for name, table in (("curves", curve_table(material)), ("training", training_table(material))):
        with replaced(paths.plots / f"{name}.csv") as scratch:
            table.to_csv(scratch, index=False, lineterminator="\n", float_format="%.4f")
    return page


def gather(params: Params, summary: Aggregate, paths: ArtifactPaths) -> Material:
    """Read what every run left behind."""
    table = paths.ablations / "metrics.json"
    ablations = read_tree(table, names=2) or {}
    datasets = [
        DatasetMaterial(
            name=dataset,
            summary=summary.get(dataset, {}),
            runs={
                method: {seed: read_run(paths.run(dataset, method, seed)) for seed in params.run.seeds}
                for method in params.run.methods
            },
            ablations=ablations.get(dataset, {}),
            statistics=read_tree(paths.statistics(dataset)),
            statistics_file=paths.statistics(dataset).as_posix(),
            extraction=read_tree(paths.extraction(dataset)),
            extraction_file=paths.extraction(dataset).as_posix(),
            identity=_identity(paths.features(dataset)),
        )
        for dataset in params.run.datasets
    ]
    return Material(tuple(datasets), paths.metrics.as_posix(), table.as_posix(), params.run.seeds)


def _identity(path: Path) -> dict[str, str]:
    """What the features were made by; nothing where they are not on this machine."""
    if not path.is_file():
        return {}
    with open_file(path) as file:
        return {key: str(value) for key, value in read_identity(file).items()}
