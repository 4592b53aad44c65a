"""Records of the options and code that each pipeline stage depends on besides files of earlier stages (docs/sweep.md).

The stage `plan` writes them as small files, and the other stages of dvc.yaml depend on those: a stage runs again if its
record changes. Unfinished training continues, and `duplex sweep` skips a run, only if the record is still the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from duplex.artifacts import ArtifactPaths
from duplex.config.params import EncoderParams, Params
from duplex.data.prepared_source import SIZES, source_record
from duplex.encoders.families import family_module
from duplex.errors import UsageError
from duplex.features.identity import IMPORTED
from duplex.methods.registry import method_source
from duplex.system.code_hash import code_hash
from duplex.system.files import sha256, sha256_once
from duplex.system.plugins import module_of

Record = dict[str, Any]
CALIBRATION = ("thresholds", "feasibility", "word_vectors")  # keys of `evaluation:` that training uses


def dataset_records(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> dict[str, Record]:
    """Return stage -> options and code hash that it depends on, for the pipeline stages that run once per data set."""
    entry, settings = params.dataset(dataset), params.extraction
    drawn = ["shapes"] if entry.source.kind == "shapes" else []
    extraction: Record = {
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


def report_record(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> Record:
    """Return what the pipeline stage `report` depends on besides files of earlier stages, as hashes.

    These are its code and, if it exists, the table of ablations, which another pipeline writes.
    """
    table = paths.ablations / "metrics.json"
    tables = {"ablations": sha256(table)} if table.is_file() else {}
    return {**tables, "code": code_hash("report", modules=_method_modules(params))}


def run_records(params: Params, dataset: str, method: str) -> dict[str, Record]:
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
    train: Record = {
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


def _encoder_record(encoder: EncoderParams) -> Record:
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


def _words_record(params: Params) -> Record:
    """Return `{"word_vectors": sha256}` of the file of word vectors in params.yaml; empty if no file is named."""
    words = params.evaluation.word_vectors
    return {} if words is None else {"word_vectors": sha256_once(words) if words.is_file() else None}


def _digest(features: Path, dataset: str) -> str:
    if not features.is_file():
        raise UsageError(f"params.yaml: datasets.{dataset}.features: {features} is not a file; null encodes the images")
    return sha256(features)


def _method_modules(params: Params) -> set[str]:
    return {module_of(method_source(params.entry(name).kind)) for name in params.run.methods}
