"""CLIP models of open_clip as frozen encoders."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from duplex.encoders import PACKAGED
from duplex.encoders.arithmetic import arithmetic
from duplex.encoders.openclip import LOADING, PreprocessCfg, image_transform_v2, open_clip, transforms
from duplex.encoders.source import EncoderSource, model_arguments, model_class
from duplex.errors import DuplexError
from duplex.system.precision import dtype_of

LAST_STEPS = ["MaybeConvertMode", "MaybeToTensor", "Normalize"]
LONGEST = 50  # aspect ratio up to which the whole picture is resized; beyond it only the middle can reach the crop


class PictureTransform:
    """RGB picture -> [3, R, R] uint8: open_clip's own resize and crop, stopped before normalisation, so that workers
    hand over a quarter of the bytes. Normalisation is the encoder's first step."""

    def __init__(self, preprocess: dict[str, Any]) -> None:
        steps = image_transform_v2(PreprocessCfg(**preprocess), is_train=False).transforms
        if [type(step).__name__ for step in steps[-3:]] != LAST_STEPS:
            raise DuplexError(
                f"open_clip {open_clip.__version__} prepares pictures otherwise; install a version below 4"
            )
        self.steps = transforms.Compose([*steps[:-3], transforms.PILToTensor()])
        self.shortest = preprocess["resize_mode"] == "shortest"

    def __call__(self, picture: Image.Image) -> Tensor:
        """The centre crop sees only the middle of a very long picture; resizing all of a 20,000 x 1 strip would take
        gigabytes for pixels that are thrown away."""
        width, height = picture.size
        if self.shortest and max(width, height) > LONGEST * min(width, height):
            keep = LONGEST * min(width, height)
            left, top = max(0, width - keep) // 2, max(0, height - keep) // 2
            picture = picture.crop((left, top, width - left, height - top))
        found: Tensor = self.steps(picture)
        return found


class ClipEncoder:
    """An open_clip model, frozen: `encode_images` for the cache, `text` for what is trained."""

    def __init__(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> None:
        self.name = source.name
        self.dim = source.dim
        self.identity = source.identity(precision)
        self.device, self._precision = torch.device(device), precision
        self.image_transform = PictureTransform(source.preprocess)
        model = build_model(source)
        self.logit_scale = float(model.logit_scale.item())
        self._visual: Any = None
        self._text: Any = None
        if towers != "text":
            self._visual = model.visual.to(self.device, dtype_of(precision))
            mean, std = (torch.tensor(source.preprocess[key], device=self.device) for key in ("mean", "std"))
            self._mean, self._std = mean.view(3, 1, 1), std.view(3, 1, 1)
            self._dtype = dtype_of(precision)
        if towers != "image":
            self._text = _text_tower(model, source, self.device, precision)

    @property
    def visual(self) -> Any:
        if self._visual is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its image tower; load it with towers='both'")
        return self._visual

    @property
    def text(self) -> Any:
        if self._text is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its text tower; load it with towers='both'")
        return self._text

    @torch.inference_mode()
    def encode_images(self, pixels: Tensor) -> Tensor:
        """[B, 3, R, R] uint8 -> [B, d] float32, not normalised."""
        with arithmetic(self._precision):
            found = self.visual(self._normalised(pixels))
        pooled: Tensor = found[0] if isinstance(found, tuple) else found  # CoCa gives its tokens as well
        return pooled.float()

    @torch.inference_mode()
    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, R, R] uint8 -> features [B, d] and the last block's patch tokens [B, T, w], float32. Tokens of a
        convolutional tower are the cells of its last feature map."""
        if hasattr(self.visual, "trunk"):
            with arithmetic(self._precision):
                cells = self.visual.trunk.forward_features(self._normalised(pixels))
                features = self.visual.head(self.visual.trunk.forward_head(cells))
            if cells.ndim == 4:  # [B, w, H, W]
                cells = cells.flatten(2).transpose(1, 2)
            return features.float(), cells.float()
        if not hasattr(self.visual, "forward_intermediates") or not hasattr(self.visual, "ln_post"):
            raise DuplexError(f"encoder {self.name!r} has no patch tokens; extract with --tokens none")
        with arithmetic(self._precision):
            found = self.visual.forward_intermediates(
                self._normalised(pixels), indices=1, normalize_intermediates=True, output_fmt="NLC"
            )
        return found["image_features"].float(), found["image_intermediates"][-1].float()

    @property
    def patches(self) -> tuple[int, int]:
        """(T, w) of one picture's patch tokens, seen on a blank picture."""
        size = self.image_transform(Image.new("RGB", (8, 8))).shape
        tokens = self.encode_patches(torch.zeros((1, *size), dtype=torch.uint8, device=self.device))[1]
        return int(tokens.shape[1]), int(tokens.shape[2])

    def _normalised(self, pixels: Tensor) -> Tensor:
        """The arithmetic of open_clip's ToTensor and Normalize, on the encoder's device."""
        return pixels.to(self.device).float().div_(255).sub_(self._mean).div_(self._std).to(self._dtype)


def build_model(source: EncoderSource) -> Any:
    """Build open_clip's model and load its weights: all of them or an error."""
    kind, config = model_class(source.architecture), model_arguments(source.architecture)
    _check_config(kind, config, source)
    model = kind(**config)
    if source.name == PACKAGED:
        from duplex.encoders.packaged import read_weights

        model.load_state_dict(read_weights(source.weights, model.state_dict()))
    else:
        _load_weights(model, source)
    return model.eval().requires_grad_(False)


def _check_config(kind: Any, config: dict[str, Any], source: EncoderSource) -> None:
    unknown = sorted(set(config) - set(inspect.signature(kind).parameters))
    if unknown:
        raise DuplexError(f"{source.name}: {unknown[0]!r} is no key of open_clip's {kind.__name__}")


def _load_weights(model: Any, source: EncoderSource) -> None:
    try:
        open_clip.load_checkpoint(model, str(source.weights), weights_only=True)
    except LOADING as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise DuplexError(f"{source.weights} does not hold the weights of {source.name!r}: {reason}") from error


def _text_tower(model: Any, source: EncoderSource, device: torch.device, precision: str) -> Any:
    """The text half alone: without `visual` the image half's memory is free."""
    from duplex.encoders.text import TextTower

    model.visual = None
    return TextTower(model.to(device), _tokenizer(source), precision=precision)


def _tokenizer(source: EncoderSource) -> Any:
    """None stands for CLIP's own."""
    if source.name == PACKAGED:
        return None
    if source.folder is not None:
        return open_clip.get_tokenizer(f"local-dir:{source.folder}")
    return open_clip.get_tokenizer(source.name)
