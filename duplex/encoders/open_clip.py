"""CLIP models of open_clip as frozen encoders, from a hub, a folder or a file."""

from __future__ import annotations

import copy
import inspect
import json
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_url
from PIL import Image
from torch import Tensor

from duplex.encoders import base, strangers
from duplex.encoders.base import Config, EncoderFamily, EncoderSource, MissingWeights, first_line
from duplex.encoders.gemma import TOKENIZER_FILE, read_gemma_tokenizer
from duplex.encoders.image_blocks import patch_tokens
from duplex.encoders.libraries import open_clip, transforms
from duplex.encoders.text import ClipTextTower
from duplex.errors import DuplexError, UsageError, install_command
from duplex.system.files import write_json, write_tensors
from duplex.system.threads import dtype_of, float32_arithmetic

LOCAL = "local-dir:"
HUB = "hf-hub:"
CONFIG = "open_clip_config.json"
# names of weights files, the preferred first: without suffix, of published tags, of strangers
USUAL_STEMS = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
SAFE_WEIGHTS = WEIGHTS[:1]
PICKLES = (".bin", ".pth", ".pt")  # suffixes
DOWNLOAD_FOLDER = Path("~/.cache/clip")  # open_clip's folder for weights that are not on the hub
MAX_ASPECT = 50  # longer images are cropped before they are resized, unless they are squashed
NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")  # numbers in OpenAI's archives


def open_clip_class(architecture: Config) -> Any:
    """The open_clip class that builds an architecture: CLIP, CustomTextCLIP or CoCa."""
    if not (architecture.get("custom_text", False) or "hf_model_name" in architecture["text_cfg"]):
        return open_clip.CLIP
    return open_clip.CoCa if "multimodal_cfg" in architecture else open_clip.CustomTextCLIP


def offline_model_arguments(architecture: Config) -> Config:
    """Arguments with which open_clip builds `architecture` without downloading anything."""
    config = copy.deepcopy(architecture)
    config.pop("custom_text", None)
    if "timm_model_name" in config["vision_cfg"]:
        config["vision_cfg"]["timm_model_pretrained"] = False  # all weights come from one file
    if "hf_model_name" in config["text_cfg"]:
        config["text_cfg"]["hf_model_pretrained"] = False
    return config


def build_model(source: EncoderSource) -> Any:
    """Build a frozen open_clip model; raises DuplexError if the weights do not fit the model."""
    kind = open_clip_class(source.architecture)
    config = offline_model_arguments(source.architecture)
    place = source.folder / CONFIG if source.folder else source.name
    unknown = sorted(set(config) - set(inspect.signature(kind).parameters))
    if unknown:
        raise DuplexError(f"{place}: open_clip's {kind.__name__} has no key {unknown[0]!r}; remove it from model_cfg")
    if source.seed is not None:
        with initialised_by(source.seed):
            return kind(**config).eval().requires_grad_(False)
    model = kind(**config)
    try:
        open_clip.load_checkpoint(model, str(source.weights), weights_only=True)
    except Exception as error:  # as in `read_weights`
        problem = f"{source.weights} does not fit {place} ({first_line(error)})"
        raise DuplexError(f"{problem}; replace it with the weights of that model") from error
    return model.eval().requires_grad_(False)


def preprocess_of(name: str, architecture: Config, tag: str) -> Config:
    """The preprocessing of published weights; UsageError if they do not fit `architecture`."""
    published = open_clip.get_pretrained_cfg(name, tag)
    if not published:
        problem = f"weights {tag!r} are neither a file nor a tag of encoder {name!r}"
        raise UsageError(f"{problem} (its tags: {_tags(name)})")
    quick = bool(published.get("quick_gelu", False))
    # open_clip's switch does not reach timm's activations
    has_own_activation = "timm_model_name" in architecture["vision_cfg"]
    if quick != bool(architecture.get("quick_gelu", False)) and not has_own_activation:
        other = f"{name}-quickgelu" if quick else name.removesuffix("-quickgelu")
        activation = "QuickGELU" if quick else "GELU"
        raise UsageError(f"weights {tag!r} were trained with {activation}: use the encoder {other!r}")
    return complete_preprocess(published, architecture)


def is_torchscript(path: Path) -> bool:
    """Whether a weights file, like OpenAI's, is a TorchScript archive, which also holds code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _folder_source(folder: Path) -> EncoderSource:
    architecture, preprocess = strangers.read_open_clip(folder / CONFIG)
    if architecture["text_cfg"].get("hf_tokenizer_name"):
        strangers.refuse_code(folder / "tokenizer_config.json")
    weights = _weights_in(folder)
    name = LOCAL + base.config_hash(architecture, 12)  # independent of the folder's place
    preprocess = complete_preprocess(preprocess, architecture)
    return EncoderSource(name, architecture, preprocess, weights, folder)


def _weights_in(folder: Path) -> Path:
    def rank(path: Path) -> tuple[bool, bool, str]:
        return path.stem not in USUAL_STEMS, path.stem != USUAL_STEMS[0], path.name

    files = sorted(folder.iterdir(), key=rank)
    for path in files:
        if path.suffix == ".safetensors":
            return path
    for path in files:
        if path.suffix in PICKLES:
            raise DuplexError(
                f"{path} is not read, since pickled weights may run code; save its tensors as "
                f"{WEIGHTS[0]}, or convert it with `duplex encoders convert {path} FOLDER "
                "--encoder NAME --tag TAG`"
            )
    raise DuplexError(f"the folder {folder} holds no weights; put {WEIGHTS[0]} beside {CONFIG}")


def _file_source(name: str, architecture: Config, path: Path) -> EncoderSource:
    convert = f"convert it with `duplex encoders convert {path} FOLDER --encoder {name}"
    if is_torchscript(path):
        problem = f"{path}, a TorchScript archive, may run code and is not loaded"
        raise DuplexError(f"{problem}; if you trust it, {convert}`")
    agreed = {}
    for tag in open_clip.list_pretrained_tags_by_model(name):
        with suppress(UsageError):
            candidate = preprocess_of(name, architecture, tag)
            agreed[base.stable_json(candidate)] = candidate
    if len(agreed) != 1:
        raise UsageError(
            f"{path} does not state its preprocessing; {convert} --tag TAG` (TAG: weights with the same preprocessing)"
        )
    return EncoderSource(name, architecture, next(iter(agreed.values())), path)


def _tags(name: str) -> str:
    return ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none published"


def convert_weights(archive: Path, folder: Path, name: str, tag: str | None = None) -> EncoderSource:
    """Convert a weights file of an open_clip architecture to an encoder folder that loads.

    tag: published weights with equal preprocessing; None (TorchScript only): "openai".
    """
    architecture = open_clip.get_model_config(name)
    if architecture is None or ":" in name:
        raise UsageError(f"unknown architecture {name!r}; `duplex encoders list` shows the names")
    if not archive.is_file():
        raise UsageError(f"{archive} does not exist")
    scripted = is_torchscript(archive)
    if tag is None and not scripted:
        raise UsageError(
            f"{archive} does not state its preprocessing; add `--tag TAG` (TAG: weights with the same preprocessing)"
        )
    preprocess = preprocess_of(name, architecture, tag or "openai")
    for path in (folder / WEIGHTS[0], folder / CONFIG):
        if path.exists():
            raise UsageError(f"{path} exists and is not overwritten; give a folder without an encoder")
    state = _read_torchscript(archive) if scripted else read_weights(archive)
    tensors = {name: value.detach().contiguous().clone() for name, value in state.items()}
    for number in NOT_WEIGHTS:
        tensors.pop(number, None)
    write_tensors(folder / WEIGHTS[0], tensors)
    write_json(folder / CONFIG, {"model_cfg": architecture, "preprocess_cfg": preprocess})
    source = ClipFamily().find(f"{LOCAL}{folder}")
    try:
        build_model(source)
    except DuplexError as error:
        (folder / CONFIG).unlink()
        (folder / WEIGHTS[0]).unlink()
        problem = f"{archive} does not hold the weights of {name!r}"
        raise DuplexError(f"{problem}; give the right architecture as --encoder") from error
    return source


def _read_torchscript(archive: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = torch.jit.load(str(archive), map_location="cpu").state_dict()
    except (RuntimeError, ValueError, OSError) as error:
        raise DuplexError(f"{archive} cannot be read as weights ({first_line(error)}); download it again") from error
    return state


def complete_preprocess(options: Config, architecture: Config) -> Config:
    """All fields of open_clip's preprocessing; the image size is the architecture's."""
    size = architecture["vision_cfg"].get("image_size", 224)
    defaults = vars(open_clip.transform.PreprocessCfg())
    merged = open_clip.transform.merge_preprocess_dict(defaults, {**options, "size": size})
    return dict(json.loads(json.dumps(merged)))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a weights file, by name; raises DuplexError if it is unreadable."""
    try:
        state: dict[str, Tensor] = open_clip.factory.load_state_dict(str(path))
    except Exception as error:  # torch, safetensors, pickle and zip raise almost anything
        raise DuplexError(f"{path} cannot be read as weights ({first_line(error)}); replace the file") from error
    return state


@contextmanager
def initialised_by(seed: int) -> Iterator[None]:
    """Context manager that seeds torch's random numbers, and restores their state at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def weights_on_disk(published: dict[str, Any]) -> Path | None:
    """Path on disk of published weights, given by their entry in open_clip's table, or None."""
    url = str(published.get("url", ""))
    if url and (file := DOWNLOAD_FOLDER.expanduser() / url.rsplit("/", 1)[-1]).is_file():
        return file
    owner, names = _repository(published)
    return base.hub_file_on_disk(owner, names) if owner else None


def fetch_weights(published: dict[str, Any], what: str) -> Path:
    """Path of published weights, downloaded unless they are on disk; messages call them `what`."""
    if file := weights_on_disk(published):
        return file
    owner, names = _repository(published)
    return base.fetch_from_hub(owner, names, what) if owner else _fetch_url(published, what)


def _fetch_url(published: dict[str, Any], what: str) -> Path:
    folder = DOWNLOAD_FOLDER.expanduser()
    base.check_reachable(published["url"], what)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            file = Path(open_clip.download_pretrained(published, prefer_hf_hub=False, cache_dir=scratch))
            return file.replace(folder / file.name)
    except Exception as error:  # as for the hub
        raise base.download_error(what, error) from error


def _repository(published: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    owner, _, file = published.get("hf_hub", "").rpartition("/")
    return owner, (file,) if file else WEIGHTS


class ClipFamily(EncoderFamily):
    """Encoders of open_clip: its own architectures, and folders and repositories in its format."""

    usage = "local-dir:FOLDER and hf-hub:OWNER/NAME of open_clip"

    def find(self, name: str, weights: str | None = None) -> EncoderSource:
        if name.startswith((LOCAL, HUB)):
            base.refuse_other_weights(name, weights)
        if name.startswith(LOCAL):
            return _folder_source(Path(name.removeprefix(LOCAL)).expanduser())
        if name.startswith(HUB):
            owner = name.removeprefix(HUB)
            config = base.fetch_from_hub(owner, (CONFIG,), name)
            architecture, preprocess = strangers.read_open_clip(config)
            path = base.fetch_from_hub(owner, SAFE_WEIGHTS, name)
            preprocess = complete_preprocess(preprocess, architecture)
            return EncoderSource(name, architecture, preprocess, path)
        architecture = open_clip.get_model_config(name)
        if architecture is None:
            raise UsageError(f"unknown encoder {name!r}; `duplex encoders list` shows the names")
        if weights is None:
            raise UsageError(f"{name!r} needs weights; give `weights` (--weights), a file or a tag ({_tags(name)})")
        seed = base.random_seed(weights)
        if seed is not None:
            preprocess = complete_preprocess({}, architecture)
            return EncoderSource(name, architecture, preprocess, Path(base.RANDOM), seed=seed)
        file = Path(weights).expanduser()
        if file.is_file():
            return _file_source(name, architecture, file)
        preprocess = preprocess_of(name, architecture, weights)
        path = fetch_weights(open_clip.get_pretrained_cfg(name, weights), f"{name} + {weights}")
        return EncoderSource(name, architecture, preprocess, path)

    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> ClipEncoder:
        return ClipEncoder(source, towers=towers, device=device, precision=precision)

    def missing_weights(self, name: str, weights: str | None) -> MissingWeights | None:
        if name.startswith(HUB):
            base.refuse_other_weights(name, weights)
            owner = name.removeprefix(HUB)
            on_disk = base.hub_file_on_disk(owner, (CONFIG,)) and base.hub_file_on_disk(owner, SAFE_WEIGHTS)
            return None if on_disk else MissingWeights(f"https://huggingface.co/{owner}", None)
        architecture = None if name.startswith(LOCAL) else open_clip.get_model_config(name)
        local = weights is None or base.is_random(weights) or Path(weights).expanduser().is_file()
        if architecture is None or weights is None or local:
            self.find(name, weights)  # raises if anything is wrong with the name or the weights
            return None
        preprocess_of(name, architecture, weights)
        published = open_clip.get_pretrained_cfg(name, weights)
        if file := weights_on_disk(published):
            tokenizer = architecture["text_cfg"].get("hf_tokenizer_name")
            if not tokenizer or _local_tokenizer(file.parent, tokenizer):
                return None
            return MissingWeights(hf_hub_url(tokenizer, TOKENIZER_FILE), None)
        with torch.device("meta"):  # counts parameters without allocating them
            model = open_clip_class(architecture)(**offline_model_arguments(architecture))
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        owner, names = _repository(published)
        return MissingWeights(hf_hub_url(owner, names[0]) if owner else str(published.get("url", "")), size)

    def catalog(self) -> list[base.CatalogEntry]:
        entries = []
        for name in open_clip.list_models():
            dim = int(open_clip.get_model_config(name)["embed_dim"])
            tags = tuple(open_clip.list_pretrained_tags_by_model(name))
            published = {tag: open_clip.get_pretrained_cfg(name, tag) for tag in tags}
            on_disk = tuple(tag for tag in tags if weights_on_disk(published[tag]))
            entries.append(base.CatalogEntry(name, dim, tags, on_disk))
        return entries


def _require_transformers(source: EncoderSource) -> None:
    if find_spec("transformers") is None:
        raise DuplexError(f"encoder {source.name!r} needs transformers; run {install_command('blip')}")


def _local_tokenizer(folder: Path | None, owner: str) -> Path | None:
    # the tokenizer's file in `folder`, or downloaded from the repository `owner`; None if it is in neither
    if folder is not None and (folder / TOKENIZER_FILE).is_file():
        return folder / TOKENIZER_FILE
    return base.hub_file_on_disk(owner, (TOKENIZER_FILE,))


def _tokenizer_file(source: EncoderSource) -> Path | None:
    # None: in other files, which transformers may find
    owner = source.architecture["text_cfg"]["hf_tokenizer_name"]
    if source.folder is not None:
        file = source.folder / TOKENIZER_FILE
        return file if file.is_file() else None
    try:
        beside = source.weights.parent if source.seed is None else None
        return _local_tokenizer(beside, owner) or base.fetch_from_hub(owner, (TOKENIZER_FILE,), owner)
    except (DuplexError, ValueError) as error:  # ValueError: a stranger's configuration names no repository
        if find_spec("transformers") is not None:
            return None
        raise DuplexError(
            f"the tokenizer of encoder {source.name!r} is not on disk and cannot be downloaded; put {TOKENIZER_FILE} "
            f"from https://huggingface.co/{owner} beside the weights file"
        ) from error


class ResizeAndCrop:
    """Resizes and crops (or pads) an RGB image as open_clip does, but returns uint8 pixels [3, R, R]."""

    def __init__(self, preprocess: dict[str, Any]) -> None:
        settings = open_clip.transform.PreprocessCfg(**preprocess)
        steps = open_clip.transform.image_transform_v2(settings, is_train=False).transforms
        # without conversions and normalisation
        self.steps = transforms.Compose([*steps[:-3], transforms.PILToTensor()])
        self.keeps_ratio = preprocess["resize_mode"] != "squash"

    def __call__(self, image: Image.Image) -> Tensor:
        width, height = image.size
        if self.keeps_ratio and max(width, height) > MAX_ASPECT * min(width, height):
            # resizing a strip of 20,000 x 1 whole would take gigabytes for pixels that are cropped, or leave no pixel
            keep = MAX_ASPECT * min(width, height)
            left, top = max(0, width - keep) // 2, max(0, height - keep) // 2
            image = image.crop((left, top, width - left, height - top))
        pixels: Tensor = self.steps(image)
        return pixels


class EncoderBase:
    """Base class; subclasses set `_visual` and `_text`, and define `encode_patches`."""

    logit_scale = 0.0

    def __init__(self, source: EncoderSource, *, device: str, precision: str) -> None:
        self.name = source.name
        self.dim = source.dim
        self.identity = source.identity(precision)
        self.device = torch.device(device)
        self.precision = precision
        self.dtype = dtype_of(precision)
        self.image_transform = ResizeAndCrop(source.preprocess)
        size = source.preprocess["size"]
        self._pixel_shape = (3, size, size) if isinstance(size, int) else (3, *size)  # of one image
        self._visual: Any = None
        self._text: Any = None
        self._mean = torch.tensor(source.preprocess["mean"], device=self.device).view(3, 1, 1)
        self._std = torch.tensor(source.preprocess["std"], device=self.device).view(3, 1, 1)

    @property
    def visual(self) -> Any:
        if self._visual is None:
            raise self._not_loaded("image")
        return self._visual

    @property
    def text(self) -> Any:
        if self._text is None:
            raise self._not_loaded("text")
        return self._text

    def _not_loaded(self, tower: str) -> DuplexError:
        problem = f"encoder {self.name!r} was loaded without its {tower} tower"
        return DuplexError(f"{problem}; load it with towers='both'")

    def encode_images(self, pixels: Tensor) -> Tensor:
        return self.encode_patches(pixels)[0]

    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @property
    def patch_shape(self) -> tuple[int, int]:
        pixels = self.image_transform(Image.new("RGB", (8, 8)))
        _, count, width = self.encode_patches(pixels[None])[1].shape
        return count, width

    def normalise(self, pixels: Tensor) -> Tensor:
        """The image tower's input for uint8 pixels [B, 3, R, R]: (pixels / 255 - mean) / std."""
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1:] != self._pixel_shape:
            found = f"shape {list(pixels.shape)} and type {pixels.dtype}".replace("torch.", "")
            expected = f"shape [B, {', '.join(map(str, self._pixel_shape))}] and type uint8"
            raise UsageError(
                f"the pixels have {found}, but encoder {self.name!r} expects {expected}; use its `image_transform`"
            )
        return pixels.to(self.device).float().div_(255).sub_(self._mean).div_(self._std).to(self.dtype)


class ClipEncoder(EncoderBase):
    def __init__(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> None:
        super().__init__(source, device=device, precision=precision)
        if source.architecture.get("text_cfg", {}).get("hf_model_name"):
            _require_transformers(source)
        model = self.build(source)
        self.logit_scale = float(model.logit_scale.item())
        if towers != "text":
            self._visual = model.visual.to(self.device, self.dtype)
        if towers != "image":
            projection = getattr(model.visual, "proj", None)
            model.visual = None  # frees the memory of the image tower where only text is wanted
            self._text = ClipTextTower(model.to(self.device), self.tokenizer(source), precision=precision)
            self._text.image_projection = projection.detach().clone() if isinstance(projection, Tensor) else None

    def build(self, source: EncoderSource) -> Any:
        return build_model(source)

    def tokenizer(self, source: EncoderSource) -> Any:
        text = source.architecture["text_cfg"]
        options = {"context_length": text.get("context_length", 77)}
        files = text.get("hf_tokenizer_name")
        if files:
            file = _tokenizer_file(source)
            gemma = None if file is None else read_gemma_tokenizer(file, options["context_length"])
            if gemma is not None:
                return gemma
            _require_transformers(source)
        if source.folder is None and not source.name.startswith(HUB):
            return open_clip.get_tokenizer(source.name)
        # open_clip would read the file again, which may have changed since it was checked
        options |= text.get("tokenizer_kwargs") or {}
        try:
            if not files:
                return open_clip.SimpleTokenizer(**options)
            options |= {"tokenizer_mode": text.get("tokenizer_mode"), "trust_remote_code": False}
            return open_clip.tokenizer.HFTokenizer(str(source.folder or files), **options)
        except Exception as error:  # of transformers, the hub's client or open_clip
            problem = f"the tokenizer of encoder {source.name!r} cannot be loaded"
            reason = f"{first_line(error)}; its own code is never run"
            raise DuplexError(f"{problem} ({reason}); choose another encoder") from error

    @torch.inference_mode()
    def encode_images(self, pixels: Tensor) -> Tensor:
        with float32_arithmetic(self.precision):
            output = self.visual(self.normalise(pixels))
        if isinstance(output, tuple):  # CoCa returns its tokens, too
            output = output[0]
        features: Tensor = output.float()
        return features

    @torch.inference_mode()
    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(self.visual, "trunk"):
            with float32_arithmetic(self.precision):
                cells = self.visual.trunk.forward_features(self.normalise(pixels))
                features = self.visual.head(self.visual.trunk.forward_head(cells))
            return features.float(), patch_tokens(self.visual.trunk, cells).float()
        is_coca = getattr(self.visual, "attn_pool", None) is not None  # `ln_post` reads pooled tokens
        needed = ("forward_intermediates", "ln_post")
        if is_coca or not all(hasattr(self.visual, name) for name in needed):
            raise DuplexError(f"encoder {self.name!r} has no patch tokens; set extraction.tokens to none")
        with float32_arithmetic(self.precision):
            output = self.visual.forward_intermediates(
                self.normalise(pixels), indices=1, normalize_intermediates=True, output_fmt="NLC"
            )
        return output["image_features"].float(), output["image_intermediates"][-1].float()
