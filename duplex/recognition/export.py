"""A run as a folder that stands alone: tensors, labels, a model card, and twenty lines of numpy that score."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.labels import World
from duplex.recognition import numpy_example
from duplex.recognition.card import Facts, card
from duplex.recognition.onnx_files import LINES as SEEING
from duplex.recognition.onnx_files import TOWER, TRAINED
from duplex.recognition.sources import CONFIG, FORMAT, TAILED, TENSORS, fault, read_config
from duplex.recognition.trained import Trained
from duplex.system.files import replaced_folder
from duplex.training.checkpoint import digest

README, LINES = "README.md", "recognize.py"
NAMES = {CONFIG, TENSORS, README, LINES, TRAINED, TOWER, SEEING, "__pycache__"}


def export(
    trained: Trained, world: World, out: Path, facts: Facts, add: Callable[[Path], None] = lambda folder: None
) -> None:
    """Write the folder of one world's compositions; it is there whole, with what `add` writes, or not at all."""
    tensors = exported_tensors(trained, world)
    config = {
        "format": FORMAT if trained.tail is None else TAILED,
        "kind": trained.kind,
        "world": world,
        "labels": trained.labels.to_dict(),
        "encoder": dict(trained.backbone.record),
        "calibration": trained.chosen(world).to_dict(),
        **({} if trained.tail is None else {"tail": trained.tail.options.to_dict()}),
        "tensors": digest(tensors),
    }

    def fill(folder: Path) -> None:
        _fill(folder, tensors, config, card(config, tensors, facts))
        add(folder)

    whole(out, fill)


def exported_tensors(trained: Trained, world: World) -> dict[str, Tensor]:
    """What `recognize.py` reads: the score's tensors, and which columns are seen and which may be chosen."""
    tensors = trained.tensors(world)
    if tensors is None:
        raise UsageError(f"methods of kind {trained.kind!r} have no form that could be exported; choose another run")
    panel = trained.panel(world)
    tensors = {**tensors, "seen": torch.from_numpy(panel.seen.copy()), "live": torch.from_numpy(panel.live.copy())}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _fill(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], text: str) -> None:
    save_file(dict(tensors), folder / TENSORS)
    (folder / TENSORS).chmod(0o644)  # safetensors writes for its owner alone
    (folder / CONFIG).write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (folder / README).write_text(text, encoding="utf-8")
    shutil.copyfile(str(numpy_example.__file__), folder / LINES)


def whole(out: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under another name, then give it its own; an earlier export is replaced, nothing else is."""
    if os.path.lexists(out) and not (out.is_dir() and _ours(out)):
        raise UsageError(f"{out} is there and is no export of duplex, or holds more; choose another folder")
    with replaced_folder(Path(os.path.abspath(out))) as scratch:
        fill(scratch)


def _ours(folder: Path) -> bool:
    """Whether it is empty, or holds what `duplex export` writes and nothing else: many things have a config.json."""
    held = {path.name for path in folder.iterdir()}
    try:
        return not held or (held <= NAMES and bool(read_config(folder / CONFIG)))
    except UsageError:
        return False


def push(folder: Path, name: str) -> str:
    """Upload a folder to the hub; the repository is made where there is none. Gives its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Exported by duplex")
    except Exception as error:  # whatever network and hub raise between them
        raise DuplexError(
            f"{name} could not be uploaded to {api.endpoint}: {fault(error)}; log in, or mend that"
        ) from error
    return f"{api.endpoint}/{name}"
