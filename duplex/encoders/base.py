"""Frozen encoders: an image tower and a text tower behind one small interface, found by name.

A name `FAMILY:REST` (`timm:resnet18`) or `FAMILY` (`tiny`) selects a family, an entry point in the
group `duplex.encoders`; all other names belong to the family `clip`. `joined:A + B` is several
encoders in one (`joined.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from PIL import Image
from torch import Tensor

from duplex.errors import DISTRIBUTION, DuplexError, UsageError, require, require_type
from duplex.system.code import plugin_hash
from duplex.system.files import sha256_once
from duplex.system.plugins import installed_plugins, load_plugin, module_of
from duplex.system.threads import PRECISIONS

if TYPE_CHECKING:
    from duplex.encoders.prompt_tree import Prompts, PromptTree

GROUP = "duplex.encoders"
DEFAULT = "clip"  # the family of names that no other family claims
PACKAGED = "tiny"  # the encoder that ships with the package
JOINED = EntryPoint("joined", "duplex.encoders.joined:JoinedFamily", GROUP)
SEPARATOR = " + "  # between joined encoders
WITH_WEIGHTS = " @ "  # between the name of a joined encoder and its weights
RANDOM = "random"
TOWERS = ("both", "image", "text")
# how an image becomes square -> open_clip's name: cropped, distorted, or padded with black
RESIZES = {"crop": "shortest", "squash": "squash", "pad": "longest"}
TIMEOUT = (5, 10)  # seconds to connect, seconds for a response
Config = dict[str, Any]


@dataclass(frozen=True)
class MissingWeights:
    """Published weights that still have to be downloaded: their URL and size."""

    address: str  # URL of the download
    size: int | None  # bytes, estimated; None where unknown


@dataclass(frozen=True)
class CatalogEntry:
    """One encoder in the list that `duplex encoders list` prints."""

    name: str
    dim: int  # width of the features
    tags: tuple[str, ...]  # published weights
    on_disk: tuple[str, ...]  # tags whose weights need no download


class EncoderFamily(ABC):
    """Base class of families such as CLIP or BLIP: finds, loads and lists their encoders."""

    usage = ""  # forms of names that `catalog` does not list, for `duplex encoders list`
    has_text = True  # whether its encoders have a text tower

    @abstractmethod
    def find(self, name: str, weights: str | None) -> EncoderSource:
        """Describe an encoder; downloads missing weights. UsageError if name or weights are unknown."""

    @abstractmethod
    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> Encoder:
        """Build the encoder that `source` describes, with the `towers` "both", "image" or "text"."""

    def missing_weights(self, name: str, weights: str | None) -> MissingWeights | None:
        """What loading an encoder would download; None if nothing or if the family cannot tell."""
        return None

    def unknown_words(self, texts: Iterable[str]) -> list[str]:
        """The distinct words in `texts` for which the family's text towers have no embedding."""
        return []

    def catalog(self) -> list[CatalogEntry]:
        return []


def joined_parts(name: str, weights: str | None = None) -> list[tuple[str, str | None]]:
    """Names and weights of joined encoders; of any other encoder, its own."""
    names = split_name(name)
    return [(name, weights)] if names == [name] else list(map(split_weights, names))


def split_name(name: str) -> list[str]:
    """The parts of the name of joined encoders, perhaps with weights; of any other encoder, its name."""
    prefix, _, rest = name.partition(":")
    return rest.split(SEPARATOR) if prefix == JOINED.name else [name]


def split_weights(text: str) -> tuple[str, str | None]:
    """Split `NAME @ WEIGHTS` into name and weights; without weights, these are None."""
    name, _, weights = text.partition(WITH_WEIGHTS)
    return name.strip(), weights.strip() or None


def joined_name(parts: Sequence[tuple[str, str | None]]) -> str:
    """The name of joined encoders, each given by name and weights."""
    listed = []
    for name, weights in parts:
        listed.append(name if weights is None else f"{name}{WITH_WEIGHTS}{weights}")
    return f"{JOINED.name}:{SEPARATOR.join(listed)}"


def part_widths(record: Mapping[str, str]) -> tuple[int, ...]:
    """Widths of the features of joined encoders, by the record of their identity; () of any other encoder."""
    return tuple(map(int, record["parts"].split(SEPARATOR))) if "parts" in record else ()


def family_modules(encoder: str) -> list[str]:
    """Names of the modules that define an encoder's family or families, found without importing them."""
    points = [_entry_point(part) for part, _ in joined_parts(encoder)]
    joined = [JOINED] if len(points) > 1 else []
    return list(dict.fromkeys(map(module_of, [*joined, *points])))


def family_code_hash(encoder: str) -> str | None:
    """Hash of the code of the plug-ins that define an encoder's families; None for duplex's own."""
    hashes = [found for module in family_modules(encoder) if (found := plugin_hash(module)) is not None]
    return SEPARATOR.join(hashes) or None


def has_text(encoder: str) -> bool:
    """Whether an encoder, or one of joined encoders, is of a family with text towers."""
    return any(find_family(part).has_text for part, _ in joined_parts(encoder))


def find_family(encoder: str) -> EncoderFamily:
    require_type(encoder, str, "encoder")
    return _load(_entry_point(encoder))


def _entry_point(encoder: str) -> EntryPoint:
    prefix = encoder.partition(":")[0]
    if prefix == JOINED.name:
        return JOINED
    families = installed_plugins(GROUP)
    if DEFAULT not in families:
        raise DuplexError(f"{DISTRIBUTION} is not installed (no plug-ins {GROUP!r}); run `pip install {DISTRIBUTION}`")
    return families.get(prefix, families[DEFAULT])


def all_families() -> list[EncoderFamily]:
    return [_load(point) for point in installed_plugins(GROUP).values()]


def _load(point: EntryPoint) -> EncoderFamily:
    family: EncoderFamily = load_plugin(point, "encoder family", EncoderFamily)()
    return family


@dataclass(frozen=True)
class EncoderIdentity:
    """Records everything that an encoder's features depend on; each feature cache stores it."""

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
    parts: str | None = None  # of joined encoders: the widths of their features

    def to_dict(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, record: Mapping[str, str]) -> EncoderIdentity:
        names = {field.name for field in fields(cls)} - {"dim", "code", "parts"}
        values = {name: record[name] for name in names}
        return cls(**values, dim=int(record["dim"]), code=record.get("code"), parts=record.get("parts"))


class Encoder(Protocol):
    """Interface of frozen encoders."""

    name: str
    dim: int  # d, the width of image and text features
    device: Any  # torch.device of the towers
    identity: EncoderIdentity
    logit_scale: float  # ln(1/τ) of the pretrained model

    def image_transform(self, image: Image.Image) -> Tensor:
        """Resize and crop an RGB image to the image tower's pixels: [3, R, R] uint8."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, R, R] to features [B, d], float32 and not normalised."""

    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode pixels to features [B, d] and patch tokens [B, T, w], as `encode_images` does."""

    @property
    def patch_shape(self) -> tuple[int, int]:
        """The number T of patch tokens of an image, and their width w."""

    @property
    def text(self) -> Any:
        """The encoder's `TextTower`; None if it has none."""


def load_encoder(
    name: str,
    weights: str | None = None,
    *,
    towers: str = "both",
    device: str = "cpu",
    precision: str = "fp32",
    resize: str | None = None,
) -> Encoder:
    """Load a frozen encoder.

    Args:
        name: an architecture of open_clip, `tiny`, or `FAMILY:REST` (see `duplex encoders list`).
        weights: a published tag (downloaded if necessary), a file, or `random:SEED`; None if the
            encoder has its own.
        towers: "both"; "image" or "text" keeps only this tower, which saves memory.
        device: cpu, cuda or cuda:NUMBER.
        precision: number format of the loaded towers: "fp32", "tf32", "bf16" or "fp16".
        resize: how an image becomes square: "crop", "squash" or "pad"; None: as the weights' own preprocessing.
    """
    require(towers, TOWERS, "towers")
    require(precision, PRECISIONS, "precision")
    family, source = find_source(name, weights, resize)
    return family.load(source, towers=towers, device=resolve_device(device), precision=precision)


def encoder_identity(
    name: str, weights: str | None = None, *, precision: str = "fp32", resize: str | None = None
) -> EncoderIdentity:
    """What the encoder's features depend on, without loading it; arguments as of `load_encoder`."""
    require(precision, PRECISIONS, "precision")
    _, source = find_source(name, weights, resize)
    return source.identity(precision)


def find_source(
    name: str, weights: str | None = None, resize: str | None = None
) -> tuple[EncoderFamily, EncoderSource]:
    """The family of an encoder, and how to build it; arguments as of `load_encoder`."""
    if resize is not None:
        require(resize, RESIZES, "resize")
    family = find_family(name)
    source = family.find(name, weights).resized(resize)
    return family, replace(source, code=family_code_hash(name))


def missing_weights(name: str, weights: str | None = None) -> MissingWeights | None:
    """What loading an encoder would download; None if nothing or if its family cannot tell."""
    return find_family(name).missing_weights(name, weights)


def unknown_words(name: str, texts: Iterable[str]) -> list[str]:
    """The distinct words in `texts` for which the text tower of an encoder has no embedding."""
    families = [find_family(part) for part, _ in joined_parts(name)]
    reading = next((family for family in families if family.has_text), None)  # of joined ones, the first tower encodes
    return [] if reading is None else reading.unknown_words(texts)


def resolve_device(device: str) -> str:
    """`device`, or for "auto" the GPU if there is one; UsageError for an absent device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(str(device))
    except RuntimeError:
        found = torch.device("meta")  # tensors without values
    kind = found.type
    if kind == "meta":
        raise UsageError(f"device is {device!r}; expected auto, cpu, cuda or cuda:NUMBER")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device is {device}, but torch sees no GPU; set it to auto or cpu")
    if kind == "cuda" and found.index and found.index >= torch.cuda.device_count():
        last = f"cuda:{torch.cuda.device_count() - 1}"
        raise UsageError(f"device is {device}, but the last GPU is {last}; give a lower number or auto")
    return str(device)


@dataclass(frozen=True)
class EncoderSource:
    """How to build an encoder: architecture, preprocessing, and weights from a file or a seed."""

    name: str
    architecture: Config  # with "embed_dim" and "vision_cfg", as in open_clip's model_cfg
    preprocess: Config  # all fields of open_clip's PreprocessCfg
    weights: Path
    folder: Path | None = None  # with the tokenizer's files, where it has its own
    seed: int | None = None  # of random weights, in place of the file
    code: str | None = None  # hash of the family's code; None: of this package

    def __post_init__(self) -> None:
        if self.seed is None and not self.weights.is_file():
            raise DuplexError(f"there is no weights file {self.weights}; put it there or choose another encoder")

    @property
    def dim(self) -> int:
        return int(self.architecture["embed_dim"])

    def resized(self, resize: str | None) -> EncoderSource:
        """A copy that makes images square in another way, of `RESIZES`; None: the same."""
        if resize is None:
            return self
        return replace(self, preprocess={**self.preprocess, "resize_mode": RESIZES[resize]})

    def identity(self, precision: str) -> EncoderIdentity:
        preprocess = {**self.preprocess, "orientation": "exif"}  # see `data.image_files`
        return EncoderIdentity(
            encoder=self.name,
            architecture=config_hash(self.architecture, 16),
            weights=sha256_once(self.weights) if self.seed is None else f"random:{self.seed}",
            preprocessing=stable_json(preprocess),
            precision=precision,
            dim=self.dim,
            torch=_version("torch"),
            open_clip_torch=_version("open_clip_torch"),
            pillow=_version("pillow"),
            code=self.code,
        )


def read_config(path: Path, keys: tuple[str, ...] = ()) -> Config:
    """Read a JSON file in an encoder's folder; raises DuplexError if one of `keys` is missing."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist, but an encoder needs it; add it or give another folder") from error
    except (ValueError, OSError) as error:
        raise DuplexError(f"{path} cannot be read as JSON ({error}); correct or replace it") from error
    require_keys(path, config, keys)
    return dict(config)


def require_keys(path: Path, config: Any, keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if not isinstance(config, dict) or key not in config]
    if missing:
        raise DuplexError(f"{path} lacks the key {missing[0]!r}; add the key or choose another encoder")


def refuse_other_weights(name: str, weights: str | None, own: str | None = None) -> None:
    """Raise UsageError unless `weights` is None or the tag `own` of an encoder's only weights."""
    if weights not in (None, own):
        raise UsageError(f"encoder {name!r} has its own weights; leave the weights {weights!r} out")


def first_line(error: BaseException) -> str:
    """The first sentence of an error's message; without a message, the error's type."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].partition(". ")[0][:200].rstrip(":")


def stable_json(config: Config) -> str:
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def config_hash(config: Config, digits: int) -> str:
    return hashlib.sha256(stable_json(config).encode()).hexdigest()[:digits]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"


class TextTower(Protocol):
    """Interface of frozen text towers that encode embeddings, so that prompts can be learned.

    A prompt is a list of row numbers of a *lexicon* `[V, width]`, a table of token embeddings, frozen
    or learned. Features are not normalised. `checkpoint`: recompute activations for gradients.
    """

    width: int  # of a token embedding
    dim: int  # of a text feature, equal to the encoder's `dim`
    context_length: int  # maximum number of tokens in a prompt, including start and end
    logit_scale: float  # ln(1/τ) of the pretrained model

    @property
    def start(self) -> int | None:
        """Id of the token before every prompt; None if there is none."""

    @property
    def end(self) -> int | None:
        """Id of the token after every prompt; None if there is none."""

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, without start and end; DuplexError for words without embeddings."""

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Frozen embeddings `[n, width]` of token ids."""

    def encode(self, tree: PromptTree, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        """Features [P, dim] of a tree of prompts."""

    def encode_plain(self, sequences: Prompts, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        """Features [P, dim] of prompts, without shared prefixes."""

    def encode_blocks(self, sequences: Prompts, lexicon: Tensor, block: int = 4096) -> Tensor:
        """Features [P, dim] of prompts, without gradients, `block` prompts at a time."""


def random_seed(weights: str | None) -> int | None:
    """The seed of the weights `random` (seed 0) or `random:SEED`; None for other weights."""
    if weights is None or weights.partition(":")[0] != RANDOM:
        return None
    found = re.fullmatch(r"random(?::([0-9]{1,18}))?", weights)
    if found is None:
        raise UsageError(f"weights {weights!r}: expected random or random:SEED, with a whole number as seed")
    return int(found[1] or 0)


def is_random(weights: str | None) -> bool:
    return random_seed(weights) is not None


def has_random_weights(name: str, weights: str | None) -> bool:
    """Whether an encoder's weights, or those of one of joined encoders, are random."""
    return any(is_random(own) for _, own in joined_parts(name, weights))


def hub_file_on_disk(owner: str, names: Sequence[str]) -> Path | None:
    """Path of the first of `names` downloaded from the Hugging Face repository `owner`, or None."""
    for name in names:
        cached = try_to_load_from_cache(owner, name)
        if isinstance(cached, str) and Path(cached).is_file():
            return Path(cached)
    return None


def fetch_from_hub(owner: str, names: Sequence[str], what: str) -> Path:
    """Path of the first of `names` in the repository `owner`, downloaded; messages name `what`."""
    if file := hub_file_on_disk(owner, names):
        return file
    check_reachable(hf_hub_url(owner, names[0]), what)
    for name in names:
        try:
            return Path(hf_hub_download(owner, name))
        except EntryNotFoundError:
            continue
        except Exception as error:  # of the hub's client, its HTTP library, the network or the disk
            raise download_error(what, error) from error
    raise DuplexError(f"the Hugging Face repository {owner} has no {' or '.join(names)}; choose another encoder")


def download_error(what: str, error: BaseException) -> DuplexError:
    """The error to raise if `error` prevented the download of the weights of `what`."""
    offline = " (HF_HUB_OFFLINE is set)" if _offline() else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DuplexError(
        f"the weights of {what} are not on disk and could not be downloaded{offline}: {reason}; "
        "download them on a machine with a network, or give a folder with them as "
        "local-dir:FOLDER or blip:FOLDER"
    )


def check_reachable(url: str, what: str) -> None:
    if _offline():
        raise download_error(what, OSError("no network is used"))
    import requests

    try:
        requests.head(url, timeout=TIMEOUT, allow_redirects=False)
    except (requests.RequestException, ValueError) as error:
        raise download_error(what, OSError(f"{urlsplit(url).hostname} does not answer")) from error


def is_reachable(url: str) -> bool:
    try:
        check_reachable(url, url)
    except DuplexError:
        return False
    return True


def _offline() -> bool:
    return bool(constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE"))
