"""The files and options that an encoder is built from: architecture, preprocessing and weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from duplex.encoders import EncoderIdentity
from duplex.encoders.openclip import PreprocessCfg, load_state_dict, merge_preprocess_dict
from duplex.errors import DuplexError, UsageError
from duplex.system.files import sha256_once

Config = dict[str, Any]


@dataclass(frozen=True)
class EncoderSource:
    """The architecture, preprocessing and weights file from which an encoder is built.

    Raises DuplexError if the weights file does not exist.
    """

    name: str
    architecture: Config  # with "embed_dim" and "vision_cfg", as in open_clip's model_cfg
    preprocess: Config  # all fields of open_clip's PreprocessCfg
    weights: Path
    folder: Path | None = None  # with the tokenizer's files, where it has its own
    seed: int | None = None  # of random weights, in place of the file
    code: str | None = None  # hash of the family's code; None: of this package

    def __post_init__(self) -> None:
        if self.seed is None and not self.weights.is_file():
            raise DuplexError(f"{self.weights} does not exist; expected the file of the encoder's weights")

    @property
    def dim(self) -> int:
        return int(self.architecture["embed_dim"])

    def identity(self, precision: str) -> EncoderIdentity:
        """This encoder's `EncoderIdentity` at a precision, such as "bf16".

        The weights file is hashed once per process.
        """
        return EncoderIdentity(
            encoder=self.name,
            architecture=config_hash(self.architecture, 16),
            weights=sha256_once(self.weights) if self.seed is None else f"random:{self.seed}",
            preprocessing=stable_json({**self.preprocess, "orientation": "exif"}),  # see `data.image_files`
            precision=precision,
            dim=self.dim,
            torch=_version("torch"),
            open_clip_torch=_version("open_clip_torch"),
            pillow=_version("pillow"),
            code=self.code,
        )


def complete_preprocess(options: Config, architecture: Config) -> Config:
    """open_clip's preprocessing options, with defaults for missing ones and the architecture's image size."""
    size = architecture["vision_cfg"].get("image_size", 224)
    merged: Config = json.loads(json.dumps(merge_preprocess_dict({**vars(PreprocessCfg())}, {**options, "size": size})))
    return merged


def read_config(path: Path, keys: tuple[str, ...] = ()) -> Config:
    """Read a JSON file of an encoder's folder; raises DuplexError if it lacks one of `keys`."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist; the folder of an encoder needs it") from error
    except (ValueError, OSError) as error:
        raise DuplexError(f"{path} cannot be read: {error}") from error
    require_keys(path, config, keys)
    return dict(config)


def require_keys(path: Path, config: Any, keys: tuple[str, ...]) -> None:
    """Raise DuplexError if `config`, the content of the JSON file `path`, lacks one of `keys`."""
    missing = [key for key in keys if not isinstance(config, dict) or key not in config]
    if missing:
        raise DuplexError(f"{path} lacks the key {missing[0]!r}; an encoder cannot be built without it")


def refuse_other_weights(name: str, weights: str | None, own: str | None = None) -> None:
    """Raise UsageError if weights are named for an encoder whose weights are fixed.

    Args:
        weights: as the user named them; allowed are None and `own`, the tag of the encoder's weights.
    """
    if weights not in (None, own):
        raise UsageError(f"encoder {name!r} has its own weights; leave the weights {weights!r} out")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file by name; raises DuplexError if the file cannot be read as weights."""
    try:
        state: dict[str, Tensor] = load_state_dict(str(path))
    except Exception as error:  # torch, safetensors, pickle and zip raise almost anything for other files
        raise DuplexError(f"{path} cannot be read as weights: {first_line(error)}") from error
    return state


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; without a message, the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def stable_json(config: Config) -> str:
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def config_hash(config: Config, digits: int) -> str:
    return hashlib.sha256(stable_json(config).encode()).hexdigest()[:digits]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"
