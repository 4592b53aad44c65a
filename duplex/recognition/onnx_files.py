"""The trained part, and the image tower, as ONNX files for onnxruntime."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duplex.encoders import Encoder
from duplex.encoders.image_blocks import entering
from duplex.errors import DuplexError, UsageError
from duplex.layers import portable
from duplex.layers.finetuned_blocks import Tail
from duplex.recognition import onnx_example

TRAINED, TOWER, LINES = "trained.onnx", "encoder.onnx", "see.py"
INSTALL = "pip install 'duplex[onnx]'"


class Scores(nn.Module):
    """Features [B, d] -> scores [B, C]."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tensors = dict(tensors)

    def forward(self, features: Tensor) -> Tensor:
        parts = [part for _, part in portable.terms(self.tensors, features)]
        return torch.stack(parts).sum(0)


class Tower(nn.Module):
    """Pixels [B, 3, R, R] uint8 -> features [B, d], rounded as the cache rounds them. A tail goes on from what enters
    the tower's last `depth` blocks, which the cache rounds too."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: Any, preprocess: Mapping[str, Any], tail: Tail | None = None, depth: int = 0) -> None:
        super().__init__()
        self.visual, self.tail, self._encoder, self._depth = encoder.visual, tail, encoder, depth
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(preprocess[name]).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        with entering(self._encoder, self._depth) as seen:
            found = self.visual((pixels.float() / 255 - self.mean) / self.std)
        if self.tail is not None:
            return self.tail.features(seen[0].half())
        pooled = found[0] if isinstance(found, tuple) else found
        features: Tensor = pooled.float().half().float()
        return features


def write_trained(folder: Path, tensors: Mapping[str, Tensor], dim: int) -> None:
    _export(Scores(tensors), torch.zeros(2, dim), folder / TRAINED, "features", "scores")


def write_tower(
    folder: Path, encoder: Encoder, identity: Mapping[str, str], tail: Tail | None = None, depth: int = 0
) -> None:
    """The image tower in float32, with the tail in place of its last blocks where there is one, and the lines that
    prepare a picture for it."""
    preprocess = json.loads(identity["preprocessing"])
    visual = getattr(encoder, "visual", None)
    if visual is None or preprocess.get("resize_mode") != "shortest":
        raise UsageError(f"the image tower of {identity['name']!r} cannot be written as ONNX; leave --onnx-encoder out")
    blank = torch.zeros(2, 3, preprocess["size"], preprocess["size"], dtype=torch.uint8)
    visual.float().cpu()
    _export(Tower(encoder, preprocess, tail, depth), blank, folder / TOWER, "pixels", "features")
    shutil.copyfile(str(onnx_example.__file__), folder / LINES)


def _export(module: nn.Module, example: Tensor, path: Path, given: str, found: str) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(f"ONNX files need further packages; {INSTALL}") from error
    try:
        with _quietly(), torch.no_grad():
            torch.onnx.export(
                module.eval(),
                (example,),
                str(path),
                input_names=[given],
                output_names=[found],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except (RuntimeError, ValueError, TypeError) as error:
        raise DuplexError(f"{path.name} could not be made of this model: {str(error).splitlines()[0][:200]}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The exporter speaks of its own versions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
