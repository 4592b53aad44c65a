"""Where an encoder comes from: its architecture, its preprocessing and the file that holds its weights.

Everything about an encoder that can be known without building it: what a cache made by it must carry.
"""

from __future__ import annotations

import copy
import hashlib
import json
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from duplex.encoders import PACKAGED
from duplex.encoders.hub import WEIGHTS, address, fetch, fetch_from_hub, hub_file_on_disk, place_on_disk
from duplex.encoders.openclip import PreprocessCfg, merge_preprocess_dict, open_clip
from duplex.errors import DuplexError, UsageError
from duplex.system.files import sha256

LOCAL, HUB = "local-dir:", "hf-hub:"
OTHERS = ("timm:", "blip:")  # of other libraries (`duplex.encoders.images`, `duplex.encoders.blip`)
CONFIG = "open_clip_config.json"
USUAL = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")  # names of weights files
SUFFIXES = (".safetensors", ".bin", ".pth")
LIBRARIES = ("torch", "open_clip_torch", "pillow")  # what decides the last bits of a feature
Config = dict[str, Any]


@dataclass(frozen=True)
class EncoderSource:
    """An encoder that can be built: its name, open_clip's `model_cfg`, the preprocessing and the weights file."""

    name: str
    architecture: Config
    preprocess: Config
    weights: Path
    folder: Path | None = None  # of a `local-dir:`, whose tokenizer may lie beside the weights

    @property
    def dim(self) -> int:
        return int(self.architecture["embed_dim"])

    def identity(self, precision: str) -> dict[str, str]:
        """What a cache made by this encoder must carry. Cheap to repeat: the weights file is hashed once."""
        stat = self.weights.stat()
        return {
            "encoder": self.name,
            "architecture": hashlib.sha256(_stable(self.architecture).encode()).hexdigest()[:16],
            "weights": _sha256(self.weights, stat.st_size, stat.st_mtime_ns),
            "preprocessing": _stable(self.preprocess),
            "precision": precision,
            "dim": str(self.dim),
            **{library: _version(library) for library in LIBRARIES},
        }


def find_source(name: str, weights: str | None = None) -> EncoderSource:
    """Find an encoder by name: `tiny`, `local-dir:FOLDER`, `hf-hub:OWNER/MODEL`, or an architecture of open_clip with
    `weights` (a tag to download, or a file). Nothing falls back to random weights."""
    if name == PACKAGED:
        return _packaged_source()
    if name.startswith(LOCAL):
        return _folder_source(Path(name.removeprefix(LOCAL)).expanduser())
    if name.startswith(HUB):
        return _hub_source(name)
    architecture = open_clip.get_model_config(name)
    if architecture is None:
        raise UsageError(f"unknown encoder {name!r}; `duplex encoders list` shows the names")
    if weights is None:
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none published"
        raise UsageError(f"encoder {name!r} needs weights: a file, or one of its tags ({tags})")
    if Path(weights).expanduser().is_file():
        return _file_source(name, architecture, Path(weights).expanduser())
    return _tag_source(name, architecture, weights)


@dataclass(frozen=True)
class Absent:
    """Published weights that are not on this disk."""

    address: str  # where they would be fetched from
    size: int | None  # bytes, about


def absent_weights(name: str, weights: str | None = None) -> Absent | None:
    """What using an encoder would have to fetch; None where it is all here. Nothing is fetched to answer. Of backbones
    that are not open_clip's nothing is known before they are loaded."""
    if name.startswith(OTHERS):
        return None
    if name.startswith(HUB):
        owner = name.removeprefix(HUB)
        here = hub_file_on_disk(owner, (CONFIG,)) and hub_file_on_disk(owner, WEIGHTS)
        return None if here else Absent(f"https://huggingface.co/{owner}", None)
    architecture = None if name == PACKAGED or name.startswith(LOCAL) else open_clip.get_model_config(name)
    if architecture is None or weights is None or Path(weights).expanduser().is_file():
        find_source(name, weights)  # what is wrong with it is told here
        return None
    preprocess_of(name, architecture, weights)
    published = open_clip.get_pretrained_cfg(name, weights)
    return None if place_on_disk(published) else Absent(address(published), _size(architecture))


def _size(architecture: Config) -> int:
    """Bytes of an architecture's weights, as float32; its towers are counted without being made."""
    with torch.device("meta"):
        model = model_class(architecture)(**model_arguments(architecture))
    found: int = 4 * sum(parameter.numel() for parameter in model.parameters())
    return found


def model_class(architecture: Config) -> Any:
    """open_clip's class for an architecture."""
    if not (architecture.get("custom_text", False) or "hf_model_name" in architecture["text_cfg"]):
        return open_clip.CLIP
    return open_clip.CoCa if "multimodal_cfg" in architecture else open_clip.CustomTextCLIP


def model_arguments(architecture: Config) -> Config:
    """What that class is made with; nothing is fetched on the way."""
    config = copy.deepcopy(architecture)
    config.pop("custom_text", None)
    if "timm_model_name" in config["vision_cfg"]:
        config["vision_cfg"]["timm_model_pretrained"] = False  # the weights come from the one file
    if "hf_model_name" in config["text_cfg"]:
        config["text_cfg"]["hf_model_pretrained"] = False
    return config


def preprocess_of(name: str, architecture: Config, tag: str) -> Config:
    """The preprocessing that published weights were trained with; an activation that they were not is an error."""
    published = open_clip.get_pretrained_cfg(name, tag)
    if not published:
        known = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none published"
        raise UsageError(f"weights {tag!r} are neither a file nor a tag of encoder {name!r} (its tags: {known})")
    quick = bool(published.get("quick_gelu", False))
    if quick != bool(architecture.get("quick_gelu", False)) and not _other_activation(architecture):
        other = f"{name}-quickgelu" if quick else name.removesuffix("-quickgelu")
        raise UsageError(f"weights {tag!r} were trained with {'Quick' if quick else ''}GELU: use the encoder {other!r}")
    return complete_preprocess(published, architecture)


def complete_preprocess(given: Config, architecture: Config) -> Config:
    """All fields of the preprocessing, at the size that the architecture takes."""
    size = architecture["vision_cfg"].get("image_size", 224)
    found: Config = json.loads(json.dumps(merge_preprocess_dict({**vars(PreprocessCfg())}, {**given, "size": size})))
    return found


def find_packaged() -> Path:
    return Path(str(resources.files("duplex.encoders") / PACKAGED))


def is_torchscript(path: Path) -> bool:
    """OpenAI published its weights as TorchScript archives, which hold code; torch will not load them as weights."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _packaged_source() -> EncoderSource:
    folder = find_packaged()
    config = _read_config(folder / "model.json", ("architecture", "preprocess"))
    preprocess = complete_preprocess(config["preprocess"], config["architecture"])
    return EncoderSource(PACKAGED, config["architecture"], preprocess, _present(folder / "weights.safetensors"))


def _folder_source(folder: Path) -> EncoderSource:
    config = _read_config(folder / CONFIG, ("model_cfg", "preprocess_cfg"))
    weights = _weights_in(folder)
    if weights is None:
        raise DuplexError(f"{folder} holds no weights; put open_clip_model.safetensors beside {CONFIG}")
    architecture = config["model_cfg"]
    _require(folder / CONFIG, architecture, ("embed_dim", "vision_cfg", "text_cfg"))
    name = LOCAL + hashlib.sha256(_stable(architecture).encode()).hexdigest()[:12]  # a folder may be moved
    preprocess = complete_preprocess(config["preprocess_cfg"], architecture)
    return EncoderSource(name, architecture, preprocess, weights, folder)


def _weights_in(folder: Path) -> Path | None:
    """The file that is called as weights usually are, else the first by name; safetensors before what holds pickles."""
    found = sorted(
        (path for path in folder.iterdir() if path.suffix in SUFFIXES),
        key=lambda path: (path.stem not in USUAL, SUFFIXES.index(path.suffix), path.stem != USUAL[0], path.name),
    )
    return found[0] if found else None


def _hub_source(name: str) -> EncoderSource:
    owner = name.removeprefix(HUB)
    config_file = fetch_from_hub(owner, (CONFIG,), name)
    weights = fetch_from_hub(owner, WEIGHTS, name)
    config = _read_config(config_file, ("model_cfg", "preprocess_cfg"))
    preprocess = complete_preprocess(config["preprocess_cfg"], config["model_cfg"])
    return EncoderSource(name, config["model_cfg"], preprocess, weights)


def _tag_source(name: str, architecture: Config, tag: str) -> EncoderSource:
    preprocess = preprocess_of(name, architecture, tag)
    path = fetch(open_clip.get_pretrained_cfg(name, tag), f"{name} + {tag}")
    return EncoderSource(name, architecture, preprocess, path)


def _file_source(name: str, architecture: Config, path: Path) -> EncoderSource:
    """A bare file says nothing about preprocessing. It is taken from the published weights of the architecture where
    they all agree; where they do not, guessing would make features that are quietly wrong."""
    if is_torchscript(path):
        raise DuplexError(f"{path} is a TorchScript archive; {_convert_hint(name, path)}")
    agreed = {}
    for tag in open_clip.list_pretrained_tags_by_model(name):
        try:
            candidate = preprocess_of(name, architecture, tag)
        except UsageError:
            continue
        agreed[_stable(candidate)] = candidate
    if len(agreed) != 1:
        raise UsageError(f"{path} does not say how pictures are prepared for {name!r}; {_convert_hint(name, path)}")
    return EncoderSource(name, architecture, next(iter(agreed.values())), path)


def _convert_hint(name: str, path: Path) -> str:
    return f"`duplex encoders convert {path} FOLDER --encoder {name} --tag TAG` makes a folder that does"


def _other_activation(architecture: Config) -> bool:
    """Towers of timm bring their own activation: open_clip's switch does not reach them."""
    return "timm_model_name" in architecture["vision_cfg"]


def _read_config(path: Path, keys: tuple[str, ...]) -> Config:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist; an encoder's folder needs it") from error
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise DuplexError(f"{path} cannot be read: {error}") from error
    _require(path, config, keys)
    return dict(config)


def _require(path: Path, config: Any, keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if not isinstance(config, dict) or key not in config]
    if missing:
        raise DuplexError(f"{path} lacks the key {missing[0]!r}, without which the encoder is a guess")


def _present(path: Path) -> Path:
    if not path.is_file():
        raise DuplexError(f"{path} does not exist; the encoder's weights are missing and never made up")
    return path


def _stable(config: Config) -> str:
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"


@lru_cache(maxsize=64)
def _sha256(path: Path, size: int, modified: int) -> str:
    """Hash a file; its size and time are part of the key so that a replaced file is hashed again."""
    return sha256(path)
