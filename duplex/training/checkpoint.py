"""Model files, such as checkpoints: a trained method's tensors and its `TrainingRecord`.

A model file is a safetensors file with a JSON header under the metadata key `duplex`; equal
content gives equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from duplex.errors import DuplexError
from duplex.evaluation.probabilities import UNFITTED, Confidence
from duplex.labels import LabelSpace, World
from duplex.methods.base import Method, MethodContext
from duplex.methods.registry import make_method, method_entry_point, parse_options, plugin_code_hash
from duplex.options import CombinedRunsOptions, FinetuneOptions, Options
from duplex.system.code import UNKNOWN_CODE, plugin_hash
from duplex.system.files import json_digest, write_tensors
from duplex.system.plugins import module_of
from duplex.training.novelty import PREFIX, NoveltyDetector
from duplex.training.scoring import Calibration

FORMAT = 10
KEY = "duplex"
Kind = Literal["checkpoint", "unfinished training", "export", "statistics"]
REMEDIES: dict[Kind, str] = {
    "checkpoint": "run `duplex train` with the run's --dataset, --method and --seed",
    "unfinished training": "training starts from the beginning",
    "export": "make it again with `duplex export` or `duplex fit`",
    "statistics": "run `duplex fit` again",
}


@dataclass(frozen=True)
class ModelHeader:
    """Path and JSON header of a model file, without its tensors."""

    path: Path
    kind: Kind
    fields: Mapping[str, Any]  # header fields that this kind has
    digest: str  # sha256 of the tensors
    fingerprint: str  # identifies the whole content

    @cached_property
    def record(self) -> TrainingRecord:
        """A checkpoint's metadata: how it was trained."""
        return TrainingRecord.from_dict(self.fields)


def write_model(path: Path, kind: Kind, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and header `fields` to a model file; a failure leaves no partial file."""
    stored = {}
    for name, tensor in tensors.items():
        stored[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    header = {"format": FORMAT, "holds": kind, "tensors": tensor_digest(stored), **fields}
    write_tensors(path, stored, {KEY: json.dumps(with_checksum(header), ensure_ascii=False)})


def read_header(path: Path, kind: Kind) -> ModelHeader:
    """Read a model file's header; `DuplexError` if the file is missing, damaged or of another kind."""
    remedy = REMEDIES[kind]
    try:
        with safe_open(path, "pt") as file:
            fields = dict(json.loads((file.metadata() or {})[KEY]))
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist; {remedy}") from error
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, RecursionError) as error:
        reason = "it has no header" if isinstance(error, KeyError) else error
        raise DuplexError(f"{path} cannot be read as a model file ({reason}); {remedy}") from error
    version = fields.get("format")
    if version != FORMAT:
        problem = f"{path} has the format {version}, but this version of duplex reads only format {FORMAT}"
        raise DuplexError(f"{problem}; {remedy}")
    holds = fields.get("holds")
    if holds != kind:
        raise DuplexError(f"{path} is of kind {holds!r}, not {kind!r}; give its folder {path.parent}, or another file")
    fingerprint = fields.pop("checksum", None)
    if fingerprint != json_digest(fields):
        raise DuplexError(f"{path} is damaged: its header was changed; {remedy}")
    common = ("format", "holds", "tensors")
    own = {name: value for name, value in fields.items() if name not in common}
    return ModelHeader(path, kind, own, fields["tensors"], fingerprint)


def read_tensors(header: ModelHeader) -> dict[str, Tensor]:
    """Read a model file's tensors; `DuplexError` if they do not match the digest in the header."""
    remedy = REMEDIES[header.kind]
    try:
        with safe_open(header.path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DuplexError(f"{header.path} cannot be read ({error}); {remedy}") from error
    if tensor_digest(tensors) != header.digest:
        raise DuplexError(f"{header.path} is damaged: its tensors were changed; {remedy}")
    return tensors


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of the names, types, shapes and values of CPU tensors."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a JSON object with a field `checksum`, the sha256 of all other fields."""
    fields = {key: value for key, value in record.items() if key != "checksum"}
    return {**fields, "checksum": json_digest(fields)}


# Fields of an encoder's identity that change features or prompts
COMPARED = ("encoder", "architecture", "weights", "code", "preprocessing", "precision", "text_precision")
RESIZE = "resize"  # field of `TrainingRecord.encoder`: as `encoder.resize` in params.yaml, if set
WORD_VECTORS = "words"  # field of `TrainingRecord.encoder`: sha256 of the word vectors' file, if any


@dataclass(frozen=True)
class TrainingRecord:
    """Metadata of a checkpoint: how its method was trained, and what validation chose."""

    kind: str  # of the method
    provider: str  # distribution and version that define the kind
    options: Options
    labels: LabelSpace
    encoder: dict[str, str]  # identity, name and tag of the encoder whose features it was trained on
    seed: int
    epoch: int  # the chosen one; 0: the untrained method
    val_auc: float  # validation AUC of this epoch, a fraction
    world: World = "closed"  # of training
    calibration: Mapping[str, Calibration] | None = None  # by world
    inspectable: tuple[str, ...] = ()  # fields of the method's `Inspectable` that are set
    finetune: FinetuneOptions | None = None  # of the image tower's last blocks
    confidence: Confidence = UNFITTED
    selected_by: str = "auc"  # validation metric that chose the epoch
    val_auc_all: float | None = None  # with every composition a candidate; None: not for the open world
    recipes: tuple[Mapping[str, float], ...] = ()  # rows of the recipes that `finetune: auto` tried
    training: Mapping[str, Any] = field(default_factory=dict)  # options, digests of manifest and features
    novelty: NoveltyDetector | None = field(default=None, compare=False, repr=False)  # among the tensors

    def to_dict(self) -> dict[str, Any]:
        stored = {name: value for name, value in vars(self).items() if name != "novelty"}
        calibration = self.calibration or {}
        return {
            **stored,
            "options": self.options.to_dict(),
            "labels": self.labels.to_dict(),
            "calibration": {world: chosen.to_dict() for world, chosen in calibration.items()},
            "finetune": None if self.finetune is None else self.finetune.to_dict(),
            "confidence": self.confidence.to_dict(),
        }

    @classmethod
    def from_dict(cls, header: Mapping[str, Any]) -> TrainingRecord:
        stored = {field.name: header[field.name] for field in fields(cls) if field.name in header}
        finetune = stored["finetune"]
        calibration = stored["calibration"]
        return cls(
            **{
                **stored,
                "options": parse_options(stored["kind"], stored["options"]),
                "labels": LabelSpace.from_dict(stored["labels"]),
                "calibration": {world: Calibration(**each) for world, each in calibration.items()},
                "inspectable": tuple(stored["inspectable"]),
                "finetune": FinetuneOptions.from_dict(finetune) if finetune else None,
                "confidence": Confidence(**stored["confidence"]),
                "recipes": tuple(stored["recipes"]),
            }
        )


def save_checkpoint(path: Path, method: Method[Any], record: TrainingRecord) -> None:
    """Write a trained method and its `record` to a checkpoint, atomically."""
    known = {} if record.novelty is None else record.novelty.tensors()
    write_model(path, "checkpoint", record.to_dict(), {**method.state_dict(), **known})


def read_checkpoint_header(path: Path) -> ModelHeader:
    """Read a checkpoint's header; `DuplexError` if the file is missing or is no checkpoint."""
    return read_header(path, "checkpoint")


def read_record(path: Path) -> TrainingRecord:
    """Read a checkpoint's metadata: how its method was trained."""
    return read_checkpoint_header(path).record


def read_novelty(checkpoint: ModelHeader, device: torch.device) -> NoveltyDetector | None:
    """Read a checkpoint's detector of images unlike all pairs; None if it has none."""
    with safe_open(checkpoint.path, "pt") as file:
        names = [name for name in file.keys() if name.startswith(PREFIX)]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    return NoveltyDetector.from_tensors(tensors, device)


def check_inputs(place: object, record: TrainingRecord, labels: LabelSpace, encoder: Mapping[str, str]) -> None:
    """Raise `DuplexError` unless the run `place` has these labels, encoder and word vectors."""
    for key in COMPARED:
        trained_on = record.encoder.get(key)
        here = encoder.get(key)
        if trained_on != here:
            what = "encoder" if key == "encoder" else f"encoder's {key.replace('_', ' ')}"
            raise DuplexError(
                f"{place} was trained with the {what} {trained_on!r}, but {here!r} is in use now; "
                "train again, or set the encoder in params.yaml to the one used in training"
            )
    if record.encoder.get(WORD_VECTORS) != encoder.get(WORD_VECTORS):
        raise DuplexError(
            f"{place} was trained with other word vectors; set evaluation.word_vectors in params.yaml "
            "(in Python: `word_vectors`) as in training, or train again"
        )
    if record.labels != labels:
        raise DuplexError(f"{place} was trained with other states, objects or pairs than the data set has; train again")


def load_checkpoint(checkpoint: Path | ModelHeader, context: MethodContext, encoder: Mapping[str, str]) -> Method[Any]:
    """Load a trained method for evaluation; prints a warning if a plug-in's code has changed since.

    Raises `DuplexError` for other labels or another encoder, and for damaged tensors.
    """
    checkpoint = read_checkpoint_header(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    path = checkpoint.path
    record = checkpoint.record
    check_inputs(path, record, context.labels, encoder)
    plugin = record.training.get("plugin")
    if plugin is not None:
        current = plugin_hash(module_of(method_entry_point(record.kind)))
        current = plugin_code_hash(record.kind) if current == UNKNOWN_CODE else current
        if plugin != current:
            is_unknown = UNKNOWN_CODE in f"{plugin} {current}"
            reason = "may have changed (it cannot be read)" if is_unknown else "has changed"
            problem = f"the code of {record.kind!r} {reason} since {path} was written"
            print(f"duplex: {problem}; predictions may be wrong until you train it again", file=sys.stderr)
    stored = read_tensors(checkpoint)
    tensors = {name: stored[name] for name in stored if not name.startswith(PREFIX)}
    if isinstance(record.options, CombinedRunsOptions):
        context = replace(context, members=load_members(record.options, path.parent, context, encoder))
    method = make_method(record.kind, record.options, replace(context, world=record.world))
    try:
        method.load_state_dict(tensors)
    except RuntimeError as error:  # tensors are missing, unknown or of another shape
        reason = " ".join(str(error).split())
        raise DuplexError(f"{path} does not fit this version of its method, so train again ({reason})") from error
    return method.eval()


def load_members(
    options: CombinedRunsOptions, folder: Path, context: MethodContext, encoder: Mapping[str, str]
) -> tuple[Method[Any], ...]:
    """Load the runs that the product in `folder` combines; `DuplexError` if one was trained again since."""
    loaded = []
    for member in options.members:
        checkpoint = read_checkpoint_header(Path(os.path.normpath(folder / member["checkpoint"])))
        if checkpoint.fingerprint != member["fingerprint"]:
            raise DuplexError(
                f"{checkpoint.path} has changed since {folder} was combined from it; train {folder} again"
            )
        finetune = checkpoint.record.finetune
        blocks = None
        if finetune is not None:
            if context.member_blocks is None:
                raise DuplexError(
                    f"{checkpoint.path} has {finetune.blocks} fine-tuned blocks, but the feature cache "
                    "lacks their inputs; set encoder.block_inputs in params.yaml to "
                    f"{finetune.blocks} and run `duplex extract`"
                )
            blocks = partial(context.member_blocks, finetune)
        own = replace(context, finetuned_blocks=blocks, members=(), member_blocks=None)
        loaded.append(load_checkpoint(checkpoint, own, encoder))
    return tuple(loaded)
