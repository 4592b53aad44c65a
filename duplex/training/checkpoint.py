"""Checkpoints: safetensors with JSON metadata, enough to predict with on the encoder they name. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from duplex.errors import DuplexError
from duplex.labels import WORLDS, LabelSpace, World
from duplex.methods.base import Method, Setting
from duplex.methods.registry import make, parse
from duplex.options import Options, TailOptions
from duplex.system.files import write_tensors
from duplex.training.calibration import JUDGES, Calibration

FORMAT = 3
PLAUSIBLE = 100_000  # an option's whole number that no tensor needs to account for
COMPARED = {  # what decides the meaning of a feature or a prompt
    "encoder": "encoder",
    "architecture": "architecture",
    "weights": "weights",
    "preprocessing": "preprocessing",
    "precision": "precision",
    "text_precision": "text precision",
}
WORDS = "words"  # of a checkpoint's encoder: the sha256 of the file of word vectors, where there was one
Value = TypeVar("Value")


@dataclass(frozen=True)
class Record:
    """What a checkpoint says of itself."""

    kind: str
    provider: str  # who brought the kind: distribution and version
    options: Options
    labels: LabelSpace
    encoder: dict[str, str]  # identity of the encoder whose features it was trained on, and where to get it: name, tag
    seed: int
    epoch: int
    val_auc: float
    world: World = "closed"  # that it was trained for
    calibration: Mapping[str, Calibration] | None = None  # by world that it is for
    exhibits: tuple[str, ...] = ()  # what the method lets people look at
    tail: TailOptions | None = None  # what was trained in the image tower's last blocks

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "provider": self.provider,
            "options": self.options.to_dict(),
            "labels": self.labels.to_dict(),
            "encoder": self.encoder,
            "seed": self.seed,
            "epoch": self.epoch,
            "val_auc": self.val_auc,
            "world": self.world,
            "calibration": {world: found.to_dict() for world, found in (self.calibration or {}).items()},
            "exhibits": list(self.exhibits),
            "tail": None if self.tail is None else self.tail.to_dict(),
        }

    @classmethod
    def from_dict(cls, meta: Mapping[str, Any]) -> Record:
        """From JSON, whose values may be of any type; one that is not of its own is a ValueError."""
        calibration = {_one_of(WORLDS, world): found for world, found in meta["calibration"].items()}
        return cls(
            kind=_of(str, meta["kind"]),
            provider=_of(str, meta["provider"]),
            options=parse(meta["kind"], meta["options"]),
            labels=LabelSpace.from_dict(meta["labels"]),
            encoder={key: _of(str, value) for key, value in meta["encoder"].items()},
            seed=_of(int, meta["seed"]),
            epoch=_of(int, meta["epoch"]),
            val_auc=_of(float, meta["val_auc"]),
            world=_one_of(WORLDS, meta["world"]),
            calibration={world: _calibration(found) for world, found in calibration.items()},
            exhibits=tuple(_of(str, name) for name in _of(list, meta["exhibits"])),
            tail=TailOptions.from_dict(meta["tail"]) if meta.get("tail") else None,
        )


def _of(kind: type[Value], value: Any) -> Value:
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is no {kind.__name__}")
    found: Value = value
    return found


def _one_of(allowed: tuple[Value, ...], value: Any) -> Value:
    if value not in allowed:
        raise ValueError(f"{str(value)[:40]!r} is none of {', '.join(map(str, allowed))}")
    found: Value = value
    return found


def _calibration(values: Mapping[str, Any]) -> Calibration:
    """One world's, with at most one other beside it."""
    own = dict(values)
    beside = own.pop("beside", None)
    return Calibration.from_dict(_choices(own) | ({} if beside is None else {"beside": _choices(beside)}))


def _choices(values: Mapping[str, Any]) -> dict[str, Any]:
    numbers = dict(values)
    judge = _one_of(JUDGES, numbers.pop("judge", "words"))
    return {**_numbers(numbers), "judge": judge}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {key: _of(float, value) for key, value in values.items()}
    if not all(map(math.isfinite, found.values())):
        raise ValueError(f"calibration {found} is not finite")
    return found


def save_checkpoint(path: Path, method: Method[Any], record: Record) -> None:
    """Write a checkpoint; the file is replaced whole or not at all. The same run gives the same bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in method.state_dict().items()}
    meta = {"format": FORMAT, "tensors": digest(tensors), **record.to_dict()}
    write_tensors(path, tensors, {"duplex": json.dumps(meta, ensure_ascii=False, sort_keys=True)})


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, types, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read_record(path: Path) -> Record:
    """A checkpoint's metadata, without its tensors."""
    return _record(path, _metadata(path))


def fingerprint(path: Path) -> str:
    """What tells a checkpoint from another: its tensors' digest, labels, options and calibration."""
    return hashlib.sha256(json.dumps(_metadata(path), sort_keys=True).encode()).hexdigest()


def load_checkpoint(path: Path, setting: Setting, encoder: Mapping[str, str]) -> Method[Any]:
    """The trained method, after checking encoder, labels, names, shapes, types and values of its tensors."""
    meta = _metadata(path)
    record = _record(path, meta)
    for key, spoken in COMPARED.items():
        if record.encoder.get(key) != encoder.get(key):
            raise DuplexError(
                f"{path} was trained on features of {spoken} {record.encoder.get(key)!r}, not {encoder.get(key)!r}; "
                "train again or name that encoder in params.yaml"
            )
    if record.encoder.get(WORDS) != encoder.get(WORDS):
        raise DuplexError(
            f"{path} was trained with other word vectors than evaluation.word_vectors in params.yaml names; "
            "train again or name those"
        )
    if record.labels != setting.labels:
        raise DuplexError(f"{path} was trained on other labels than the data set has; train again")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    _check_sizes(path, record.options, tensors)
    method = make(record.kind, record.options, replace(setting, world=record.world))
    if digest(tensors) != meta.get("tensors"):
        raise DuplexError(f"{path} is damaged: its tensors are not those that were saved; train again")
    _check_fit(path, tensors, method)
    method.load_state_dict(tensors)
    return method.eval()


def _check_sizes(path: Path, options: Options, tensors: Mapping[str, Tensor]) -> None:
    """A width is a side of some tensor: one beyond all that the file holds would only fill the memory."""
    most = max(PLAUSIBLE, sum(tensor.numel() for tensor in tensors.values()))
    for name, value in options.to_dict().items():
        if isinstance(value, int) and value > most:
            raise DuplexError(f"{path} is damaged: {name} is {value:,}, and it holds no such tensor; train again")


def _check_fit(path: Path, tensors: Mapping[str, Tensor], method: Method[Any]) -> None:
    """Names, types and shapes are those of a fresh method; of tensors that grow while it trains, all but the first
    dimension."""
    again, wanted = "its method is of another version; train again", method.state_dict()
    grows = {f"{place}.{name}" for place, part in method.named_modules() for name in getattr(part, "grows", ())}
    odd = sorted(set(tensors) ^ set(wanted))
    if odd:
        verb = "lacks" if odd[0] in wanted else "holds a strange"
        raise DuplexError(f"{path} {verb} tensor {odd[0]!r}; {again}")
    for name, tensor in tensors.items():
        first = 1 if name in grows else 0
        shapes = tensor.shape[first:] == wanted[name].shape[first:] and tensor.dim() == wanted[name].dim()
        if not shapes or tensor.dtype != wanted[name].dtype:
            raise DuplexError(
                f"{path}: {name} is {tuple(tensor.shape)} of {tensor.dtype}, its options ask for "
                f"{tuple(wanted[name].shape)} of {wanted[name].dtype}; {again}"
            )


def _record(path: Path, meta: Mapping[str, Any]) -> Record:
    if meta.get("format") != FORMAT:
        raise DuplexError(f"{path} has format {meta.get('format')}, this version reads {FORMAT}; train again")
    try:
        return Record.from_dict(meta)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DuplexError(f"{path} is not a checkpoint of this version ({error}); train again") from error


def _metadata(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise DuplexError(f"{path} is a folder, a device or a pipe, not a checkpoint")
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {})["duplex"])
        return dict(meta)
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist; `duplex train` or `dvc repro` writes it") from error
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise DuplexError(f"{path} is not a checkpoint of duplex ({error})") from error
