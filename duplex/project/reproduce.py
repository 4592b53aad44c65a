"""`duplex reproduce`: train and evaluate the paper's methods on a data set, and write the claims.

They are methods of the project in the folder `ablations` (project/paper_rows.py). With `--methods`,
methods of other publications are trained with their published options in the main project. The
pipeline's stages do the work and record what is done, so the same command continues after an
interruption.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import PARAMS_FILE, Params, dataset_files, parse_params, read_yaml
from duplex.data.sources import is_on_disk, load_source
from duplex.data.tables import LabelledImages
from duplex.encoders.base import missing_weights
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.vectors import read_word_vectors, unlike_published
from duplex.features.file import PIXELS
from duplex.features.imported import equal_feature_keys
from duplex.project.doctor import cache_row_bytes, free_bytes
from duplex.project.estimate import Estimate, estimate
from duplex.project.extract import extract
from duplex.project.maps import maps_stage
from duplex.project.paper_rows import PaperRows, RowGroup, benchmark_with, paper_rows
from duplex.project.prepare import ensure_prepared, require_images
from duplex.project.report import report_stage
from duplex.project.run import DATA_STAGES, RUN_STAGES, ProjectData, ProjectRun
from duplex.project.sweep import SweepResult, grid, sweep, workers_and_gpus
from duplex.system.files import size_text
from duplex.training.inputs import require_configured_inputs
from duplex.training.run import MethodSpec

PROJECT = Path("ablations")  # folder of the project with the paper's rows
PUBLISHED = ArtifactPaths.root / "published"  # folder of runs by published recipes
UNLIKE = ", whose counts are not the published ones of {}: no number will be compared"
UNFINISHED = (
    4  # times a checkpoint: an interrupted training has the best one, the last one and two moments of each value
)
FIRST = 5  # rows of the plan that may be left out


@dataclass(frozen=True)
class Plan:
    """What `duplex reproduce` will run for a data set, and the disk space and hours it needs."""

    data: ProjectData  # its params have patch tokens if a row needs them
    rows: PaperRows
    runs: list[ProjectRun]
    left: list[ProjectRun]  # the runs still to train or evaluate
    topics: dict[str, str]  # topic, such as `disk` -> text
    table: tuple[str, ...] = ()  # a line per row with its costs
    problem: str = ""  # why the data set cannot be run on this machine

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    def lines(self) -> list[str]:
        """The plan as lines of text, one per topic, then one per row."""
        topics = [f"{topic:<9}{text}" for topic, text in self.topics.items()]
        return [*topics, *(f"{'':<9}{line}" for line in self.table)]


def published_params(dataset: str, methods: Sequence[str], seeds: Sequence[int]) -> Params:
    """params.yaml with published options of `methods`; pixels are cached if one fine-tunes."""
    record = read_yaml(PARAMS_FILE)
    run = {"datasets": [dataset], "methods": list(methods), "seeds": list(seeds), "recipes": "published"}
    if isinstance(record.get("run"), dict) and "published_only" in record["run"]:
        run["published_only"] = record["run"]["published_only"]
    record |= {"run": run, "report": {}}
    params = parse_params(record, dataset_files(PARAMS_FILE), PARAMS_FILE)
    entry = params.dataset(dataset)
    specs = [MethodSpec.of(params, dataset, name) for name in methods]
    encoder = entry.encoder.model_copy(update={"pixels": any(spec.finetune for spec in specs)})
    return params.model_copy(update={"datasets": {dataset: entry.model_copy(update={"encoder": encoder})}})


def published_settings(params: Params, dataset: str) -> list[str]:
    """A line per method: its name, and its published settings that differ from defaults."""
    lines = []
    for name in params.run.methods:
        spec = MethodSpec.of(params, dataset, name)
        parts: list[tuple[str, Any]] = [("", spec.training), ("", spec.options)]
        if spec.finetune is not None:
            parts.append(("finetune.", spec.finetune))
        stated = []
        for prefix, part in parts:
            for key in fields(part):
                value = getattr(part, key.name)
                stated += [f"{prefix}{key.name} {value}"] if value != key.default else []
        lines.append(f"{name:<9}{', '.join(stated)}")
    return lines


def plan_reproduction(
    project: ProjectData, seeds: Sequence[int] | None, jobs: int | None, group: RowGroup = "ablations"
) -> Plan:
    """What is left to do for a data set; writes nothing; `DuplexError` if images are missing."""
    params = project.params
    dataset = project.dataset
    entry = project.entry
    reads_images = entry.source.kind != "shapes" and entry.features is None
    if reads_images and not is_on_disk(entry.source):
        require_images(dataset, entry.source.root, [])
    data = load_source(entry.source, equal_feature_keys(entry.features, entry.source))
    if reads_images:
        require_images(dataset, entry.source.root, data.manifest["image"].tolist())
    published = params.run.recipes == "published"
    rows = PaperRows(params.run.methods) if published else paper_rows(params, dataset, data, group)
    if not rows.run:
        listed = f"method that the paper's tables list for {dataset}"
        raise UsageError(f"{PROJECT / 'params.yaml'} has no {listed}; add one")
    for name in rows.run:
        require_configured_inputs(params, dataset, name)
    needs = [MethodSpec.of(params, dataset, name).request.needs for name in rows.run]
    tokens = "patch" if any("patch" in each for each in needs) else "none"
    extraction = params.extraction.model_copy(update={"tokens": tokens})
    params = params.model_copy(update={"extraction": extraction})
    project = replace(project, params=params)
    runs = grid(params, [dataset], rows.run, seeds, project.paths)
    stale = {stage: why for stage in DATA_STAGES if (why := _stale(project, stage))}
    left = [run for run in runs if stale or run.difference(*RUN_STAGES)]
    plan = Plan(project, rows, runs, left, {})
    return _with_costs(plan, data, jobs, stale)


def _with_costs(plan: Plan, data: LabelledImages, jobs: int | None, stale: dict[str, str]) -> Plan:
    params = plan.data.params
    dataset = plan.data.dataset
    entry = plan.data.entry
    published = params.run.recipes == "published"
    encoder = " ".join(filter(None, (entry.encoder.name, entry.encoder.weights)))
    is_absent = missing_weights(entry.encoder.name, entry.encoder.weights) is not None
    weights = "not on disk, downloaded when first needed" if is_absent else "on disk"
    note = UNLIKE.format(dataset) if published and benchmark_with(data) != dataset else ""
    extracts = "extract" in stale
    stages = [f"{stage} ({why})" for stage, why in stale.items()]
    stages += [f"{len(plan.left)} of {len(plan.runs)} runs to train or evaluate", "report"]
    costs = estimate(params, dataset, data, plan.rows.run) if extracts or plan.left else None
    features = _features(params, dataset, len(data.manifest)) if extracts else {}
    workers = _workers(plan, jobs)
    sizes = _disk_sizes(plan, features, costs, workers)
    free = free_bytes(plan.data.paths.root)
    topics = {
        "data": f"{len(data.manifest):,} images in {entry.source.root}{note}",
        "weights": f"{encoder}: {weights}",
        "disk": f"{_disk_text(sizes, features)}, {size_text(free)} free",
        "words": _words_text(params, data),
        "stages": ", ".join(stages),
        "hours": _hours(plan, costs, len(data.manifest) if extracts else 0, workers, stale or plan.left),
        "rows": f"{len(plan.rows.run)} × seeds {', '.join(map(str, plan.seeds))}: {', '.join(plan.rows.run)}",
    }
    if plan.rows.measured_in:
        shared = ", ".join(f"{name} in {host}" for name, host in plan.rows.measured_in.items())
        topics["once"] = f"measured in the run of another row: {shared}"
    if authors := params.authors_note(dataset):
        topics["authors"] = authors
    if own := params.own_settings_note():
        topics["own"] = own
    if plan.rows.absent:
        topics["not run"] = ", ".join(f"{name} ({why})" for name, why in plan.rows.absent.items())
    if costs and plan.left and not published:
        topics["drop"] = f"seeds first, then {', '.join(_least_telling(plan.rows, costs)[:FIRST])}"
    problem = ""
    if sum(sizes.values()) > free:
        needed = size_text(sum(sizes.values()))
        problem = f"{dataset} needs {needed}, but only {size_text(free)} are free"
        problem += "; make room, or move the project to a larger disk"
    return replace(plan, topics=topics, table=_table(plan.rows, costs), problem=problem)


def _words_text(params: Params, data: LabelledImages) -> str:
    """The word vectors of the open world, and whether its numbers can be compared."""
    file = params.evaluation.word_vectors
    record = None
    if file is not None:
        record = read_word_vectors(file, [*data.labels.states, *data.labels.objects]).to_dict()
    unlike = unlike_published(record)
    return f"open world not comparable: {unlike}" if unlike else f"{file}, as in CSP's code"


def _features(params: Params, dataset: str, images: int) -> dict[str, int] | None:
    try:
        return {name: images * size for name, size in cache_row_bytes(params, dataset).items()}
    except UsageError:  # an encoder without its weights, of a family that cannot draw them
        return None


def _disk_sizes(plan: Plan, features: dict[str, int] | None, costs: Estimate | None, workers: int) -> dict[str, int]:
    """Bytes to write, by what is written."""
    checkpoints = [costs.rows[run.method].checkpoint for run in plan.left] if costs else []
    return {
        "features": sum((features or {}).values()),
        "checkpoints": sum(checkpoints),
        "unfinished training": UNFINISHED * workers * max(checkpoints, default=0),
    }


def _disk_text(sizes: dict[str, int], features: dict[str, int] | None) -> str:
    if features is None:
        return "unknown size of features to write"
    pixels = f" ({size_text(features[PIXELS])} of them pixels)" if PIXELS in features else ""
    parts = [f"{size_text(sizes['features'])} of features{pixels}"]
    parts += [f"{size_text(sizes[name])} of {name}" for name in ("checkpoints", "unfinished training")]
    return f"{', '.join(parts)} to write"


def _workers(plan: Plan, jobs: int | None) -> int:
    """Number of runs that are trained at once."""
    threads = MethodSpec.of(plan.data.params, plan.data.dataset, plan.rows.run[0]).training.threads
    threads = torch.get_num_threads() if threads == "auto" else threads
    return min(workers_and_gpus(plan.data.params.device, jobs, threads)[0], max(1, len(plan.left)))


def _hours(plan: Plan, costs: Estimate | None, encoded: int, workers: int, is_due: object) -> str:
    if not is_due:
        return "none"
    if costs is None:
        return "unknown without the encoder's weights"
    extraction = encoded * costs.image_seconds / 3600
    training = math.fsum(costs.rows[run.method].seconds for run in plan.left) / workers / 3600
    weights = "random weights of its size" if costs.is_random else "its weights"
    how = f"from a batch, a step and a validation of {', '.join(costs.timed)} on this device, {weights}"
    total, first, second = [hours_text(hours) for hours in (extraction + training, extraction, training)]
    return f"about {total}: {first} to extract, {second} to train; {how}"


def hours_text(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.1g}"


def _least_telling(rows: PaperRows, costs: Estimate) -> list[str]:
    """Rows that need the most time per sentence of the paper that they decide, with their hours a run."""

    def hours_per_sentence(name: str) -> tuple[float, float, int]:  # of equal rows, the last is dropped first
        sentences = rows.sentences.get(name, 0)
        seconds = costs.rows[name].seconds
        return (seconds / sentences if sentences else math.inf, seconds, rows.run.index(name))

    ordered = sorted(rows.run, key=hours_per_sentence, reverse=True)
    return [f"{name} ({hours_text(costs.rows[name].seconds / 3600)} h a run)" for name in ordered]


def _table(rows: PaperRows, costs: Estimate | None) -> tuple[str, ...]:
    if costs is None:
        return ()
    lines = [f"{'':<27}{'h a run':>10}{'checkpoint':>12}{'activations':>13}{'sentences':>11}"]
    for name in rows.run:
        cost = costs.rows[name]
        hours = hours_text(cost.seconds / 3600)
        sizes = f"{size_text(cost.checkpoint):>12}{size_text(cost.activations):>13}"
        lines.append(f"{name:<27}{hours:>10}{sizes}{rows.sentences.get(name, 0):>11}")
    return tuple(lines)


def _stale(data: ProjectData, stage: str) -> str:
    path = data.paths.manifest if stage == "prepare" else data.paths.features
    return data.outdated(stage) if path(data.dataset).exists() else "missing"


def reproduce(plan: Plan, jobs: int | None) -> tuple[SweepResult, Path]:
    """Do the work that `plan` lists; returns the outcome of the runs and the report's path."""
    data = plan.data
    if plan.problem:
        raise DuplexError(plan.problem)
    ensure_prepared(data)
    if _stale(data, "extract"):
        print("\n".join(extract(data).lines()), file=sys.stderr)
    # `dvc commit` takes seconds per run
    report = sweep(data.params, plan.runs, jobs, "local", data.paths, commit=False)
    planned = {"datasets": (data.dataset,), "methods": plan.rows.run, "seeds": plan.seeds, "products": ()}
    run = data.params.run.model_copy(update=planned)
    shown = data.params.model_copy(update={"run": run})
    if report.executed or not data.paths.maps(data.dataset).exists():
        maps_stage(replace(data, params=shown))
    paths = data.paths.of_reproduction(data.dataset)
    return report, report_stage(shown, paths, write_metrics=False, copies=plan.rows.copies)
