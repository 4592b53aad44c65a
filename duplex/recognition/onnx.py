"""Write a trained model as ONNX files for onnxruntime: one computes features of images, one scores of features."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duplex.encoders.base import Encoder
from duplex.encoders.image_blocks import capture_block_input
from duplex.errors import DuplexError, UsageError, install_command
from duplex.methods import portable, score_formula
from duplex.recognition import numpy_example
from duplex.recognition.trained import TrainedModel

TRAINED, TOWER, EXAMPLE = "trained.onnx", "encoder.onnx", "see.py"


class OnnxScores(nn.Module):
    """Scores [B, C] from features [B, d], as exported."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tensors = dict(tensors)

    def forward(self, features: Tensor) -> Tensor:
        terms = [term for _, term in portable.score_terms(self.tensors, features)]
        return torch.stack(terms).sum(0)


class OnnxImageTower(nn.Module):
    """Features [B, d] from pixels [B, 3, R, R] uint8 by the image tower with its fine-tuned blocks, as exported."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: Any, preprocess: Mapping[str, Any], model: TrainedModel) -> None:
        super().__init__()
        self.visual = encoder.visual
        self.finetuned = model.finetuned
        self._encoder = encoder
        self._depth = model.outputs.block_inputs
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(preprocess[name]).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        with capture_block_input(self._encoder, self._depth) as block_inputs:
            outputs = self.visual((pixels.float() / 255 - self.mean) / self.std)
        if self.finetuned is not None:
            return self.finetuned.features(block_inputs[0].half())
        pooled = outputs[0] if isinstance(outputs, tuple) else outputs
        features: Tensor = pooled.float().half().float()
        return features


def write_scores(folder: Path, tensors: Mapping[str, Tensor], dim: int) -> None:
    """Write trained.onnx, which computes scores [B, C] from features [B, dim], from the tensors of an export."""
    _export(OnnxScores(tensors), torch.zeros(2, dim), folder / TRAINED, "features", "scores")


def write_tower(folder: Path, model: TrainedModel) -> None:
    """Write encoder.onnx, the image tower in float32 with its fine-tuned blocks, and see.py, a script that uses it."""
    encoder: Encoder = model.backbone.tower("image")
    record = model.backbone.record
    preprocess = json.loads(record["preprocessing"])
    visual = getattr(encoder, "visual", None)
    if visual is None or preprocess.get("resize_mode") != "shortest":
        raise UsageError(f"the image tower of {record['name']!r} cannot be written as ONNX; omit --onnx-encoder")
    blank = torch.zeros(2, 3, preprocess["size"], preprocess["size"], dtype=torch.uint8)
    visual.float().cpu()
    _export(OnnxImageTower(encoder, preprocess, model), blank, folder / TOWER, "pixels", "features")
    example = Path(__file__).with_name("onnx_example.py").read_text(encoding="utf-8")  # importing it needs onnxruntime
    for module, name in ((score_formula, "score_formula"), (numpy_example, "recognize")):
        example = example.replace(module.__name__, name)
    (folder / EXAMPLE).write_text(example, encoding="utf-8")


def _export(module: nn.Module, example: Tensor, path: Path, input_name: str, output_name: str) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(f"to write ONNX files, run {install_command('onnx')}") from error
    try:
        with _quiet_exporter(), torch.no_grad():
            torch.onnx.export(
                module.eval(),
                (example,),
                str(path),
                input_names=[input_name],
                output_names=[output_name],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except (RuntimeError, ValueError, TypeError) as error:
        raise DuplexError(f"{path.name} could not be written for this model: {error!s:.200}") from error


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
