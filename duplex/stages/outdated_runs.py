"""Compare runs on disk with params.yaml, so that commands refuse or report runs with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.errors import DuplexError
from duplex.features.store import read_contents_digest
from duplex.library.members import find_members
from duplex.library.run_training import MethodSpec, calibration_settings
from duplex.options import AutoFinetune, CombinedOptions, Options
from duplex.system.files import sha256, sha256_once
from duplex.training.checkpoint import WORD_VECTORS, CheckpointHeader, Record, read_record


def run_difference(record: Record, params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths) -> str:
    """Return the first setting in which a trained run differs from params.yaml, as text; "" if there is none.

    Not compared are values that are chosen in training, not in params.yaml: the number of blocks that `finetune: auto`
    trains, and the runs of a product (a method that multiplies the probabilities of finished runs).

    record: the settings that the run's checkpoint stores.
    """
    entry, options, finetune = params.entry(method), params.method(method, dataset), params.finetune(method, dataset)
    stored = {"kind": record.kind, "seed": record.seed, "world": record.world, **vars(record.options)}
    wanted = {"kind": entry.kind, "seed": seed, "world": entry.trained_for, **vars(options)}
    if isinstance(options, CombinedOptions):
        wanted.pop("members")
        if difference := _member_difference(record, params, dataset, method, seed, paths):
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


def outdated_member(options: Options, params: Params, dataset: str, paths: ArtifactPaths) -> str:
    """Return how a run whose probabilities a product multiplies differs from params.yaml, as text; "" if none does.

    Runs that are not on disk are ignored.

    options: the product's options, which list the runs; methods that combine no runs give "".
    """
    for member in options.members if isinstance(options, CombinedOptions) else ():
        method, seed = member["method"], member["seed"]
        checkpoint = paths.run(dataset, method, seed).checkpoint
        if method not in params.methods or not checkpoint.is_file():
            continue
        if difference := run_difference(read_record(checkpoint), params, dataset, method, seed, paths):
            return f"{method} with seed {seed}, which it combines, does not match params.yaml: {difference}"
    return ""


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


def _member_difference(
    record: Record, params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths
) -> str:
    """Return how the runs combined in a product differ from runs on disk or params.yaml, as text; "" if they do not.

    A product multiplies the probabilities of finished runs. Runs not on disk are ignored: its checkpoint contains them.
    """
    spec = MethodSpec.of(params, dataset, method)
    try:
        _, members = find_members(spec, dataset, seed, params.run.seeds, paths)
    except DuplexError:
        return ""
    if record.training.get("members") not in (None, members.fingerprints):
        return "a run that it combines was trained again"
    return outdated_member(record.options, params, dataset, paths)
