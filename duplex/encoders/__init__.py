"""Frozen backbones: an image tower and a text tower behind one small interface.

    encoder = load_encoder("ViT-L-14-quickgelu", "openai", towers="image", device="cuda", precision="bf16")
    features = encoder.encode_images(torch.stack([encoder.image_transform(image) for image in images]))

Other backbones are added as an encoder family (`duplex.encoders.families`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from duplex.encoders.families import EncoderFamily, MissingWeights, family_code, find_family
from duplex.errors import UsageError, require
from duplex.system.precision import PRECISIONS

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from duplex.encoders.encoder_source import EncoderSource

warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm in notebooks; no bar here needs its widget
PACKAGED = "tiny"  # the encoder that ships with the package
TOWERS = ("both", "image", "text")


@dataclass(frozen=True)
class EncoderIdentity:
    """Everything that an encoder's features depend on (name, weights, precision, …); each feature cache stores it."""

    encoder: str  # name
    architecture: str  # hash of the architecture's options
    weights: str  # sha256 of the weights file; `random:SEED` of random weights
    preprocessing: str  # JSON
    precision: str
    dim: int  # width of the features
    torch: str  # versions of the libraries that decide a feature's last bits
    open_clip_torch: str
    pillow: str
    code: str | None = None  # hash of the code of a family outside of this package

    def to_dict(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, record: Mapping[str, str]) -> EncoderIdentity:
        """The encoder identity stored in the dict `record` by `to_dict`; other keys of the dict are ignored."""
        values = {field.name: record[field.name] for field in fields(cls) if field.name not in ("dim", "code")}
        return cls(**values, dim=int(record["dim"]), code=record.get("code"))


class Encoder(Protocol):
    """Interface of a frozen encoder, used by feature caches, methods and the command line."""

    name: str
    dim: int  # d, the width of image and text features
    device: Any  # torch.device of the towers
    identity: EncoderIdentity
    logit_scale: float  # ln(1/τ) of the pretrained model

    def image_transform(self, image: Image.Image) -> Tensor:
        """An RGB image as the pixels that the image tower takes: [3, R, R] uint8."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        """The features [B, d] of images given as pixels [B, 3, R, R]: float32, not L2-normalised."""

    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The features [B, d] and patch tokens [B, T, w], float32, of images given as pixels [B, 3, R, R]."""

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Number and width (T, w) of one image's patch tokens."""

    @property
    def text(self) -> Any:
        """The encoder's `TextTower`; None for a backbone without a text tower."""


def load_encoder(
    name: str,
    weights: str | None = None,
    *,
    towers: str = "both",
    device: str = "cpu",
    precision: str = "fp32",
) -> Encoder:
    """Load a frozen encoder.

    Args:
        name: an architecture of open_clip, `tiny`, or `FAMILY:REST` (see `duplex encoders list`).
        weights: a published tag or a file, or `random:SEED` to try an architecture; missing weights raise an error and
            are never replaced by random ones.
        towers: "image" or "text" drops the other tower as soon as the weights are read.
        device: cpu, cuda or cuda:NUMBER.
        precision: number format of the loaded towers: "fp32", "tf32", "bf16" or "fp16".
    """
    require(towers, TOWERS, "towers")
    require(precision, PRECISIONS, "precision")
    family, source = _find(name, weights)
    return family.load(source, towers=towers, device=resolve_device(device), precision=precision)


def encoder_identity(name: str, weights: str | None = None, *, precision: str = "fp32") -> EncoderIdentity:
    """An encoder's `EncoderIdentity`, without building the encoder."""
    require(precision, PRECISIONS, "precision")
    return _find(name, weights)[1].identity(precision)


def _find(name: str, weights: str | None) -> tuple[EncoderFamily, EncoderSource]:
    family, code = find_family(name), family_code(name)
    source = family.find(name, weights)
    return family, source if code is None else replace(source, code=code)


def missing_weights(name: str, weights: str | None = None) -> MissingWeights | None:
    """The weights that loading an encoder would download; None if all are on disk. Nothing is downloaded."""
    return find_family(name).missing_weights(name, weights)


def unknown_words(name: str, texts: Iterable[str]) -> list[str]:
    """The distinct words in `texts` that an encoder's text tower has no embedding for."""
    return find_family(name).unknown_words(texts)


def resolve_device(device: str) -> str:
    """`device`, with "auto" replaced by "cuda" where there is a GPU and "cpu" elsewhere."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, index = torch.device(str(device)).type, torch.device(str(device)).index or 0
    except RuntimeError:
        kind, index = "meta", 0
    if kind == "meta":  # tensors without values
        raise UsageError(f"device is {device!r}; expected auto, cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device is {device}, but torch sees no GPU; set it to auto or cpu")
    if kind == "cuda" and index and index >= (count := torch.cuda.device_count()):
        raise UsageError(f"device is {device}, but torch sees {count} GPUs, numbered from 0; name one of them or auto")
    return str(device)
