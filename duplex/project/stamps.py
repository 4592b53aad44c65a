"""Stamps record what an artifact was made from, in a file beside it, to tell whether the artifact is outdated.

A stamp is one JSON dict: the values of params.yaml that a stage uses, with checksums of files that they name; a hash of
the stage's code (`duplex.system.code`); and checksums of the files that the stage reads and writes. The stage `plan`
writes the first two parts to one file per stage; the stages of dvc.yaml depend on these files (docs/sweep.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from duplex.artifacts import ArtifactPaths
from duplex.config.params import EncoderParams, Params, load_params
from duplex.encoders.base import family_module, packaged_files
from duplex.errors import DuplexError, UsageError
from duplex.features.file import IMPORTED, read_cache_digest
from duplex.methods.base import find_stream_adapter
from duplex.methods.registry import BrokenMethodError, method_entry_point
from duplex.options import FinetuneOptions
from duplex.system.code import code_hash
from duplex.system.files import replace_folder, sha256, sha256_once, write_json
from duplex.system.plugins import installed_plugins, module_of
from duplex.training.inputs import require_configured_inputs

Stamp = dict[str, Any]

DATA_STAGES = ("prepare", "extract")
RUN_STAGES = ("train", "evaluate")
CALIBRATION = ("thresholds", "feasibility", "word_vectors")  # keys of `evaluation:` that training uses
UNSTAMPED = "no stage of the pipeline wrote it"  # an artifact that no stage wrote
CHANGES = {  # key of a stamp -> what it means if it differs
    "code": "its code has changed",
    "encoder_files": "its encoder's files have changed",
    "features": "its file of features has changed",
    "images.files": "its image files have changed",
    "source.images": "its image files have changed",
    "source.content": "its table, lists or image files have changed",
    "word_vectors": "its word vectors have changed",
    "inputs.manifest.csv": "its images, labels or splits have changed",
    "inputs.labels.json": "its states, objects or pairs have changed",
    "inputs.features.h5": "its features have changed",
    "inputs.checkpoint.safetensors": "its checkpoint has been replaced",
}


def settings(
    params: Params, dataset: str, stage: str, method: str | None = None, paths: ArtifactPaths = ArtifactPaths()
) -> Stamp:
    """The part of a stamp that `plan` writes: the values of params.yaml that a stage uses, and a hash of its code.

    Only options set in params.yaml are included; the hash of the code covers all defaults.

    stage: prepare, extract, inventory or maps of a data set; train or evaluate of a method, with any seed.
    """
    if method is not None:
        return _run_settings(params, dataset, stage, method, paths)
    entry, extraction = params.dataset(dataset), params.extraction
    drawn = ["shapes"] if entry.source.kind == "shapes" and stage in DATA_STAGES else []
    made: Stamp = {}
    if stage in DATA_STAGES:
        from duplex.data.sources import source_record  # which training does not need

        earlier = read(paths.stamp(dataset, "prepare")) or {}
        source = source_record(entry.source, earlier.get("source"), paths.image_digests(dataset))
        if entry.features is not None:  # images with equal features are kept in one split
            made["features"] = _features_digest(entry.features, dataset, earlier)
    if stage == "prepare":
        made["source"] = source
    if stage == "extract":
        made |= _encoder_settings(entry.encoder)
        if entry.features is None and entry.encoder.name != IMPORTED and entry.source.recorded_root is not None:
            made["images"] = {"root": entry.source.recorded_root, "files": source["images"]}
        made |= {"batch_size": extraction.batch_size, "max_bad": extraction.max_bad, "tokens": extraction.tokens}
        made["block_inputs"] = params.block_inputs(dataset)
        made["pixels"] = params.pixels(dataset)
    if stage == "inventory":
        made |= _rows_shown(params)
    modules = {"extract": [family_module(entry.encoder.name)], "maps": _method_modules(params)}
    return {**made, "code": code_hash(stage, *drawn, modules=modules.get(stage, ()))}


def _rows_shown(params: Params) -> Stamp:
    shown_as = {name: shown for name in params.run.methods if (shown := params.entry(name).shown_as) is not None}
    return {"featured": params.report.featured, "shown_as": shown_as}


def _run_settings(params: Params, dataset: str, stage: str, method: str, paths: ArtifactPaths) -> Stamp:
    entry, training = params.entry(method), params.training(dataset, method)
    finetune = params.finetune(method, dataset)
    encoder, words = params.dataset(dataset).encoder, params.evaluation.word_vectors
    evaluation, stream = params.evaluation.model_dump(mode="json"), params.evaluation.stream
    if stream is not None:
        evaluation["stream"]["code"] = code_hash("stream", modules=[find_stream_adapter(stream.adapter).__module__])
    made: Stamp = {"kind": entry.kind, "world": entry.world, **_encoder_settings(encoder)}
    if words is not None:
        made["word_vectors"] = sha256_once(words) if words.is_file() else None
    if stage == "train":
        made["options"] = entry.options_for(dataset)
        made["training"] = training.result_settings()
        made["finetune"] = None if finetune is None else finetune.to_dict()
        made["calibration"] = {key: evaluation[key] for key in CALIBRATION}
        if entry.members:
            made["members"] = {name: _run_settings(params, dataset, stage, name, paths) for name in entry.members}
            if params.method(method, dataset).to_dict().get("seeds") == "all":
                made["seeds"] = list(params.run.seeds)
    else:
        made |= {"threads": training.threads, "evaluation": evaluation}
    modules = [module_of(method_entry_point(kind)) for kind in entry.kinds_for(dataset)] + [family_module(encoder.name)]
    if isinstance(finetune, FinetuneOptions):
        modules += [module_of(installed_plugins("duplex.adapters")[name]) for name in finetune.adapters]
    return {**made, "code": code_hash(stage, modules=modules)}


def _encoder_settings(encoder: EncoderParams) -> Stamp:
    files = [Path(encoder.weights).expanduser()] if encoder.weights is not None else []
    if folder := encoder.name.partition(":")[2]:
        files += sorted(Path(folder).expanduser().glob("*"))
    files += packaged_files(encoder.name)
    digests = {path.name: sha256_once(path) for path in files if path.is_file()}
    return {"encoder": encoder.model_dump(mode="json"), **({"encoder_files": digests} if digests else {})}


def _features_digest(features: Path, dataset: str, earlier: Mapping[str, Any]) -> str:
    if features.is_file():
        return sha256_once(features)
    if isinstance(digest := earlier.get("features"), str):  # on this machine there are only the results
        return digest
    raise UsageError(
        f"params.yaml: datasets.{dataset}.features: {features} does not exist; correct it, or set null to encode images"
    )


def _method_modules(params: Params) -> set[str]:
    return {module_of(method_entry_point(params.entry(name).kind)) for name in params.run.methods}


def stamp(
    params: Params, dataset: str, stage: str, paths: ArtifactPaths, method: str | None = None, seed: int | None = None
) -> Stamp:
    """The stamp that a stage's files should have now: settings, seed, and checksums of the files that it reads."""
    inputs: dict[str, Any] = {}
    made = settings(params, dataset, stage, method, paths)
    if stage != "prepare":
        inputs["manifest.csv"] = _checksum(paths.manifest(dataset))
    if method is not None and seed is not None:
        made["seed"] = seed
        features = paths.features(dataset)
        inputs["labels.json"] = _checksum(paths.labels(dataset))
        inputs["features.h5"] = read_cache_digest(features) if features.is_file() else None
        if stage == "evaluate":
            inputs["checkpoint.safetensors"] = _checksum(paths.run(dataset, method, seed).checkpoint)
        elif members := params.entry(method).members:
            seeds = made.get("seeds", [seed])
            files = {f"{name}-{n}": paths.run(dataset, name, n).checkpoint for name in members for n in seeds}
            inputs["members"] = {name: _checksum(path) for name, path in files.items()}
    return {**made, "inputs": inputs}


def _checksum(path: Path) -> str | None:
    return sha256_once(path) if path.is_file() else None


def write(path: Path, made: Stamp, outputs: Iterable[Path] = ()) -> None:
    """Write the stamp `made` to `path`, with checksums of the stage's `outputs`, which lie in the same folder."""
    write_json(path, {**made, "outputs": {file.name: sha256(file) for file in outputs}})


def read(path: Path) -> Stamp | None:
    """Read a stamp; returns an empty dict if the file is damaged, and None if there is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def difference(path: Path, wanted: Stamp) -> str:
    """How the stamp at `path` differs from `wanted`, in words, or "". Inputs missing on this machine are ignored."""
    made = read(path)
    if made is None:
        return UNSTAMPED
    outputs = made.pop("outputs", {})
    if found := _first_difference("", made, json.loads(json.dumps(wanted))):
        return found
    for name, checksum in outputs.items():
        if _checksum(path.parent / name) != checksum:
            return f"its {name} has changed since {path.name} was written"
    return ""


def _first_difference(place: str, made: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    for key in sorted(made.keys() | wanted.keys(), key=lambda key: (key in ("inputs", "code"), key == "code", key)):
        here = f"{place}{key}"
        before, after = made.get(key), wanted.get(key)
        if before == after or (after is None and here.startswith(("inputs.", "evaluation.stream"))):
            continue
        if here not in CHANGES and isinstance(before, Mapping) and isinstance(after, Mapping):
            if found := _first_difference(f"{here}.", before, after):
                return found
            continue
        if place == "inputs.members.":
            return "a run that it combines was trained again"
        known = CHANGES.get("code" if key == "code" else here)
        return known or f"{here} was {before!r} and is now {after!r}"
    return ""


def run_difference(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths = ArtifactPaths(),
    stages: Iterable[str] = ("train",),
) -> str:
    """Why a run is outdated (params.yaml, its data or the code changed), in words; "" if it is not."""
    for stage in stages:
        file = paths.run(dataset, method, seed).stamp(stage)
        if found := difference(file, stamp(params, dataset, stage, paths, method, seed)):
            return found
    return ""


def require_current_run(params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths) -> None:
    """Raise `DuplexError` if a run is outdated; the message says how to train it again."""
    if found := run_difference(params, dataset, method, seed, paths):
        folder = paths.run(dataset, method, seed).root
        raise DuplexError(
            f"{folder} does not match the method {method!r} in params.yaml: {found}; "
            f"`duplex train --dataset {dataset} --method {method} --seed {seed}` trains it again"
        )


def data_difference(
    params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths(), stages: Iterable[str] = DATA_STAGES
) -> str:
    """Why a data set must be prepared or extracted again, and by which command; "" if it need not be.

    Files without a stamp, which no stage wrote, count as up to date.
    """
    for stage in stages:
        found = difference(paths.stamp(dataset, stage), stamp(params, dataset, stage, paths))
        if found and found != UNSTAMPED:
            done = {"prepare": "prepared", "extract": "extracted"}[stage]
            return (
                f"the data set {dataset} has to be {done} again: {found}; `duplex {stage} --dataset {dataset}` does "
                "that, and `dvc repro` runs everything that depends on it"
            )
    return ""


def require_data(
    params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths(), stages: Iterable[str] = DATA_STAGES
) -> None:
    """Raise `DuplexError` if a data set must be prepared or extracted again."""
    if found := data_difference(params, dataset, paths, stages):
        raise DuplexError(found)


def write_plan(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the files that stages of dvc.yaml depend on: `plan/DATASET/STAGE.json`, `plan/DATASET/METHOD/STAGE.json`.

    Raises UsageError for an invalid option, or if a data set lacks an input that a method needs. If a method's kind
    cannot be imported, prints a warning, since only its own runs will fail.
    """
    table = paths.ablations
    ablations = {"ablations": sha256(table)} if table.is_file() else {}
    report = {**ablations, **_rows_shown(params), "code": code_hash("report", modules=_method_modules(params))}
    records = {"report": report}
    for dataset in params.run.datasets:
        for stage in (*DATA_STAGES, "inventory", "maps"):
            records[f"{dataset}/{stage}"] = settings(params, dataset, stage, paths=paths)
        for method in params.run.methods:
            for stage in RUN_STAGES:
                records[f"{dataset}/{method}/{stage}"] = settings(params, dataset, stage, method, paths)
            try:
                require_configured_inputs(params, dataset, method)  # which also checks the options
            except BrokenMethodError as error:
                print(error, file=sys.stderr)
    with replace_folder(paths.plan) as scratch:
        for name, record in records.items():
            write_json(scratch / f"{name}.json", record)


def planned_params(dataset: str, *stages: str, method: str | None = None) -> Params:
    """Load params.yaml for `stages` of the pipeline; raises `DuplexError` if it or the code changed since `plan` ran.

    Without this check, DVC would record new results under old settings. Stages that `plan` omits are not checked.
    """
    params = load_params()
    for stage in stages:
        file = ArtifactPaths().plan / dataset / (method or "") / f"{stage}.json"
        found = difference(file, settings(params, dataset, stage, method))
        if found and found != UNSTAMPED:
            raise DuplexError(
                f"params.yaml or the code has changed since {file} was written ({found}), so DVC would record this "
                "result under the old settings; run `dvc repro` again"
            )
    return params
