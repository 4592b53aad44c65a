"""All runs -> aggregate metrics, figures, the page."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.features.layout import open_file, read_identity
from duplex.report.aggregate import Aggregate, aggregate, headlines, write_json
from duplex.report.numbers import Tree
from duplex.report.page import write_report
from duplex.report.page_sections import build_report
from duplex.report.provenance import find_provenance
from duplex.report.results import DatasetResults, Results, read_run, read_tree
from duplex.report.series import curve_table, training_table
from duplex.stages.report_images import pictured
from duplex.system.files import replaced
from duplex.system.progress import Bar


def run(params: Params, paths: ArtifactPaths | None = None) -> Path:
    """Gather the metrics of every run that params.yaml names and lay them out; returns the page."""
    paths = paths or ArtifactPaths()
    names = params.run
    runs: dict[tuple[str, str], list[Tree]] = {}
    absent: dict[str, list[str]] = {}
    for dataset in names.datasets:
        found, missing = gathered(params, dataset, paths)
        runs |= {(dataset, method): records for method, records in found.items()}
        absent |= {dataset: missing} if missing else {}
    summary = aggregate(runs)
    write_json(summary, paths.summary)
    write_json(headlines(summary), paths.metrics)
    results = replace(gather(params, summary, paths), absent=absent)
    with Bar("report", len(names.datasets)) as bar:
        shown = {}
        for done, dataset in enumerate(names.datasets, 1):
            shown[dataset] = pictured(params, dataset, paths)
            bar.show(done)
    report = build_report(results, find_provenance(), {dataset: one.parts for dataset, one in shown.items()})
    numbers = {name: record for one in shown.values() for name, record in one.numbers.items()}
    page = write_report(report, paths.report, paths.plots / "figures", numbers)
    for name, table in (("curves", curve_table(results)), ("training", training_table(results))):
        with replaced(paths.plots / f"{name}.csv") as scratch:
            table.to_csv(scratch, index=False, lineterminator="\n", float_format="%.4f")
    return page


def gathered(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[dict[str, list[Tree]], list[str]]:
    """Metrics of every seed by method, and the runs that are not there. A row that is shown as another one gives that
    method its worlds."""
    found: dict[str, dict[int, Tree]] = {}
    missing = []
    for name, seed in product(params.run.methods, params.run.seeds):
        row, record = params.row(name), read_tree(paths.run(dataset, name, seed).metrics)
        if record is None:
            missing.append(f"{name} seed {seed}")
            continue
        if row.shown_as is not None:
            record = {world: record[world] for world in row.worlds if world in record}
        seeds = found.setdefault(row.shown_as or name, {})
        seeds[seed] = {**seeds.get(seed, {}), **record}
    return {name: list(seeds.values()) for name, seeds in found.items()}, missing


def gather(params: Params, summary: Aggregate, paths: ArtifactPaths) -> Results:
    """Read what every run left behind."""
    table = paths.ablations / "metrics.json"
    ablations = read_tree(table, names=2) or {}
    datasets = [
        DatasetResults(
            name=dataset,
            summary=summary.get(dataset, {}),
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
    return Results(tuple(datasets), paths.summary.as_posix(), table.as_posix(), params.run.seeds)


def _identity(path: Path) -> dict[str, str]:
    """What the features were made by; nothing where they are not on this machine."""
    if not path.is_file():
        return {}
    with open_file(path) as file:
        return {key: str(value) for key, value in read_identity(file).items()}
