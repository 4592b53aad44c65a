"""The base class of encoders: image transform, normalisation of pixels, and access to the image and text towers."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from duplex.encoders.encoder_source import EncoderSource
from duplex.encoders.openclip import PreprocessCfg, image_transform_v2, open_clip, transforms
from duplex.errors import DuplexError, UsageError, shown
from duplex.system.precision import dtype_of

LAST_STEPS = ["MaybeConvertMode", "MaybeToTensor", "Normalize"]
MAX_ASPECT = 50  # longer images are cropped before they are resized; only their middle can reach the centre crop


class ImageTransform:
    """Function from an RGB image to pixels [3, R, R] uint8, with open_clip's resize and crop.

    As uint8, pixels take a quarter of float32's bytes between processes; `FrozenEncoder.normalise` normalises them.
    """

    def __init__(self, preprocess: dict[str, Any]) -> None:
        steps = image_transform_v2(PreprocessCfg(**preprocess), is_train=False).transforms
        if [type(step).__name__ for step in steps[-3:]] != LAST_STEPS:
            raise DuplexError(
                f"open_clip {open_clip.__version__} prepares images in unknown steps; install a version below 4"
            )
        self.steps = transforms.Compose([*steps[:-3], transforms.PILToTensor()])
        self.shortest = preprocess["resize_mode"] == "shortest"

    def __call__(self, image: Image.Image) -> Tensor:
        width, height = image.size
        if self.shortest and max(width, height) > MAX_ASPECT * min(width, height):
            # Resizing a strip of 20,000 x 1 whole would take gigabytes for pixels that the crop throws away.
            keep = MAX_ASPECT * min(width, height)
            left, top = max(0, width - keep) // 2, max(0, height - keep) // 2
            image = image.crop((left, top, width - left, height - top))
        pixels: Tensor = self.steps(image)
        return pixels


class FrozenEncoder:
    """Base class of encoders: the interface `duplex.encoders.Encoder` without a model.

    Subclasses build the model, set `_visual` and `_text` to the requested towers (None for the others), and
    implement `encode_patches`.
    """

    logit_scale = 0.0

    def __init__(self, source: EncoderSource, *, device: str, precision: str) -> None:
        self.name = source.name
        self.dim = source.dim
        self.identity = source.identity(precision)
        self.device = torch.device(device)
        self.precision = precision
        self.dtype = dtype_of(precision)
        self.image_transform = ImageTransform(source.preprocess)
        size = source.preprocess["size"]
        self._pixel_shape = (3, size, size) if isinstance(size, int) else (3, *size)  # of one image
        self._visual: Any = None
        self._text: Any = None
        self._mean = torch.tensor(source.preprocess["mean"], device=self.device).view(3, 1, 1)
        self._std = torch.tensor(source.preprocess["std"], device=self.device).view(3, 1, 1)

    @property
    def visual(self) -> Any:
        """The image tower; raises DuplexError if it was not loaded."""
        if self._visual is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its image tower; load it with towers='both'")
        return self._visual

    @property
    def text(self) -> Any:
        """The text tower; raises DuplexError if it was not loaded."""
        if self._text is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its text tower; load it with towers='both'")
        return self._text

    def encode_images(self, pixels: Tensor) -> Tensor:
        """The features [B, d] of images given as uint8 pixels [B, 3, R, R]: float32, not L2-normalised."""
        return self.encode_patches(pixels)[0]

    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The features [B, d] and the last layer's patch tokens [B, T, w] of images, both float32.

        Args:
            pixels: [B, 3, R, R] uint8.
        """
        raise NotImplementedError

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Number and width (T, w) of one image's patch tokens, found by encoding a blank image."""
        _, count, width = self.encode_patches(self.image_transform(Image.new("RGB", (8, 8)))[None])[1].shape
        return count, width

    def normalise(self, pixels: Tensor) -> Tensor:
        """Uint8 pixels as the image tower's input, computed like open_clip's ToTensor and Normalize.

        Raise `UsageError` for pixels of another type or shape than `image_transform` returns.
        """
        is_tensor = isinstance(pixels, Tensor)
        if not is_tensor or pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1:] != self._pixel_shape:
            found = f"{list(pixels.shape)} {pixels.dtype}".replace("torch.", "") if is_tensor else shown(pixels)
            expected = f"[B, {', '.join(map(str, self._pixel_shape))}] uint8"
            raise UsageError(
                f"pixels are {found}; encoder {self.name!r} expects {expected}, as its `image_transform` returns"
            )
        return pixels.to(self.device).float().div_(255).sub_(self._mean).div_(self._std).to(self.dtype)
