"""All runs -> aggregate metrics, figures, the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from duplex.artifacts import ArtifactPaths
from duplex.features.store import open_file, read_identity
from duplex.params import Params
from duplex.progress import Live
from duplex.report.aggregate import Aggregate, aggregate, headlines, read_metrics, write_json
from duplex.report.material import DatasetMaterial, Material, read_run, read_tree
from duplex.report.page import write_report
from duplex.report.provenance import find_provenance
from duplex.report.sections import build_report
from duplex.report.series import curve_table, training_table
from duplex.stages.pictured import pictured


def run(params: Params, paths: ArtifactPaths | None = None) -> Path:
    """Gather the metrics of every run that params.yaml names and lay them out; returns the page."""
    paths = paths or ArtifactPaths()
    names = params.run
    summary = aggregate({(d, m): found for d in names.datasets for m, found in gathered(params, d, paths).items()})
    write_json(summary, paths.summary)
    write_json(headlines(summary), paths.metrics)
    material = gather(params, summary, paths)
    with Live("report", len(names.datasets)) as live:
        found = {}
        for done, dataset in enumerate(names.datasets, 1):
            found[dataset] = pictured(params, dataset, paths)
            live.show(done)
    report = build_report(material, find_provenance(), {dataset: one.parts for dataset, one in found.items()})
    numbers = {name: record for one in found.values() for name, record in one.numbers.items()}
    page = write_report(report, paths.report, paths.plots / "figures", numbers)
    for name, table in (("curves", curve_table(material)), ("training", training_table(material))):
        table.to_csv(paths.plots / f"{name}.csv", index=False, lineterminator="\n", float_format="%.4f")
    return page


def gathered(params: Params, dataset: str, paths: ArtifactPaths) -> dict[str, list[dict[str, Any]]]:
    """Metrics of every seed by method; a row that is shown as another one gives that method its worlds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in params.run.methods:
        row = params.row(name)
        records = [read_metrics(paths.run(dataset, name, seed).metrics) for seed in params.run.seeds]
        if row.shown_as is not None:
            records = [{world: record[world] for world in row.worlds if world in record} for record in records]
        before = found.get(row.shown_as or name)
        found[row.shown_as or name] = (
            records if before is None else [{**a, **b} for a, b in zip(before, records, strict=True)]
        )
    return found


def gather(params: Params, summary: Aggregate, paths: ArtifactPaths) -> Material:
    """Read what every run left behind."""
    table = paths.ablations / "metrics.json"
    ablations = read_tree(table) or {}
    datasets = [
        DatasetMaterial(
            name=dataset,
            summary=summary[dataset],
            runs={
                method: {seed: read_run(paths.run(dataset, method, seed)) for seed in params.run.seeds}
                for method in params.run.methods
            },
            shown_as={name: shown for name in params.run.methods if (shown := params.row(name).shown_as) is not None},
            ablations=ablations.get(dataset, {}),
            statistics=read_tree(paths.statistics(dataset)),
            statistics_file=paths.statistics(dataset).as_posix(),
            extraction=read_tree(paths.extraction(dataset)),
            extraction_file=paths.extraction(dataset).as_posix(),
            identity=_identity(paths.features(dataset)),
        )
        for dataset in params.run.datasets
    ]
    return Material(tuple(datasets), paths.summary.as_posix(), table.as_posix(), params.run.seeds)


def _identity(path: Path) -> dict[str, str]:
    """What the features were made by; nothing where they are not on this machine."""
    if not path.is_file():
        return {}
    with open_file(path) as file:
        return {key: str(value) for key, value in read_identity(file).items()}
