"""From a name to a trained model: a run's folder, its checkpoint, an exported folder, or one on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from duplex.errors import DuplexError, UsageError
from duplex.recognition.trained import Exported, Run, Trained, WordSource
from duplex.training.checkpoint import digest

HUB = "hf-hub:"
CHECKPOINT, CONFIG, TENSORS = "checkpoint.safetensors", "config.json", "model.safetensors"
FORMAT = "duplex-export-1"
TAILED = "duplex-export-1-tail"  # apart, for versions that would leave the tail out


def open_trained(where: str | Path, device: torch.device, words: WordSource | None = None) -> Trained:
    """Whatever is wrong with it is a mistake in what was asked for."""
    try:
        if str(where).startswith(HUB):
            return _exported(fetch(str(where).removeprefix(HUB)), device)
        path = Path(where).expanduser()
        if path.is_dir() and (path / CONFIG).is_file():
            return _exported(path, device)
        return Run(_checkpoint(path), device, words)
    except UsageError:
        raise
    except DuplexError as error:
        raise UsageError(str(error)) from error


def _checkpoint(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / CHECKPOINT).is_file():
        return path / CHECKPOINT
    what = f"holds neither {CHECKPOINT} nor {CONFIG}" if path.is_dir() else "does not exist"
    raise UsageError(
        f"{path} {what}; name a run such as artifacts/shapes/duplex/0, a folder of `duplex export`, or {HUB}OWNER/NAME"
    )


def _exported(folder: Path, device: torch.device) -> Exported:
    config = read_config(folder / CONFIG)
    try:
        tensors = load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{folder / TENSORS} cannot be read ({error}); export the run again") from error
    if digest(tensors) != config.get("tensors"):
        raise UsageError(f"{folder / TENSORS} is damaged: its tensors are not those that were exported; export again")
    try:
        return Exported(folder, config, tensors, device)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder / CONFIG} is not of this version ({error}); export the run again") from error


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}); export the run again") from error
    if not isinstance(config, dict) or config.get("format") not in (FORMAT, TAILED):
        raise UsageError(f"{path} is not of an export of duplex ({FORMAT}); `duplex export RUN FOLDER` writes one")
    return config


def fetch(name: str) -> Path:
    """A folder on the hub, or in its cache on disk."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, TENSORS]))
    except Exception as error:  # whatever network, cache and hub raise between them
        raise UsageError(f"{HUB}{name} is not on disk and could not be fetched: {fault(error)}") from error


def fault(error: Exception) -> str:
    """The first line of what somebody else's library says."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
