"""Backbones that see and do not read: any classifier of timm, without its head, as a frozen encoder of images.

    encoder: {name: "timm:resnet18", weights: a1_in1k}     # a tag that timm publishes, or a file of weights

ResNet-18 is the backbone of the methods without CLIP. There is no text tower: word vectors come from a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from duplex.encoders.arithmetic import arithmetic
from duplex.encoders.clip import PictureTransform
from duplex.encoders.hub import fetch
from duplex.encoders.openclip import LOADING, load_state_dict
from duplex.encoders.source import EncoderSource, complete_preprocess
from duplex.errors import DuplexError, UsageError
from duplex.system.precision import dtype_of

TIMM = "timm:"


def timm_source(name: str, weights: str | None) -> EncoderSource:
    """`timm:MODEL` with `weights`: a tag, or a file. Pictures are resized and cropped to the model's size."""
    import timm

    model = name.removeprefix(TIMM)
    if not timm.is_model(model):
        raise UsageError(f"unknown encoder {name!r}: timm has no model {model!r}")
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{model}.*") if _on_hub(known)]
    if weights is None:
        raise UsageError(f"encoder {name!r} needs weights: a file, or one of its tags ({', '.join(tags) or 'none'})")
    path = Path(weights).expanduser()
    if not path.is_file() and weights not in tags:
        raise UsageError(f"weights {weights!r} are neither a file nor a tag of {name!r} ({', '.join(tags) or 'none'})")
    config: Any = timm.get_pretrained_cfg(model if path.is_file() else f"{model}.{weights}")
    size = config.input_size[-1]
    given = {"mean": list(config.mean), "std": list(config.std), "interpolation": config.interpolation}
    architecture = {"timm_model_name": model, "embed_dim": _width(model), "vision_cfg": {"image_size": size}}
    if not path.is_file():
        path = fetch({"hf_hub": f"{config.hf_hub_id}/model.safetensors"}, f"{name} + {weights}")
    return EncoderSource(name, architecture, complete_preprocess(given, architecture), path)


def _on_hub(known: str) -> bool:
    """Some published weights lie elsewhere, as pickles."""
    import timm

    found: Any = timm.get_pretrained_cfg(known)
    return found is not None and bool(found.hf_hub_id)


def _width(model: str) -> int:
    """Of its pooled features; counted without making its weights."""
    import timm

    with torch.device("meta"):
        made: Any = timm.create_model(model, pretrained=False, num_classes=0)
        return int(made.num_features)


class ImageEncoder:
    """A classifier of timm, frozen, without its head."""

    logit_scale = 0.0
    text = None

    def __init__(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> None:
        self.name, self.dim, self.identity = source.name, source.dim, source.identity(precision)
        self.device, self._precision = torch.device(device), precision
        self.image_transform = PictureTransform(source.preprocess)
        self._visual: Any = None
        if towers != "text":
            self._visual = _build(source).to(self.device, dtype_of(precision))
            mean, std = (torch.tensor(source.preprocess[key], device=self.device) for key in ("mean", "std"))
            self._mean, self._std = mean.view(3, 1, 1), std.view(3, 1, 1)

    @property
    def visual(self) -> Any:
        if self._visual is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its image tower; load it with towers='both'")
        return self._visual

    def encode_images(self, pixels: Tensor) -> Tensor:
        """[B, 3, R, R] uint8 -> [B, d] float32, not normalised."""
        return self.encode_patches(pixels)[0]

    @torch.inference_mode()
    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The same features, and the cells of the last feature map [B, T, w], float32."""
        dtype = next(self.visual.parameters()).dtype
        x = pixels.to(self.device).float().div_(255).sub_(self._mean).div_(self._std).to(dtype)
        with arithmetic(self._precision):
            cells = self.visual.forward_features(x)
            features = self.visual.forward_head(cells)
        cells = cells.flatten(2).transpose(1, 2) if cells.ndim == 4 else cells  # [B, w, H, W]
        return features.float(), cells.float()

    @property
    def patches(self) -> tuple[int, int]:
        """(T, w) of one picture's cells."""
        size = self.image_transform(Image.new("RGB", (8, 8))).shape
        tokens = self.encode_patches(torch.zeros((1, *size), dtype=torch.uint8))[1]
        return int(tokens.shape[1]), int(tokens.shape[2])


def _build(source: EncoderSource) -> Any:
    """The model with its file's weights: all of them, but for the classifier's own."""
    import timm

    model: Any = timm.create_model(source.architecture["timm_model_name"], pretrained=False, num_classes=0)
    try:
        state = load_state_dict(str(source.weights))
    except LOADING as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise DuplexError(f"{source.weights} cannot be read as weights: {reason}") from error
    classifier = str(model.default_cfg.get("classifier", "fc"))
    kept = {name: tensor for name, tensor in state.items() if name.partition(".")[0] != classifier}
    odd = sorted(set(kept) ^ set(model.state_dict()))
    if odd:
        verb = "lacks" if odd[0] in model.state_dict() else "holds a strange"
        raise DuplexError(f"{source.weights} {verb} {odd[0]!r}: it does not hold the weights of {source.name!r}")
    model.load_state_dict(kept)
    return model.eval().requires_grad_(False)
