"""Conversion of published weights files to folders that load anywhere: `open_clip_config.json` beside safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from duplex.encoders.clip import build_model
from duplex.encoders.encoder_source import EncoderSource, first_line, read_weights
from duplex.encoders.open_clip_source import CONFIG, find_source, is_torchscript, preprocess_of
from duplex.encoders.openclip import LOADING_ERRORS, open_clip
from duplex.errors import DuplexError, UsageError
from duplex.system.files import write_tensors, write_text

WEIGHTS = "open_clip_model.safetensors"
NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")  # numbers in OpenAI's archives


def convert_weights(archive: Path, folder: Path, name: str, tag: str | None = None) -> EncoderSource:
    """Write a weights file as a folder for `local-dir:`, and load it once as a check.

    archive: a weights file, or a TorchScript archive of OpenAI.
    name: an architecture of open_clip.
    tag: the published weights whose preprocessing applies; "openai" for a TorchScript archive unless given.
    """
    architecture = open_clip.get_model_config(name)
    if architecture is None or ":" in name:
        raise UsageError(f"unknown architecture {name!r}; `duplex encoders list` shows the names")
    if not archive.is_file():
        raise UsageError(f"{archive} does not exist")
    scripted = is_torchscript(archive)
    if tag is None and not scripted:
        raise UsageError(f"{archive} does not say how images are prepared; name the published weights with --tag")
    preprocess = preprocess_of(name, architecture, tag or "openai")
    existing = next((folder / name for name in (WEIGHTS, CONFIG) if (folder / name).exists()), None)
    if existing is not None:
        raise UsageError(f"{existing} exists and is not overwritten; name a folder without an encoder in it")
    try:
        state = torch.jit.load(str(archive), map_location="cpu").state_dict() if scripted else read_weights(archive)
    except LOADING_ERRORS as error:
        raise DuplexError(f"{archive} cannot be read as weights: {first_line(error)}") from error
    tensors = {key: value.detach().contiguous().clone() for key, value in state.items() if key not in NOT_WEIGHTS}
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
