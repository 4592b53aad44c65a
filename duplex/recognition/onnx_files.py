"""ONNX files of an export, and a page that answers in the browser."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import PIL
import torch
from torch import Tensor, nn

from duplex.encoders.base import Encoder, first_line
from duplex.encoders.image_blocks import cached_blocks, capture_block_input
from duplex.errors import DuplexError, UsageError, install_command
from duplex.features.file import PIXELS
from duplex.methods import portable, score_formula
from duplex.methods.layers import unit
from duplex.recognition import numpy_example
from duplex.recognition.export import ONNX_EXAMPLE, PAGE, TOWER, TRAINED
from duplex.recognition.trained import TrainedModel
from duplex.system.files import write_json, write_text
from duplex.training.novelty import nearest_sum, squared_sums


class OnnxScores(nn.Module):
    """Module for ONNX: scores [B, C] from features [B, d]."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tensors = dict(tensors)

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([term for _, term in portable.score_terms(self.tensors, features)]).sum(0)


class OnnxImageTower(nn.Module):
    """Module for ONNX: the image tower, from pixels [B, 3, R, R] uint8 to features [B, d]."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: Any, preprocess: Mapping[str, Any], model: TrainedModel) -> None:
        super().__init__()
        self.visual = encoder.visual
        self.finetuned = copy(model.finetuned)
        if self.finetuned is not None:
            self.finetuned.precision = "fp32"  # like the tower
        self._encoder = encoder
        record = model.backbone.record
        self._reads_pixels = PIXELS in record
        self._depth = 0 if self.finetuned is None else cached_blocks(encoder, record)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(preprocess[name]).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.both(pixels)[1]

    def both(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the frozen tower and of the fine-tuned blocks, if there are any."""
        with capture_block_input(self._encoder, self._depth) as block_inputs:
            outputs = self.visual((pixels.float() / 255 - self.mean) / self.std)
        pooled = outputs[0] if isinstance(outputs, tuple) else outputs
        frozen = pooled.float().half().float()
        if self.finetuned is None:
            return frozen, frozen
        inputs = block_inputs[0] if self._reads_pixels else block_inputs[0].half()
        return frozen, self.finetuned.features(inputs)


class PixelModel(nn.Module):
    """Pixels -> probabilities [B, C] and distances [B] to the nearest pair, for ONNX."""

    def __init__(self, tower: OnnxImageTower, tensors: Mapping[str, Tensor], model: TrainedModel) -> None:
        super().__init__()
        self.tower = tower
        self.scores = OnnxScores(tensors)
        self._temperature = model.confidence.temperature
        self._near = model.novelty

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        frozen, features = self.tower.both(pixels)
        scores = self.scores(features).double()
        logits = score_formula.answer_logits(self.scores.tensors, scores, self._temperature, torch)
        if self._near is None:
            return logits.softmax(-1).float(), frozen.new_zeros(len(frozen))
        # distances as of `NoveltyDetector`; ONNX has no cdist
        whitened = unit(frozen) @ self._near.whitening
        u, v = self._near.states, self._near.objects
        predicted = nearest_sum(whitened, u, v, squared_sums(u, v))
        distances = torch.minimum(_nearest(whitened, self._near.means), predicted)
        if len(self._near.negatives):
            offset, slope = self._near.scale
            excess = distances - _nearest(whitened, self._near.negatives)
            distances = torch.maximum(distances, offset + slope * excess)
        return logits.softmax(-1).float(), distances


def _nearest(x: Tensor, points: Tensor) -> Tensor:
    return (x[:, None] - points).square().sum(-1).amin(1).sqrt()


def write_scores(folder: Path, tensors: Mapping[str, Tensor], dim: int) -> None:
    """Write trained.onnx from an export's tensors: features [B, dim] -> scores [B, C]."""
    _write_onnx(OnnxScores(tensors), torch.zeros(2, dim), folder / TRAINED, "features", ["scores"])


def write_tower(folder: Path, model: TrainedModel) -> None:
    """Write encoder.onnx, the float32 image tower with fine-tuned blocks, and see.py."""
    tower, blank = _portable_tower(model)
    _write_onnx(tower, blank, folder / TOWER, "pixels", ["features"])
    source = Path(__file__).with_name("onnx_example.py")  # importing it would need onnxruntime
    example = source.read_text(encoding="utf-8")
    (folder / ONNX_EXAMPLE).write_text(example.replace(numpy_example.__name__, "recognize"), encoding="utf-8")


def _portable_tower(model: TrainedModel) -> tuple[OnnxImageTower, Tensor]:
    encoder: Encoder = model.backbone.tower("image")
    record = model.backbone.record
    preprocess = json.loads(record["preprocessing"])
    visual = getattr(encoder, "visual", None)
    if visual is None or not isinstance(preprocess["size"], int):
        problem = f"the image tower of {record['name']!r} cannot be written as ONNX"
        raise UsageError(f"{problem}; omit --onnx-encoder and --page")
    visual.float().cpu()
    blank = torch.zeros(2, 3, preprocess["size"], preprocess["size"], dtype=torch.uint8)
    return OnnxImageTower(encoder, preprocess, model), blank


RUNTIME = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")  # of onnxruntime-web
LARGEST_PAGE = 40  # MB of the model
VERTICAL_FIRST = 13  # version of Pillow since which images that lose more height than width are scaled vertically first


def write_page(folder: Path, tensors: Mapping[str, Tensor], model: TrainedModel, runtime: Path) -> None:
    """Write `page`, which answers in the browser; `runtime` is onnxruntime-web's folder."""
    missing = [name for name in RUNTIME if not (runtime / name).is_file()]
    if missing:
        problem = f"{runtime} holds no {missing[0]}"
        install = "run `npm install onnxruntime-web` and give --page node_modules/onnxruntime-web/dist"
        raise UsageError(f"{problem}; {install}")
    page = folder / PAGE
    page.mkdir()
    tower, blank = _portable_tower(model)
    pixel_model = PixelModel(tower, tensors, model)
    _write_onnx(pixel_model, blank, page / "model.onnx", "pixels", ["probabilities", "distance"])
    size = (page / "model.onnx").stat().st_size / 1e6
    if size > LARGEST_PAGE:
        problem = f"the page's model is {size:.0f} MB, more than the {LARGEST_PAGE} MB that a page may load"
        raise UsageError(f"{problem}; choose a run with a smaller encoder")
    preprocess = json.loads(model.backbone.record["preprocessing"])
    fill = preprocess["fill_color"]
    facts = {
        "states": model.labels.states,
        "objects": model.labels.objects,
        **{name: tensors[name].tolist() for name in ("state_of", "object_of", "seen")},
        **{name: preprocess[name] for name in ("size", "interpolation", "resize_mode")},
        "vertical_first": int(PIL.__version__.partition(".")[0]) >= VERTICAL_FIRST,
        "fill": fill if isinstance(fill, list) else [fill] * 3,
        "threshold": None if model.novelty is None else float(model.novelty.threshold),
    }
    write_json(page / "model.json", facts)
    here = Path(__file__).parent
    scripts = "".join(f'<script src="{name}"></script>\n' for name in (RUNTIME[0], "browser.js"))
    html = (here / "page.html").read_text(encoding="utf-8")
    write_text(page / "index.html", html.replace("</html>", f"{scripts}</html>"))
    for file in (here / "browser.js", *(runtime / name for name in RUNTIME)):
        shutil.copyfile(file, page / file.name)


def _write_onnx(module: nn.Module, example: Tensor, path: Path, input_name: str, output_names: list[str]) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        problem = "ONNX files need the packages onnx and onnxscript"
        raise UsageError(f"{problem}; run {install_command('onnx')}") from error
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                (example,),
                str(path),
                input_names=[input_name],
                output_names=output_names,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except (RuntimeError, ValueError, TypeError) as error:
        flag = {TRAINED: "--onnx and --onnx-encoder", TOWER: "--onnx-encoder"}.get(path.name, "--page")
        problem = f"{path.name} cannot be written for this model ({first_line(error)})"
        raise DuplexError(f"{problem}; omit {flag}") from error
    finally:
        logging.disable(before)
