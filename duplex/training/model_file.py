"""The one file format of models: tensors in safetensors and, under the metadata key `duplex`, a JSON header.

The header has `format` (the version), `holds` (the kind of file), `tensors` (sha256 of their names, types, shapes and
values), the fields of its kind, and `checksum` (sha256 of all these). Nothing is pickled. Equal content gives equal
bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from duplex.errors import DuplexError
from duplex.system.files import json_digest, write_tensors

FORMAT = 8
KEY = "duplex"
Kind = Literal["checkpoint", "unfinished training", "export", "statistics"]
REMEDIES: dict[Kind, str] = {
    "checkpoint": "train again",
    "unfinished training": "training starts from the beginning",
    "export": "export the run again",
    "statistics": "run `duplex fit` again",
}


@dataclass(frozen=True)
class ModelHeader:
    """Path and header of a model file, whose tensors are not read."""

    path: Path
    kind: Kind
    fields: Mapping[str, Any]  # of the kind
    digest: str  # of the tensors
    fingerprint: str  # identifies the whole content


def write_model(path: Path, kind: Kind, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a model file, whole or not at all."""
    stored = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    header = {"format": FORMAT, "holds": kind, "tensors": digest(stored), **fields}
    text = json.dumps({**header, "checksum": json_digest(header)}, ensure_ascii=False)
    write_tensors(path, stored, {KEY: text})


def read_header(path: Path, kind: Kind) -> ModelHeader:
    """Read the header of a model file; raises `DuplexError` for other files, and if the header is damaged."""
    try:
        with safe_open(path, "pt") as file:
            fields = dict(json.loads((file.metadata() or {})[KEY]))
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist; {REMEDIES[kind]}") from error
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, RecursionError) as error:
        reason = "it has no header" if isinstance(error, KeyError) else error
        raise DuplexError(f"{path} is not a file that duplex wrote ({reason}); {REMEDIES[kind]}") from error
    version, holds = fields.get("format"), fields.get("holds")
    if version != FORMAT:
        raise DuplexError(f"{path} has format {version}, this version reads format {FORMAT}; {REMEDIES[kind]}")
    if holds != kind:
        raise DuplexError(f"{path} is a file of the kind {holds}; expected {kind}")
    fingerprint = fields.pop("checksum", None)
    if fingerprint != json_digest(fields):
        raise DuplexError(f"{path} is damaged: its header was changed; {REMEDIES[kind]}")
    own = {name: value for name, value in fields.items() if name not in ("format", "holds", "tensors")}
    return ModelHeader(path, kind, own, fields["tensors"], fingerprint)


def read_tensors(header: ModelHeader) -> dict[str, Tensor]:
    """Read the tensors of a model file; raises `DuplexError` if they are not those that its header was written with."""
    try:
        with safe_open(header.path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DuplexError(f"{header.path} cannot be read ({error}); {REMEDIES[header.kind]}") from error
    if digest(tensors) != header.digest:
        raise DuplexError(f"{header.path} is damaged: its tensors were changed; {REMEDIES[header.kind]}")
    return tensors


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of the names, types, shapes and values of tensors on the CPU."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON record with the field `checksum`, the sha256 of all other fields."""
    fields = {key: value for key, value in record.items() if key != "checksum"}
    return {**fields, "checksum": json_digest(fields)}
