"""Checkpoints: one safetensors file with the method's tensors and, under the metadata key `duplex`, a JSON record.

The record holds `format`, `tensors` (sha256 of names, types, shapes and values), the fields of `Record` (enough to
predict with, on the encoder that it names) and `checksum` (sha256 of all these). Nothing is pickled. A file of another
format or with another checksum is refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from duplex.errors import DuplexError
from duplex.evaluation.confidence import UNFITTED, Confidence
from duplex.labels import WORLDS, LabelSpace, World
from duplex.methods.base import Method, MethodContext
from duplex.methods.registry import find_method, make_method, method_source, parse_options
from duplex.options import FinetuneOptions, Options
from duplex.system.files import write_tensors
from duplex.system.plugins import UNKNOWN_CODE, module_of, plugin_hash
from duplex.training.scoring import FIELDS, PREFIX, Calibration, KnownImages

FORMAT = 7
PLAUSIBLE = 100_000  # larger whole numbers among the options must be backed by tensors of that size
# Fields of an encoder's identity that change features or prompts
COMPARED = ("encoder", "architecture", "weights", "code", "preprocessing", "precision", "text_precision")
WORD_VECTORS = "words"  # field of `Record.encoder`: sha256 of the file of word vectors, if one was used
Value = TypeVar("Value")


@dataclass(frozen=True)
class Record:
    """Metadata of a checkpoint: method and options, labels, encoder, calibration, and how it was trained."""

    kind: str
    provider: str  # distribution and version that define the kind
    options: Options
    labels: LabelSpace
    encoder: dict[str, str]  # identity of the encoder whose features it was trained on, and its name and tag
    seed: int
    epoch: int
    val_auc: float
    world: World = "closed"  # of training
    calibration: Mapping[str, Calibration] | None = None  # by world
    inspectable: tuple[str, ...] = ()  # fields of the method's `Inspectable` that are set
    finetune: FinetuneOptions | None = None  # of the image tower's last blocks
    confidence: Confidence = UNFITTED
    selected_by: str = "auc"  # validation metric that chose the epoch
    val_auc_all: float | None = None  # validation AUC with every composition a candidate; None: not for the open world
    recipes: tuple[Mapping[str, float], ...] = ()  # rows of the recipes that `finetune: auto` tried
    training: Mapping[str, Any] = field(default_factory=dict)  # training options, and the manifest's sha256
    known_images: KnownImages | None = field(default=None, compare=False, repr=False)  # stored among the tensors

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "options": self.options.to_dict(),
            "labels": self.labels.to_dict(),
            "calibration": {world: choices.to_dict() for world, choices in (self.calibration or {}).items()},
            "finetune": None if self.finetune is None else self.finetune.to_dict(),
            "confidence": self.confidence.to_dict(),
            "known_images": self.known_images is not None,
        }

    @classmethod
    def from_dict(cls, meta: Mapping[str, Any]) -> Record:
        """Return the checkpoint metadata in JSON of unknown origin; raise `ValueError` for a value of a wrong type."""
        return cls(
            kind=_of(str, meta["kind"]),
            provider=_of(str, meta["provider"]),
            options=parse_options(meta["kind"], meta["options"]),
            labels=LabelSpace.from_dict(meta["labels"]),
            encoder={key: _of(str, value) for key, value in meta["encoder"].items()},
            seed=_of(int, meta["seed"]),
            epoch=_of(int, meta["epoch"]),
            val_auc=_of(float, meta["val_auc"]),
            selected_by=_of(str, meta["selected_by"]),
            val_auc_all=None if meta["val_auc_all"] is None else _of(float, meta["val_auc_all"]),
            world=_one_of(WORLDS, meta["world"]),
            calibration={
                _one_of(WORLDS, world): Calibration.from_dict(values) for world, values in meta["calibration"].items()
            },
            inspectable=tuple(_of(str, name) for name in _of(list, meta["inspectable"])),
            finetune=FinetuneOptions.from_dict(meta["finetune"]) if meta.get("finetune") else None,
            confidence=Confidence.from_dict({key: _of(float, value) for key, value in meta["confidence"].items()}),
            recipes=tuple({name: _of(float, value) for name, value in recipe.items()} for recipe in meta["recipes"]),
            training=_of(dict, meta.get("training", {})),
        )


def _of(kind: type[Value], value: Any) -> Value:
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is not of type {kind.__name__}")
    return value


def _one_of(allowed: tuple[Value, ...], value: Any) -> Value:
    if value not in allowed:
        raise ValueError(f"{str(value)[:40]!r} is not one of {', '.join(map(str, allowed))}")
    return cast(Value, value)


def save_checkpoint(path: Path, method: Method[Any], record: Record) -> None:
    """Write a method's checkpoint atomically; equal runs give equal bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in method.state_dict().items()}
    tensors |= {} if record.known_images is None else record.known_images.tensors()
    meta = with_checksum({"format": FORMAT, "tensors": digest(tensors), **record.to_dict()})
    write_tensors(path, tensors, {"duplex": json.dumps(meta, ensure_ascii=False, sort_keys=True)})


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the names, types, shapes and values of tensors."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON record with the field `checksum`, the sha256 of all other fields."""
    fields = {key: value for key, value in record.items() if key != "checksum"}
    return {**fields, "checksum": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()}


@dataclass(frozen=True)
class CheckpointHeader:
    """Path and metadata of a checkpoint file, as read from JSON and as a `Record`; the tensors are not read."""

    path: Path
    metadata: Mapping[str, Any]
    record: Record

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the checkpoint: the sha256 of all metadata, including the digest of the tensors."""
        return str(self.metadata["checksum"])


def read_checkpoint(path: Path) -> CheckpointHeader:
    """Read a checkpoint's metadata without its tensors; raise `DuplexError` if the file is missing or invalid."""
    try:
        with safe_open(path, "pt") as file:
            meta = dict(json.loads((file.metadata() or {})["duplex"]))
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist; `duplex train` or `dvc repro` writes it") from error
    except KeyError as error:
        raise DuplexError(
            f"{path} is not a checkpoint of duplex: it has no record of a run; for an exported model, name its folder"
        ) from error
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise DuplexError(f"{path} is not a checkpoint of duplex ({error})") from error
    if meta.get("format") != FORMAT:
        raise DuplexError(f"{path} has format {meta.get('format')}, this version reads format {FORMAT}; train again")
    if meta != with_checksum(meta):
        raise DuplexError(f"{path} is damaged: its labels, options or calibration were changed; train again")
    try:
        return CheckpointHeader(path, meta, Record.from_dict(meta))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DuplexError(f"{path} is not a valid checkpoint ({error}); train again") from error


def is_checkpoint(path: Path) -> bool:
    """Return whether a file is a checkpoint that some version of duplex wrote."""
    try:
        with safe_open(path, "pt") as file:
            return "duplex" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def read_known_images(header: CheckpointHeader, device: torch.device) -> KnownImages | None:
    """Read a checkpoint's detector of images unlike the training images: pair means, whitening and distance threshold.

    Returns None for a checkpoint without them.
    """
    if not header.metadata.get("known_images"):
        return None
    with safe_open(header.path, "pt") as file:
        return KnownImages.from_tensors({PREFIX + name: file.get_tensor(PREFIX + name) for name in FIELDS}, device)


def read_record(path: Path) -> Record:
    """Read a checkpoint's metadata as a `Record`, without its tensors."""
    return read_checkpoint(path).record


def check_inputs(place: object, record: Record, labels: LabelSpace, encoder: Mapping[str, str]) -> None:
    """Raise `DuplexError` unless a data set's labels and encoder are those that a run was trained with.

    place: name of the run for the message. record: metadata of the run. encoder: fields that identify the encoder in
    use, such as its weights and precision.
    """
    for key in COMPARED:
        trained_on, here = record.encoder.get(key), encoder.get(key)
        if trained_on != here:
            raise DuplexError(
                f"{place} was trained on features of {key.replace('_', ' ')} {trained_on!r}, not {here!r}; "
                "train again, or name that encoder in params.yaml"
            )
    if record.encoder.get(WORD_VECTORS) != encoder.get(WORD_VECTORS):
        raise DuplexError(
            f"{place} was trained with other word vectors than evaluation.word_vectors in params.yaml names; "
            "train again, or name the same file"
        )
    if record.labels != labels:
        raise DuplexError(f"{place} was trained on other labels than those of the data set; train again")


def load_checkpoint(
    checkpoint: Path | CheckpointHeader, context: MethodContext, encoder: Mapping[str, str]
) -> Method[Any]:
    """Load a trained method for evaluation.

    `context`: labels and text tower to use. `encoder`: fields that identify the encoder of the features to score,
    such as its weights. Raises `DuplexError` if labels or encoder differ from those of training, or if the tensors are
    damaged or do not fit the options. Prints a line on stderr if the code of a plug-in method is not that of training,
    or cannot be compared.
    """
    header = read_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    path, meta, record = header.path, header.metadata, header.record
    check_inputs(path, record, context.labels, encoder)
    plugin = record.training.get("plugin")
    if plugin is not None:
        current = plugin_hash(module_of(method_source(record.kind)), find_method(record.kind))
        if UNKNOWN_CODE in (plugin, current):
            print(
                f"duplex: the code of {record.kind!r} cannot be compared with that when {path} was trained, since its "
                "source is unknown; put the class into a module",
                file=sys.stderr,
            )
        elif plugin != current:
            print(f"duplex: the code of {record.kind!r} has changed since {path} was trained", file=sys.stderr)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    limit = max(PLAUSIBLE, sum(tensor.numel() for tensor in tensors.values()))
    for name, value in record.options.to_dict().items():  # refused before the method fills the memory
        if isinstance(value, int) and value > limit:
            raise DuplexError(f"{path} is damaged: {name} is {value:,}, and no tensor is that large; train again")
    method = make_method(record.kind, record.options, replace(context, world=record.world))
    if digest(tensors) != meta.get("tensors"):
        raise DuplexError(f"{path} is damaged: its tensors do not match their checksum; train again")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    _check_fit(path, tensors, method)
    method.load_state_dict(tensors)
    return method.eval()


def _check_fit(path: Path, tensors: Mapping[str, Tensor], method: Method[Any]) -> None:
    """Raise `DuplexError` unless a checkpoint's tensors match a method's in name, type and shape.

    Tensors that the method names in `growing` may differ in length.
    """
    advice = "another version of the method wrote it; train again"
    expected = method.state_dict()
    parts = dict(method.named_modules())
    grows = {f"{place}.{name}".lstrip(".") for place, part in parts.items() for name in getattr(part, "growing", ())}
    odd = sorted(set(tensors) ^ set(expected))
    if odd:
        verb = "lacks" if odd[0] in expected else "has an unknown"
        raise DuplexError(f"{path} {verb} tensor {odd[0]!r}; {advice}")
    for name, tensor in tensors.items():
        first = 1 if name in grows else 0
        shapes = tensor.shape[first:] == expected[name].shape[first:] and tensor.dim() == expected[name].dim()
        if not shapes or tensor.dtype != expected[name].dtype:
            raise DuplexError(
                f"{path}: {name} is {tuple(tensor.shape)} of {tensor.dtype}, its options require "
                f"{tuple(expected[name].shape)} of {expected[name].dtype}; {advice}"
            )
