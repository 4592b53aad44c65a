"""`duplex reproduce`: train and evaluate the paper's methods on a data set, and write the claims.

They are methods of the project in the folder `ablations`; report/claims.yaml lists those that a
data set needs. With `--methods`, methods of other publications are trained with their published
options in the main project. The pipeline's stages do the work and record what is done, so the same
command continues after an interruption.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from duplex.artifacts import ArtifactPaths
from duplex.config.params import PARAMS_FILE, Params, dataset_files, parse_params, read_yaml
from duplex.data.sources import is_on_disk, load_source
from duplex.data.tables import LabelledImages, count_dataset
from duplex.encoders.base import Encoder, load_encoder, missing_weights, resolve_device
from duplex.encoders.image_blocks import block_count
from duplex.errors import DuplexError, UsageError
from duplex.features.encode import WantedOutputs, encode_outputs
from duplex.features.imported import equal_feature_keys
from duplex.methods.base import Batch
from duplex.options import FinetuneOptions
from duplex.project.doctor import cache_row_bytes, free_bytes, outputs_to_cache, weights_for_timing
from duplex.project.extract import extract
from duplex.project.maps import maps_stage
from duplex.project.prepare import ensure_prepared, require_images
from duplex.project.report import report_stage
from duplex.project.run import DATA_STAGES, RUN_STAGES, ProjectData, ProjectRun
from duplex.project.sweep import SweepResult, grid, sweep, workers_and_gpus
from duplex.report.claims import CLIP, backbone_of, benchmark_of, comparisons_of, counts_of, read_package_yaml
from duplex.system.files import size_text
from duplex.training.inputs import Data, InputRequest, require_configured_inputs
from duplex.training.lineup import BlockCost, block_cost
from duplex.training.loop import make_optimiser, optimiser_step
from duplex.training.run import MethodSpec, initialised_method, reproducible
from duplex.training.scoring import Validation

PROJECT = Path("ablations")  # folder of the project with the paper's rows
PUBLISHED = ArtifactPaths.root / "published"  # folder of runs by published recipes
FEW = 2  # images in a timed batch on a CPU; on a GPU it is a whole batch
UNLIKE = ", whose counts are not the published ones of {}: no number will be compared"
LONG = 20.0  # seconds; what takes longer is timed once


@dataclass(frozen=True)
class Plan:
    """What `duplex reproduce` will run for a data set, and the disk space and hours it needs."""

    data: ProjectData  # its params have patch tokens if a row needs them
    rows: tuple[str, ...]  # names of methods
    runs: list[ProjectRun]
    left: list[ProjectRun]  # the runs still to train or evaluate
    topics: dict[str, str]  # topic, such as `disk` -> text
    problem: str = ""  # why the data set cannot be extracted on this machine

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    def lines(self) -> list[str]:
        """The plan as lines of text, one per topic."""
        return [f"{topic:<9}{text}" for topic, text in self.topics.items()]


def published_params(dataset: str, methods: Sequence[str], seeds: Sequence[int]) -> Params:
    """params.yaml with published options of `methods`; pixels are cached if one fine-tunes."""
    record = read_yaml(PARAMS_FILE)
    run = {"datasets": [dataset], "methods": list(methods), "seeds": list(seeds)}
    record |= {"run": {**run, "recipes": "published"}, "report": {}}
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


def plan_reproduction(project: ProjectData, seeds: Sequence[int] | None, jobs: int | None) -> Plan:
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
    rows = list(params.run.methods)
    absent: list[str] = []
    if not published:
        rows, absent = methods_in_paper(params, dataset, data)
    if not rows:
        listed = f"method that the paper's tables list for {dataset}"
        raise UsageError(f"{PROJECT / 'params.yaml'} has no {listed}; add one")
    for name in rows:
        require_configured_inputs(params, dataset, name)
    needs = [MethodSpec.of(params, dataset, name).request.needs for name in rows]
    tokens = "patch" if any("patch" in each for each in needs) else "none"
    extraction = params.extraction.model_copy(update={"tokens": tokens})
    params = params.model_copy(update={"extraction": extraction})
    project = replace(project, params=params)
    runs = grid(params, [dataset], rows, seeds, project.paths)
    stale = {stage: why for stage in DATA_STAGES if (why := _stale(project, stage))}
    left = [run for run in runs if stale or run.difference(*RUN_STAGES)]
    encoder = " ".join(filter(None, (entry.encoder.name, entry.encoder.weights)))
    is_absent = missing_weights(entry.encoder.name, entry.encoder.weights) is not None
    weights = "not on disk, downloaded when first needed" if is_absent else "on disk"
    note = UNLIKE.format(dataset) if published and _benchmark(data) != dataset else ""
    extracts = "extract" in stale
    needed = _size(params, dataset, len(data.manifest)) if extracts else 0
    size = "unknown size" if needed is None else size_text(needed)
    free = free_bytes(project.paths.root)
    stages = [f"{stage} ({why})" for stage, why in stale.items()]
    stages += [f"{len(left)} of {len(runs)} runs to train or evaluate", "report"]
    plan = Plan(project, tuple(rows), runs, left, {})
    topics = {
        "data": f"{len(data.manifest):,} images in {entry.source.root}{note}",
        "weights": f"{encoder}: {weights}",
        "disk": f"{size} of features to write, {size_text(free)} free",
        "stages": ", ".join(stages),
        "hours": _hours(plan, data, jobs, extracts) if extracts or left else "none",
        "rows": f"{len(rows)} × seeds {', '.join(map(str, plan.seeds))}: {', '.join(rows)}",
    }
    if absent:
        topics["not run"] = f"{', '.join(absent)}: no entry in {PROJECT / 'params.yaml'}"
    problem = ""
    if needed is not None and needed > free:
        problem = f"extraction of {dataset} writes {size}, but only {size_text(free)} are free"
        problem += "; make room, or move the project to a larger disk"
    return replace(plan, topics=topics, problem=problem)


def _size(params: Params, dataset: str, images: int) -> int | None:
    try:
        return images * cache_row_bytes(params, dataset)
    except UsageError:  # an encoder without its weights, of a family that cannot draw them
        return None


def _stale(data: ProjectData, stage: str) -> str:
    path = data.paths.manifest if stage == "prepare" else data.paths.features
    return data.outdated(stage) if path(data.dataset).exists() else "missing"


def methods_in_paper(params: Params, dataset: str, data: LabelledImages) -> tuple[list[str], list[str]]:
    """Methods of params.yaml in the paper's tables for a data set, and rows without a method.

    For a data set that is not in the paper, the rows of all tables count. If the paper has results
    with the data set's encoder, only rows with this encoder count.
    """
    encoder = params.dataset(dataset).encoder
    backbone = backbone_of(f"{encoder.name} {encoder.weights}")
    known = {name for claim in read_package_yaml("claims.yaml")["claims"] for name in claim["of"]}
    benchmark = _benchmark(data) or (dataset if dataset in known else None)
    found: set[str] = set()
    absent: list[str] = []
    for names in _claimed_runs(benchmark, backbone):
        present = [name for name in names if name in params.methods]
        if present:
            found.add(present[0])
        else:
            absent.append(names[0])
    if backbone in (None, CLIP):  # the only one with rows in the open world
        found |= {name for name, entry in params.methods.items() if entry.shown_as in found}
    return [name for name in params.methods if name in found], list(dict.fromkeys(absent))


def _benchmark(data: LabelledImages) -> str | None:
    return benchmark_of(counts_of(count_dataset(data.labels, data.manifest).to_dict()))


def _claimed_runs(benchmark: str | None, backbone: str | None) -> Iterator[list[str]]:
    """For each row that a claim compares: names of methods, of which the first known counts."""
    table = read_package_yaml("claims.yaml")
    for claim in table["claims"]:
        if benchmark in claim["of"] or (benchmark is None and not claim.get("only")):
            names: dict[str, None] = {}
            for line in comparisons_of(claim):
                names |= dict.fromkeys(line.names)
            for name in names:
                row = table["rows"].get(name)
                if row and backbone in (None, row.get("backbone", CLIP)):
                    yield row["run"]


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
    planned = {"datasets": (data.dataset,), "methods": plan.rows, "seeds": plan.seeds, "products": ()}
    run = data.params.run.model_copy(update=planned)
    shown = data.params.model_copy(update={"run": run})
    if report.executed or not data.paths.maps(data.dataset).exists():
        maps_stage(replace(data, params=shown))
    return report, report_stage(shown, data.paths.of_reproduction(data.dataset), write_metrics=False)


def _hours(plan: Plan, data: LabelledImages, jobs: int | None, extracts: bool) -> str:
    params = plan.data.params
    dataset = plan.data.dataset
    device = resolve_device(params.device)
    try:
        entry = weights_for_timing(params.dataset(dataset).encoder)
        precision = entry.precision
        tower = load_encoder(entry.name, entry.weights, towers="image", device=device, precision=precision)
    except UsageError:
        return "unknown without the encoder's weights"
    images = len(data.manifest)
    extraction = images * _image_seconds(params, dataset, tower) / 3600 if extracts else 0.0
    timed = plan.rows if params.run.recipes == "published" else plan.rows[:1]
    specs = {name: MethodSpec.of(params, dataset, name) for name in timed}
    features = np.random.default_rng(0).standard_normal((images, tower.dim), dtype=np.float32)
    made = Data(data.manifest, data.labels, features, entry, str(tower.device), params.evaluation.word_vectors)
    runs = {}
    for name, spec in specs.items():
        print(f"timing {name}", file=sys.stderr)
        runs[name] = _run_seconds(spec, made, tower)
    threads = specs[timed[0]].training.threads
    threads = torch.get_num_threads() if threads == "auto" else threads
    workers = min(workers_and_gpus(params.device, jobs, threads)[0], max(1, len(plan.left)))
    each = [runs.get(run.method, runs[timed[0]]) for run in plan.left]
    training = math.fsum(each) / workers / 3600
    weights = "its weights" if entry == params.dataset(dataset).encoder else "random weights of its size"
    how = f"from a batch, a step and a validation of {', '.join(timed)} on this device, {weights}"
    parts = (extraction + training, extraction, training)
    total, first, second = [f"{hours:,.1f}" if hours >= 1 else f"{hours:.1g}" for hours in parts]
    return f"about {total}: {first} to extract, {second} to train; {how}"


def _run_seconds(spec: MethodSpec, data: Data, tower: Encoder) -> float:
    images = data.manifest["split"].value_counts()
    with reproducible(spec.training.threads):
        step, validation = _step_seconds(spec, data, tower)
        blocks = _block_cost(spec, tower)
    steps = math.ceil(images["train"] / spec.training.batch_size)
    validation += images["val"] * blocks.forward
    epoch = steps * step + images["train"] * blocks.train + validation
    # each world is scored on validation images after training, then on test images
    scored = len(spec.worlds) * (1 + images["test"] / images["val"])
    return float(spec.training.epochs * epoch + scored * validation)


def _image_seconds(params: Params, dataset: str, tower: Encoder) -> float:
    count = params.extraction.batch_size if tower.device.type == "cuda" else FEW
    pixels = torch.stack([tower.image_transform(Image.new("RGB", (8, 8)))] * count).to(tower.device)
    outputs = outputs_to_cache(params, dataset)
    return _seconds(lambda: encode_outputs(tower, pixels, outputs)["cls"]) / count


def _step_seconds(spec: MethodSpec, data: Data, tower: Encoder) -> tuple[float, float]:
    request = InputRequest(spec.request.needs, spec.training.precision, None, spec.training.memory)
    inputs = data.read(request)
    examples = {split: each.to(tower.device) for split, each in inputs.examples.items()}
    shapes = WantedOutputs(patches="patch" in request.needs).row_shapes(tower)
    for (name, shape), (split, each) in product(shapes.items(), examples.items()):
        repeated = torch.randn(1, *shape, device=tower.device).expand(len(each), *shape)
        examples[split] = replace(each, inputs={**each.inputs, name: repeated})
    images = examples["train"]
    inputs = replace(inputs, examples=examples)
    context = inputs.context(spec.trained_for)
    method = initialised_method(spec.kind, spec.options, context, inputs, 0, tower.device)
    method.train()
    batch = Batch(images.inputs, images.compositions)
    rows = torch.arange(min(spec.training.batch_size, len(images)))
    work = partial(optimiser_step, method, batch, rows, spec.training, make_optimiser(method, spec.training))
    step = _seconds(lambda: next(iter(work().values()))) if method.groups() else 0.0
    validate = Validation(examples["val"], data.labels)
    return step, _seconds(lambda: torch.tensor(validate(method).value))


def _block_cost(spec: MethodSpec, tower: Encoder) -> BlockCost:
    if not isinstance(spec.finetune, FinetuneOptions):
        return BlockCost(0.0, 0.0)
    count = block_count(tower) if spec.finetune.blocks == "all" else spec.finetune.blocks
    batch = spec.training.batch_size if tower.device.type == "cuda" else FEW
    return block_cost(tower, count, count, batch)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Median seconds of three calls after a first one, which allocates memory."""
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        work().sum().item()
        taken.append(time.perf_counter() - start)
        if taken[0] > LONG:  # of which allocating is a small part
            break
    return median(taken[1:] or taken)
