"""Load a trained model by name: a run's folder, its checkpoint, an exported folder, or a Hugging Face repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from duplex.errors import DuplexError, UsageError
from duplex.recognition.tensor_checks import check_tensors
from duplex.recognition.trained import ExportedModel, TrainedModel, TrainedRun
from duplex.system.files import checked_path
from duplex.training.checkpoint import digest, with_checksum

HUB = "hf-hub:"
CHECKPOINT, CONFIG, TENSORS = "checkpoint.safetensors", "config.json", "model.safetensors"
FORMAT = "duplex-export-4"
FINETUNED_FORMAT = "duplex-export-4-finetuned"  # another format: a reader must not ignore the fine-tuned blocks


def open_trained(where: str | Path, device: torch.device, words: Path | None = None) -> TrainedModel:
    """Load a trained model; every error is a `UsageError`, since the user named the model.

    where: a run's folder or checkpoint, a folder of `duplex export`, or `hf-hub:OWNER/NAME`.
    words: the GloVe-format file that training read, if it read one.
    """
    is_on_hub = str(where).startswith(HUB)
    try:
        path = download(str(where).removeprefix(HUB)) if is_on_hub else checked_path(where, "model")
        if is_on_hub or (path / CONFIG).is_file():
            return _open_export(path, device)
        return TrainedRun(_checkpoint(path), device, words)
    except DuplexError as error:
        raise UsageError(str(error)) from error


def _checkpoint(path: Path) -> Path:
    if path.name == CONFIG and path.is_file():
        raise UsageError(f"{path} is not a checkpoint of duplex; for an exported model, name its folder")
    if path.is_file():
        return path
    if (path / CHECKPOINT).is_file():
        return path / CHECKPOINT
    problem = f"holds neither {CHECKPOINT} nor {CONFIG}" if path.is_dir() else "does not exist"
    raise UsageError(
        f"{path} {problem}; expected a run such as artifacts/shapes/duplex/0, a folder of `duplex export`, or "
        f"{HUB}OWNER/NAME"
    )


def _open_export(folder: Path, device: torch.device) -> ExportedModel:
    config = read_config(folder / CONFIG)
    if config != with_checksum(config):
        raise UsageError(f"{folder / CONFIG} is damaged: its labels or calibration were changed; export the run again")
    try:
        tensors = load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{folder / TENSORS} cannot be read ({error}); export the run again") from error
    if digest(tensors) != config.get("tensors"):
        raise UsageError(f"{folder / TENSORS} is damaged: its tensors are not those that were exported; export again")
    try:
        model = ExportedModel(folder, config, tensors, device)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{folder / CONFIG} is not of this version ({error}); export the run again") from error
    try:
        check_tensors(tensors, model.labels, model.backbone.dim)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{folder / TENSORS} is not of this version, or another tool changed it ({error}); export the run again"
        ) from error
    return model


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of an export's config.json; raise `UsageError` for any other file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}); export the run again") from error
    if not isinstance(config, dict) or config.get("format") not in (FORMAT, FINETUNED_FORMAT):
        raise UsageError(f"{path} is not an export of this version ({FORMAT}); `duplex export RUN FOLDER` writes one")
    return config


def download(name: str) -> Path:
    """Return a local folder with the export in the Hugging Face repository `name`; download it unless it is cached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, TENSORS]))
    except Exception as error:  # of many kinds: network, cache and hub
        raise UsageError(f"{HUB}{name} is not on disk and could not be downloaded: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, at most 200 characters, to quote it in a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
