"""Published archives to folders that load anywhere: `open_clip_config.json` beside safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from duplex.encoders.clip import build_model
from duplex.encoders.openclip import LOADING, load_state_dict, open_clip
from duplex.encoders.source import CONFIG, EncoderSource, find_source, is_torchscript, preprocess_of
from duplex.errors import DuplexError, UsageError
from duplex.system.files import write_tensors, write_text

WEIGHTS = "open_clip_model.safetensors"
NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")  # numbers that OpenAI's archives carry


def convert(archive: Path, folder: Path, name: str, tag: str | None = None) -> EncoderSource:
    """Write `local-dir:` FOLDER from a weights file of the architecture `name`, prepared as the published `tag` was
    (`openai` for a TorchScript archive), and load it once to see that it is whole."""
    architecture = open_clip.get_model_config(name)
    if architecture is None or ":" in name:
        raise UsageError(f"unknown architecture {name!r}; `duplex encoders list` shows the names")
    if not archive.is_file():
        raise UsageError(f"{archive} does not exist")
    scripted = is_torchscript(archive)
    if tag is None and not scripted:
        raise UsageError(f"{archive} does not say how pictures are prepared; name the published weights with --tag")
    preprocess = preprocess_of(name, architecture, tag or "openai")
    there = next((folder / name for name in (WEIGHTS, CONFIG) if (folder / name).exists()), None)
    if there is not None:
        raise UsageError(f"{there} exists and is left alone; name a folder without an encoder in it")
    tensors = _read_archive(archive, scripted)
    write_tensors(folder / WEIGHTS, tensors)
    config = json.dumps({"model_cfg": architecture, "preprocess_cfg": preprocess}, indent=2) + "\n"
    write_text(folder / CONFIG, config)
    source = find_source(f"local-dir:{folder}")
    try:
        build_model(source)
    except DuplexError as error:
        (folder / CONFIG).unlink()
        (folder / WEIGHTS).unlink()
        raise DuplexError(
            f"{archive} does not hold the weights of {name!r}; name its architecture with --encoder"
        ) from error
    return source


def _read_archive(archive: Path, scripted: bool) -> dict[str, torch.Tensor]:
    try:
        state = (
            torch.jit.load(str(archive), map_location="cpu").state_dict() if scripted else load_state_dict(str(archive))
        )
    except LOADING as error:
        raise DuplexError(f"{archive} cannot be read as weights: {str(error).strip().splitlines()[0][:200]}") from error
    return {key: value.detach().contiguous().clone() for key, value in state.items() if key not in NOT_WEIGHTS}
