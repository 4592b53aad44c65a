"""Records of the options and code that each pipeline stage depends on besides files of earlier stages (docs/sweep.md).

The stage `plan` writes them as small files, and the other stages of dvc.yaml depend on those: a stage runs again if its
record changes. Unfinished training continues, and `duplex sweep` skips a run, only if the record is still the same.

Write one small file per pipeline stage with all that its result depends on: values of params.yaml, hashes of code.

dvc.yaml cannot list options that a method inherits from another, or code found by following imports, as dependencies.
Stages depend on these files instead. The stage `plan` runs at each `dvc repro`, to notice changed plug-ins; it does not
import torch.

Load the parameters of one stage of the pipeline; raise an error if they changed after the stage `plan` ran.

DVC records a stage's result under the stage's file in `artifacts/plan`. A stage that reads params.yaml minutes later
must find the same values: otherwise its result would be recorded, and later reused, under values it was not made with.

Compare runs on disk with params.yaml, so that commands refuse or report runs with other settings.

The stage `inventory`: list a data set's files with hashes, and choose the run for the report's examples and maps.

DVC cannot make one stage depend on all instances of a matrix stage. So this stage depends on the folder of a data set,
and the stages of the report and the maps depend on the two files that this stage writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duplex.artifacts import ArtifactPaths
from duplex.config.params import EncoderParams, Params, load_params
from duplex.data.sources import SIZES, source_record
from duplex.encoders.base import family_module
from duplex.errors import DuplexError, UsageError
from duplex.features.file import IMPORTED, read_contents_digest
from duplex.methods.registry import BrokenMethod, method_source
from duplex.options import AutoFinetune, CombinedOptions
from duplex.system.files import json_digest, replace_folder, sha256, sha256_once, write_json, write_text
from duplex.system.plugins import code_hash, module_of
from duplex.training.checkpoint import WORD_VECTORS, CheckpointHeader, Record, read_checkpoint, read_record
from duplex.training.inputs import require_inputs
from duplex.training.run import calibration_settings

StageRecord = dict[str, Any]
CALIBRATION = ("thresholds", "feasibility", "word_vectors")  # keys of `evaluation:` that training uses


def dataset_records(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> dict[str, StageRecord]:
    """Return stage -> options and code hash that it depends on, for the pipeline stages that run once per data set."""
    entry, settings = params.dataset(dataset), params.extraction
    drawn = ["shapes"] if entry.source.kind == "shapes" else []
    extraction: StageRecord = {
        **_encoder_record(entry.encoder),
        "batch_size": settings.batch_size,
        "max_bad": settings.max_bad,
        "tokens": settings.tokens,
        "block_inputs": params.block_inputs(dataset),
    }
    source = source_record(entry.source, paths.source(dataset))
    if entry.features is None and entry.encoder.name != IMPORTED and entry.source.recorded_root is not None:
        extraction["images"] = {"root": entry.source.recorded_root, SIZES: source.get(SIZES)}
    features = {} if entry.features is None else {"features": _digest(entry.features, dataset)}
    return {
        "prepare": {
            "source": source,
            **features,  # images with equal features are kept in one split
            "code": code_hash("prepare", *drawn),
        },
        "extract": {
            **extraction,
            **features,
            "code": code_hash("extract", *drawn, modules=[family_module(entry.encoder.name)]),
        },
        "inventory": {"code": code_hash("inventory")},
        "maps": {"code": code_hash("maps", modules=_method_modules(params))},
    }


def report_record(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> StageRecord:
    """Return what the pipeline stage `report` depends on besides files of earlier stages, as hashes.

    These are its code and, if it exists, the table of ablations, which another pipeline writes.
    """
    table = paths.ablations / "metrics.json"
    tables = {"ablations": sha256(table)} if table.is_file() else {}
    return {**tables, "code": code_hash("report", modules=_method_modules(params))}


def run_records(params: Params, dataset: str, method: str) -> dict[str, StageRecord]:
    """Return the options and code hashes that the stages `train` and `evaluate` of a method on a data set depend on.

    All seeds share these records. A method's options are recorded as params.yaml gives them; option defaults are part
    of the method's code.
    """
    entry = params.entry(method)
    training, finetune = params.training(dataset, method), params.finetune(method, dataset)
    evaluation = params.evaluation.model_dump(mode="json")
    encoder = params.dataset(dataset).encoder
    modules = [module_of(method_source(entry.kind)), family_module(encoder.name)]
    common = {
        "kind": entry.kind,
        "world": entry.world,
        **_encoder_record(encoder),
        **_words_record(params),
    }
    train: StageRecord = {
        **common,
        "options": entry.options_for(dataset),
        "training": training.result_settings(),
        "finetune": None if finetune is None else finetune.to_dict(),
        "calibration": {key: evaluation[key] for key in CALIBRATION},
        "code": code_hash("train", modules=modules),
    }
    evaluate = {
        **common,
        "threads": training.threads,
        "evaluation": evaluation,
        "code": code_hash("evaluate", modules=modules),
    }
    if entry.members:
        members = {name: run_records(params, dataset, name)["train"] for name in entry.members}
        train |= {"members": members, "seeds": list(params.run.seeds)}
    return {"train": train, "evaluate": evaluate}


def _encoder_record(encoder: EncoderParams) -> StageRecord:
    """Return an encoder's settings in params.yaml, with digests of the files that they name."""
    folder = Path(encoder.name.partition(":")[2]).expanduser()
    files = [path for path in sorted(folder.iterdir()) if path.is_file()] if _is_own_folder(encoder.name) else []
    if encoder.weights is not None and Path(encoder.weights).expanduser().is_file():
        files.append(Path(encoder.weights).expanduser())
    digests = {path.name: sha256_once(path) for path in files}
    return {"encoder": encoder.model_dump(mode="json"), **({"encoder_files": digests} if digests else {})}


def _is_own_folder(encoder: str) -> bool:
    """Return whether an encoder's name is `FAMILY:FOLDER` with an existing folder, the user's own model."""
    folder = encoder.partition(":")[2]
    return bool(folder) and Path(folder).expanduser().is_dir()


def _words_record(params: Params) -> StageRecord:
    """Return `{"word_vectors": sha256}` of the file of word vectors in params.yaml; empty if no file is named."""
    words = params.evaluation.word_vectors
    return {} if words is None else {"word_vectors": sha256_once(words) if words.is_file() else None}


def _digest(features: Path, dataset: str) -> str:
    if not features.is_file():
        raise UsageError(f"params.yaml: datasets.{dataset}.features: {features} is not a file; null encodes the images")
    return sha256(features)


def _method_modules(params: Params) -> set[str]:
    return {module_of(method_source(params.entry(name).kind)) for name in params.run.methods}


def plan_stage(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the files on which pipeline stages depend: settings of params.yaml and hashes of code.

    They are `plan/report.json`, `plan/DATASET/STAGE.json` and `plan/DATASET/METHOD/{train,evaluate}.json`. Raise
    UsageError if a method has a wrong option, or a data set lacks an input that the method needs.
    """
    records = {"report.json": report_record(params, paths)}
    for dataset in params.run.datasets:
        for stage, record in dataset_records(params, dataset, paths).items():
            records[f"{dataset}/{stage}.json"] = record
        for method in params.run.methods:
            for stage, record in run_records(params, dataset, method).items():
                records[f"{dataset}/{method}/{stage}.json"] = record
    check_options(params, params.run.datasets, params.run.methods, records, paths.checked_options)
    write_json_folder(records, paths.plan)


def write_json_folder(records: dict[str, StageRecord], folder: Path) -> None:
    """Replace all files of a folder by JSON files, given as path inside the folder -> content."""
    with replace_folder(folder) as scratch:
        for name, record in records.items():
            write_json(scratch / name, record)


def check_options(
    params: Params, datasets: tuple[str, ...], methods: tuple[str, ...], records: dict[str, StageRecord], mark: Path
) -> None:
    """Check that methods' options are valid and data sets have the inputs that methods need; skip what passed before.

    Raises UsageError for a wrong option or a missing input. For a method kind that cannot be imported, prints a
    warning: only runs of this kind fail.

    records: contents of the plan files; nothing is checked if the same contents have passed before.
    mark: file that stores the digest of the contents that passed.
    """
    digest = json_digest(records)
    if mark.exists() and mark.read_text(encoding="utf-8") == digest:
        return
    problems = set()
    for dataset in datasets:
        for method in methods:
            try:
                require_inputs(params, dataset, method)  # which also checks the options
            except BrokenMethod as error:
                problems.add(str(error))
    for problem in sorted(problems):
        print(f"duplex: {problem}", file=sys.stderr)
    if not problems:
        write_text(mark, digest)


def load_planned(
    dataset: str, *stages: str, method: str | None = None, paths: ArtifactPaths = ArtifactPaths()
) -> Params:
    """Load params.yaml for stages of the pipeline; raise `DuplexError` if it changed since the stage `plan` read it.

    Stages for which `plan` wrote no file, as in a script run by hand, are not checked.

    dataset, method: what the stages are run for; method None for stages of the data set.
    """
    params = load_params()
    folder = paths.plan / dataset / method if method else paths.plan / dataset
    if any((folder / f"{stage}.json").is_file() for stage in stages):
        records = run_records(params, dataset, method) if method else dataset_records(params, dataset, paths)
        _compare({f"{stage}.json": records[stage] for stage in stages}, folder)
    return params


def _compare(records: Mapping[str, StageRecord], folder: Path) -> None:
    for name, record in records.items():
        file = folder / name
        if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != json.loads(json.dumps(record)):
            raise DuplexError(
                f"params.yaml or the code has changed since {file} was written, so DVC would record this result under "
                "other values; run `dvc repro` again"
            )


def run_difference(record: Record, params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths) -> str:
    """Return the first setting in which a trained run differs from params.yaml, as text; "" if there is none.

    Not compared are values that are chosen in training, not in params.yaml: the number of blocks that `finetune: auto`
    trains, and the runs of a product (a method that multiplies the probabilities of finished runs).

    record: the settings that the run's checkpoint stores.
    """
    entry, options, finetune = params.entry(method), params.method(method, dataset), params.finetune(method, dataset)
    stored = {"kind": record.kind, "seed": record.seed, "world": record.world, **vars(record.options)}
    wanted = {"kind": entry.kind, "seed": seed, "world": entry.trained_for, **vars(options)}
    if isinstance(options, CombinedOptions) and isinstance(record.options, CombinedOptions):
        wanted.pop("members")
        wanted_runs = combined_runs(options, seed, params.run.seeds)
        if difference := _member_difference(record.options, wanted_runs, params, dataset, paths):
            return difference
    elif isinstance(finetune, AutoFinetune):
        stored["finetune"], wanted["finetune"] = "auto" if record.recipes else record.finetune, "auto"
    else:
        stored["finetune"], wanted["finetune"] = record.finetune, finetune
        training = params.training(dataset, method).result_settings()
        wanted |= {name: training[name] for name in record.training.keys() & training.keys()}
        stored |= record.training
    manifest, trained_on = paths.manifest(dataset), record.training.get("manifest")
    if trained_on is not None and manifest.is_file() and trained_on != sha256(manifest):
        return "its images, labels or splits have changed"
    features, trained_on = paths.features(dataset), record.training.get("features")
    if trained_on is not None and features.is_file() and trained_on != read_contents_digest(features):
        return "its features have changed"
    if difference := _encoder_difference(record, params, dataset):
        return difference
    chosen_by = record.training.get("calibration")
    if chosen_by is not None and "open" in (record.calibration or {}):
        stored["calibration"], wanted["calibration"] = chosen_by, calibration_settings(params.evaluation)
    for name, value in wanted.items():
        if stored.get(name) != value:
            return f"{name} is {stored.get(name)!r} instead of {value!r}"
    return ""


def require_current_run(
    checkpoint: CheckpointHeader, params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths
) -> None:
    """Raise `DuplexError`, which names the command to train again, if a run was not trained as params.yaml says.

    checkpoint: metadata of the run.
    """
    if difference := run_difference(checkpoint.record, params, dataset, method, seed, paths):
        raise DuplexError(
            f"{checkpoint.path} does not match {method} with seed {seed} in params.yaml: {difference}; "
            f"`duplex train --dataset {dataset} --method {method} --seed {seed}` writes it again"
        )


def _encoder_difference(record: Record, params: Params, dataset: str) -> str:
    """Return how the encoder or the word vectors of a checkpoint differ from those in params.yaml, as text, or ""."""
    entry, words = params.dataset(dataset).encoder, params.evaluation.word_vectors
    wanted = {"name": entry.name, "tag": entry.weights or "", "precision": entry.precision}
    for name, value in wanted.items():
        if record.encoder.get(name) != value:
            return f"its encoder's {name} is {record.encoder.get(name)!r} instead of {value!r}"
    digest = sha256_once(words) if words is not None and words.is_file() else None
    return "" if record.encoder.get(WORD_VECTORS) == digest else "its word vectors have changed"


def metrics_difference(record: Record, metrics: Mapping[str, Any], params: Params, method: str) -> str:
    """Return why a run's metrics on disk are not those that evaluation would write now, as text; "" if they are.

    The metrics may be of another checkpoint, or measured with another `evaluation.protocol`, `worlds`, `k`, `bootstrap`
    or `terms`. The last two are not compared if the metrics do not record them.

    record: what the run's checkpoint stores. metrics: content of the run's metrics.json.
    """
    if (metrics.get("epoch"), metrics.get("val_auc")) != (record.epoch, 100 * record.val_auc):
        return "its metrics.json is of another checkpoint"
    for world in params.worlds(method):
        if world not in metrics:
            return f"it was not evaluated in the {world} world"
        exact = "tied" in metrics[world]  # only the exact protocol measures the share of ties
        if exact != (params.evaluation.protocol == "exact"):
            return f"evaluation.protocol was {'exact' if exact else 'sampled'} instead of {params.evaluation.protocol}"
        ks = [1, *sorted(int(name.removeprefix("top_")) for name in metrics[world] if name.startswith("top_"))]
        if ks != sorted({1, *params.evaluation.k}):
            return f"evaluation.k was {ks} instead of {list(params.evaluation.k)}"
    for name, value in (("bootstrap", params.evaluation.bootstrap), ("terms", params.evaluation.terms)):
        if metrics.get(name, value) != value:
            return f"evaluation.{name} was {metrics[name]} instead of {value}"
    return ""


def combined_runs(options: CombinedOptions, seed: int, seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Method and seed of each run that a product with the seed `seed` combines; `seeds`: all of the project."""
    return [(method, number) for method in options.of for number in (seeds if options.seeds == "all" else (seed,))]


def _member_difference(
    options: CombinedOptions, wanted: list[tuple[str, int]], params: Params, dataset: str, paths: ArtifactPaths
) -> str:
    """How the runs that a product combined differ from those on disk or from params.yaml, as text; "" if not at all."""
    combined = {(member["method"], member["seed"]): member["fingerprint"] for member in options.members}
    if list(combined) != wanted:
        return "it combines other runs"
    for (method, seed), fingerprint in combined.items():
        checkpoint = read_checkpoint(paths.run(dataset, method, seed).checkpoint)
        if checkpoint.fingerprint != fingerprint:
            return f"{method} with seed {seed}, which it combines, was trained again"
        if method not in params.methods:
            continue
        if difference := run_difference(checkpoint.record, params, dataset, method, seed, paths):
            return f"{method} with seed {seed}, which it combines, does not match params.yaml: {difference}"
    return ""


IGNORED = (".gitignore", ".partial")  # ends of names


def featured_run(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[str, int]:
    """Return method and seed of the run that the report's examples and maps use.

    The method is the last trained one of `run:` with visual prototypes, else the last one; the seed is the first.
    """
    return run_with_prototypes(params, dataset, paths) or (params.run.methods[-1], params.run.seeds[0])


def run_with_prototypes(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[str, int] | None:
    """Return the last method listed in params.yaml that has a finished run with visual prototypes, and its first seed.

    None if there is no such run. Methods with `shown_as` are skipped, since the report shows them under the name of
    another method.
    """
    seed = params.run.seeds[0]
    for name in reversed(params.run.methods):
        checkpoint = paths.run(dataset, name, seed).checkpoint
        if params.entry(name).shown_as is not None or not checkpoint.exists():
            continue
        if "visual" in read_record(checkpoint).inspectable:
            return name, seed
    return None


def inventory_stage(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the inventory of a data set's folder of artifacts: `files.json` (file -> sha256) and `featured.json`.

    The latter names the run whose prototypes the maps show, with hashes of the files that the maps are computed from.
    """
    folder = paths.manifest(dataset).parent
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(IGNORED))
    out = paths.inventory(dataset)
    write_json(out / "files.json", {path.relative_to(folder).as_posix(): sha256(path) for path in files})
    record: dict[str, object] = {}
    chosen = run_with_prototypes(params, dataset, paths)
    if chosen is not None:
        checkpoint = paths.run(dataset, *chosen).checkpoint
        inputs = (checkpoint, paths.features(dataset), paths.manifest(dataset), paths.labels(dataset))
        record = {"method": chosen[0], "seed": chosen[1], **{path.name: sha256(path) for path in inputs}}
    write_json(out / "featured.json", record)
