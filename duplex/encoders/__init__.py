"""Frozen backbones: an image tower and a text tower behind one small interface.

    encoder = load_encoder("ViT-L-14-quickgelu", "openai", towers="image", device="cuda", precision="bf16")
    features = encoder.encode_images(torch.stack([encoder.image_transform(picture) for picture in pictures]))

Another kind of backbone joins by offering what `Encoder` lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from duplex.errors import UsageError, require
from duplex.system.precision import PRECISIONS

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from duplex.encoders.source import EncoderSource

Towers = Literal["both", "image", "text"]
PACKAGED = "tiny"  # the encoder that ships with the package
TOWERS: tuple[Towers, ...] = ("both", "image", "text")


class Encoder(Protocol):
    """What the cache, the trained network and the command line need of a backbone."""

    name: str
    dim: int
    device: Any
    identity: dict[str, str]
    logit_scale: float

    def image_transform(self, picture: Image.Image) -> Tensor:
        """An RGB picture as the pixels the image tower takes: [3, R, R] uint8."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        """[B, 3, R, R] -> [B, d] float32, not normalised."""

    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, R, R] -> the same features, and one token a patch [B, T, w], float32."""

    @property
    def patches(self) -> tuple[int, int]:
        """Shape of one picture's patch tokens (T, w)."""

    @property
    def text(self) -> Any:
        """The text tower; None for a backbone that only sees."""


def load_encoder(
    name: str,
    weights: str | None = None,
    *,
    towers: str = "both",
    device: str = "cpu",
    precision: str = "fp32",
) -> Encoder:
    """Load a frozen encoder by name. `precision` is that of the towers asked for; the other one is dropped as soon as
    the weights are read. Nothing ever falls back to random weights."""
    from duplex.encoders.blip import BLIP, BlipEncoder
    from duplex.encoders.clip import ClipEncoder
    from duplex.encoders.images import TIMM, ImageEncoder

    require(towers, TOWERS, "towers")
    require(precision, PRECISIONS, "precision")
    others: dict[str, Any] = {TIMM: ImageEncoder, BLIP: BlipEncoder}
    kind = others.get(name.partition(":")[0] + ":", ClipEncoder)
    encoder: Encoder = kind(_source(name, weights), towers=towers, device=resolve_device(device), precision=precision)
    return encoder


def _source(name: str, weights: str | None) -> EncoderSource:
    from duplex.encoders.blip import BLIP, blip_source
    from duplex.encoders.images import TIMM, timm_source
    from duplex.encoders.source import find_source

    if name.startswith(BLIP):
        return blip_source(name)
    return timm_source(name, weights) if name.startswith(TIMM) else find_source(name, weights)


def encoder_identity(name: str, weights: str | None = None, *, precision: str = "fp32") -> dict[str, str]:
    """`load_encoder(...).identity` without building the encoder."""
    return _source(name, weights).identity(require(precision, PRECISIONS, "precision"))


def unknown_words(name: str, texts: Iterable[str]) -> list[str]:
    """The words that an encoder cannot be asked about. Only the packaged one has any: it knows the drawn benchmark."""
    from duplex.encoders.tiny import unknown_words as unknown_to_tiny

    return unknown_to_tiny(texts) if name == PACKAGED else []


def resolve_device(device: str) -> str:
    """`auto` is the GPU where there is one."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device is {device}, but torch sees no GPU; set it to auto or cpu")
    return device
