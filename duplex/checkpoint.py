"""Checkpoints: safetensors with JSON metadata, enough to predict with on the encoder they name. Nothing is pickled."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from duplex.encoders.text import TextTower
from duplex.errors import DuplexError
from duplex.labels import LabelSpace
from duplex.model.network import Network
from duplex.model.options import Options

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """What a checkpoint says of itself."""

    options: Options
    labels: LabelSpace
    encoder: dict[str, str]  # the identity of the encoder whose features it was trained on
    seed: int
    epoch: int
    val_auc: float


def save_checkpoint(path: Path, network: Network, record: Record) -> None:
    """Write a checkpoint; the file is replaced whole or not at all. The same run gives the same bytes."""
    meta = {
        "format": FORMAT,
        "options": record.options.to_dict(),
        "labels": record.labels.to_dict(),
        "encoder": record.encoder,
        "seed": record.seed,
        "epoch": record.epoch,
        "val_auc": record.val_auc,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".writing")
    save_file(network.state_tensors(), scratch, {"duplex": json.dumps(meta, ensure_ascii=False, sort_keys=True)})
    os.replace(scratch, path)


def read_record(path: Path) -> Record:
    """A checkpoint's metadata, without its tensors."""
    meta = _metadata(path)
    if meta.get("format") != FORMAT:
        raise DuplexError(f"{path} has format {meta.get('format')}, this version reads {FORMAT}; train again")
    try:
        options, labels = Options.from_dict(meta["options"]), LabelSpace.from_dict(meta["labels"])
        return Record(options, labels, meta["encoder"], meta["seed"], meta["epoch"], meta["val_auc"])
    except (KeyError, TypeError) as error:
        raise DuplexError(f"{path} is not a checkpoint of this version ({error}); train again") from None


def load_checkpoint(path: Path, tower: TextTower, encoder: dict[str, str], labels: LabelSpace | None = None) -> Network:
    """The trained network on a text tower, after checking encoder, labels and shapes."""
    record = read_record(path)
    for key in ("encoder", "weights"):
        if record.encoder.get(key) != encoder.get(key):
            raise DuplexError(
                f"{path} was trained on features of {key} {record.encoder.get(key)!r}, not {encoder.get(key)!r}; "
                "train again or name that encoder in params.yaml"
            )
    if labels is not None and record.labels.to_dict() != labels.to_dict():
        raise DuplexError(f"{path} was trained on other labels than the data set has; train again")
    network = Network(record.options, record.labels, tower)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise DuplexError(f"{path} does not fit its own options: {str(error).splitlines()[-1].strip()}") from None
    return network.eval()


def _metadata(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {})["duplex"])
    except FileNotFoundError:
        raise DuplexError(f"{path} does not exist; `duplex train` or `dvc repro` writes it") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DuplexError(f"{path} is not a checkpoint of duplex ({error})") from None
    return dict(meta)
