"""CLIP models of open_clip as frozen encoders, from a hub, a folder (with `open_clip_config.json`) or a file.

Other modules import open_clip and timm from here, because this module speeds the import up and makes it work where
torchvision was compiled for another build of torch. Such a torchvision cannot load its compiled library, and importing
it fails at two unregistered operators; nothing here calls them, so declaring their signatures suffices. torchvision and
timm each import torch's compiler for one function, which takes two thirds of the time of `import open_clip`; stubs
replace both functions. Do not compile timm's NaFlex models in this process.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import hf_hub_url
from PIL import Image
from torch import Tensor

from duplex.encoders import base, strangers
from duplex.encoders.base import RANDOM, Config, EncoderFamily, EncoderSource, MissingWeights, first_line, random_seed
from duplex.encoders.image_blocks import patch_tokens
from duplex.encoders.text import ClipTextTower
from duplex.errors import DuplexError, UsageError, install_command
from duplex.system.files import write_tensors, write_text
from duplex.system.threads import dtype_of, float32_arithmetic

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def operators_torch_lacks() -> list[str]:
    """Load torchvision's library if it fits torch; returns the signatures of operators that torch still lacks."""
    for folder in find_spec("torchvision").submodule_search_locations or ():  # type: ignore[union-attr]
        for path in sorted(Path(folder).glob("_C.*")):
            try:
                torch.ops.load_library(str(path))
            except OSError:
                continue
    return [signature for signature in OPERATORS if not hasattr(torch.ops.torchvision, signature.split("(")[0])]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Context manager that replaces torch's compiler by stubs, unless the compiler has been imported already."""
    names = ("torch._dynamo", "torch._dynamo.utils")
    if names[0] in sys.modules:
        yield
        return
    compiler, utilities = ModuleType(names[0]), ModuleType(names[1])
    compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    utilities.is_compile_supported = is_compile_supported  # type: ignore[attr-defined]
    sys.modules |= {names[0]: compiler, names[1]: utilities}
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def is_compile_supported(device_type: str) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return bool(is_compile_supported(device_type))


declared = torch.library.Library("torchvision", "FRAGMENT")  # a signature lives as long as this object
for signature in operators_torch_lacks():
    declared.define(signature)
with without_compiler():
    import open_clip as open_clip  # noqa: PLC0414
    import timm as timm  # noqa: PLC0414
    from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict
    from torchvision import transforms

LOCAL, HUB = "local-dir:", "hf-hub:"
CONFIG = "open_clip_config.json"
USUAL_STEMS = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")  # of weights files
PICKLES = (".bin", ".pth", ".pt")  # suffixes
DOWNLOADS = Path("~/.cache/clip")  # open_clip's folder for weights that are not on the hub
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # of published tags, the preferred first
SAFE_WEIGHTS = WEIGHTS[:1]  # of strangers' repositories
MAX_ASPECT = 50  # longer images are cropped before they are resized; only their middle can reach the centre crop
NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")  # numbers in OpenAI's archives


def open_clip_class(architecture: Config) -> Any:
    """The open_clip class that builds an architecture: CLIP, CustomTextCLIP or CoCa."""
    if not (architecture.get("custom_text", False) or "hf_model_name" in architecture["text_cfg"]):
        return open_clip.CLIP
    return open_clip.CoCa if "multimodal_cfg" in architecture else open_clip.CustomTextCLIP


def offline_model_arguments(architecture: Config) -> Config:
    """Constructor arguments with which open_clip builds `architecture` without downloading anything."""
    config = copy.deepcopy(architecture)
    config.pop("custom_text", None)
    if "timm_model_name" in config["vision_cfg"]:
        config["vision_cfg"]["timm_model_pretrained"] = False  # all weights come from one file
    if "hf_model_name" in config["text_cfg"]:
        config["text_cfg"]["hf_model_pretrained"] = False
    return config


def build_model(source: EncoderSource) -> Any:
    """Build a frozen open_clip model with its weights; raises DuplexError if the weights do not fit the model."""
    kind, config = open_clip_class(source.architecture), offline_model_arguments(source.architecture)
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
        raise DuplexError(
            f"{source.weights} does not fit {place} ({first_line(error)}); replace it with the weights of that model"
        ) from error
    return model.eval().requires_grad_(False)


def preprocess_of(name: str, architecture: Config, tag: str) -> Config:
    """The image preprocessing of the published weights `tag`; raises UsageError if `architecture` does not fit them."""
    published = open_clip.get_pretrained_cfg(name, tag)
    if not published:
        raise UsageError(f"weights {tag!r} are neither a file nor a tag of encoder {name!r} (its tags: {_tags(name)})")
    quick = bool(published.get("quick_gelu", False))
    has_own_activation = "timm_model_name" in architecture["vision_cfg"]  # open_clip's switch does not reach it
    if quick != bool(architecture.get("quick_gelu", False)) and not has_own_activation:
        other = f"{name}-quickgelu" if quick else name.removesuffix("-quickgelu")
        raise UsageError(f"weights {tag!r} were trained with {'Quick' if quick else ''}GELU: use the encoder {other!r}")
    return complete_preprocess(published, architecture)


def is_torchscript(path: Path) -> bool:
    """Whether a weights file, like OpenAI's, is a TorchScript archive, which holds code as well as weights."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def read_stranger_config(path: Path) -> tuple[Config, Config]:
    """`model_cfg` and `preprocess_cfg` of a stranger's encoder; DuplexError for fields that could make code run."""
    config = base.read_config(path, ("model_cfg", "preprocess_cfg"))
    architecture = config["model_cfg"]
    base.require_keys(path, architecture, ("embed_dim", "vision_cfg", "text_cfg"))
    strangers.check_fields(path, config)
    image_model = architecture["vision_cfg"].get("timm_model_name")
    if image_model and not timm.is_model(str(image_model)):
        strangers.refuse(path, "model_cfg.vision_cfg.timm_model_name", "which names no model of timm")
    own = [open_clip.get_model_config(name)["text_cfg"] for name in open_clip.list_models()]
    if architecture["text_cfg"].get("hf_model_name") not in [text.get("hf_model_name") for text in own]:
        reason = "which names no text model of open_clip's own encoders"
        strangers.refuse(path, "model_cfg.text_cfg.hf_model_name", reason)
    return architecture, config["preprocess_cfg"]


def _folder_source(folder: Path) -> EncoderSource:
    architecture, preprocess = read_stranger_config(folder / CONFIG)
    if architecture["text_cfg"].get("hf_tokenizer_name"):
        strangers.refuse_code(folder / "tokenizer_config.json")
    weights = _weights_in(folder)
    name = LOCAL + base.config_hash(architecture, 12)  # independent of the folder's place
    return EncoderSource(name, architecture, complete_preprocess(preprocess, architecture), weights, folder)


def _weights_in(folder: Path) -> Path:
    def rank(path: Path) -> tuple[bool, bool, str]:
        return path.stem not in USUAL_STEMS, path.stem != USUAL_STEMS[0], path.name

    files = sorted(folder.iterdir())
    weights = min((path for path in files if path.suffix == ".safetensors"), key=rank, default=None)
    if weights is not None:
        return weights
    for path in files:
        if path.suffix in PICKLES:
            raise DuplexError(
                f"{path} is not read, since pickled weights may run code; save its tensors as {WEIGHTS[0]}, or convert "
                f"it with `duplex encoders convert {path} FOLDER --encoder NAME --tag TAG`"
            )
    raise DuplexError(f"the folder {folder} holds no weights; put {WEIGHTS[0]} beside {CONFIG}")


def _file_source(name: str, architecture: Config, path: Path) -> EncoderSource:
    convert = f"convert it with `duplex encoders convert {path} FOLDER --encoder {name}"
    if is_torchscript(path):
        raise DuplexError(f"{path}, a TorchScript archive, may run code and is not loaded; if you trust it, {convert}`")
    agreed = {}
    for tag in open_clip.list_pretrained_tags_by_model(name):
        try:
            candidate = preprocess_of(name, architecture, tag)
        except UsageError:
            continue
        agreed[base.stable_json(candidate)] = candidate
    if len(agreed) != 1:
        raise UsageError(
            f"{path} does not state its preprocessing; {convert} --tag TAG` (TAG: weights with the same preprocessing)"
        )
    return EncoderSource(name, architecture, next(iter(agreed.values())), path)


def _tags(name: str) -> str:
    return ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none published"


def convert_weights(archive: Path, folder: Path, name: str, tag: str | None = None) -> EncoderSource:
    """Convert a weights file to an encoder folder and check that it loads; returns the encoder's description.

    name: open_clip architecture. tag: published weights with equal preprocessing; None (TorchScript only): "openai".
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
    existing = next((folder / name for name in (WEIGHTS[0], CONFIG) if (folder / name).exists()), None)
    if existing is not None:
        raise UsageError(f"{existing} exists and is not overwritten; give a folder without an encoder")
    try:
        state = torch.jit.load(str(archive), map_location="cpu").state_dict() if scripted else read_weights(archive)
    except (RuntimeError, ValueError, OSError) as error:  # of TorchScript
        raise DuplexError(f"{archive} cannot be read as weights ({first_line(error)}); download it again") from error
    tensors = {key: value.detach().contiguous().clone() for key, value in state.items() if key not in NOT_WEIGHTS}
    write_tensors(folder / WEIGHTS[0], tensors)
    write_text(folder / CONFIG, json.dumps({"model_cfg": architecture, "preprocess_cfg": preprocess}, indent=2) + "\n")
    source = ClipFamily().find(f"{LOCAL}{folder}")
    try:
        build_model(source)
    except DuplexError as error:
        (folder / CONFIG).unlink()
        (folder / WEIGHTS[0]).unlink()
        raise DuplexError(
            f"{archive} does not hold the weights of {name!r}; give the right architecture as --encoder"
        ) from error
    return source


def complete_preprocess(options: Config, architecture: Config) -> Config:
    """Preprocessing in open_clip's form: `options`, the architecture's image size, and defaults for other fields."""
    size = architecture["vision_cfg"].get("image_size", 224)
    merged: Config = json.loads(json.dumps(merge_preprocess_dict({**vars(PreprocessCfg())}, {**options, "size": size})))
    return merged


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a weights file, by name; raises DuplexError if it is unreadable."""
    try:
        state: dict[str, Tensor] = open_clip.factory.load_state_dict(str(path))
    except Exception as error:  # torch, safetensors, pickle and zip raise almost anything for other files
        raise DuplexError(f"{path} cannot be read as weights ({first_line(error)}); replace the file") from error
    return state


@contextmanager
def initialised_by(seed: int) -> Iterator[None]:
    """Context manager that seeds torch's random numbers with `seed`, and restores the generator's state at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def weights_on_disk(published: dict[str, Any]) -> Path | None:
    """Path on disk of published weights (`published`: their entry in open_clip's table); None if not downloaded."""
    url = str(published.get("url", ""))
    if url and (file := DOWNLOADS.expanduser() / url.rsplit("/", 1)[-1]).is_file():
        return file
    owner, names = _repository(published)
    return base.hub_file_on_disk(owner, names) if owner else None


def fetch_weights(published: dict[str, Any], what: str) -> Path:
    """Path of published weights (`published`: their entry in open_clip's table), downloaded unless they are on disk.

    what: what error messages call the weights.
    """
    if file := weights_on_disk(published):
        return file
    owner, names = _repository(published)
    return base.fetch_from_hub(owner, names, what) if owner else _fetch_url(published, what)


def _fetch_url(published: dict[str, Any], what: str) -> Path:
    folder = DOWNLOADS.expanduser()
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
    """The encoders that open_clip can build: its own architectures, and folders and hub repositories in its format."""

    usage = "local-dir:FOLDER and hf-hub:OWNER/NAME of open_clip"

    def find(self, name: str, weights: str | None = None) -> EncoderSource:
        if name.startswith((LOCAL, HUB)):
            base.refuse_other_weights(name, weights)
        if name.startswith(LOCAL):
            return _folder_source(Path(name.removeprefix(LOCAL)).expanduser())
        if name.startswith(HUB):
            owner = name.removeprefix(HUB)
            architecture, preprocess = read_stranger_config(base.fetch_from_hub(owner, (CONFIG,), name))
            preprocess = complete_preprocess(preprocess, architecture)
            return EncoderSource(name, architecture, preprocess, base.fetch_from_hub(owner, SAFE_WEIGHTS, name))
        architecture = open_clip.get_model_config(name)
        if architecture is None:
            raise UsageError(f"unknown encoder {name!r}; `duplex encoders list` shows the names")
        if weights is None:
            raise UsageError(f"{name!r} needs weights; give `weights` (--weights), a file or a tag ({_tags(name)})")
        if (seed := random_seed(weights)) is not None:
            return EncoderSource(name, architecture, complete_preprocess({}, architecture), Path(RANDOM), seed=seed)
        if Path(weights).expanduser().is_file():
            return _file_source(name, architecture, Path(weights).expanduser())
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
        if architecture is None or weights is None or base.is_random(weights) or Path(weights).expanduser().is_file():
            self.find(name, weights)  # raises if anything is wrong with the name or the weights
            return None
        preprocess_of(name, architecture, weights)
        published = open_clip.get_pretrained_cfg(name, weights)
        if weights_on_disk(published):
            return None
        with torch.device("meta"):  # counts parameters without allocating them
            model = open_clip_class(architecture)(**offline_model_arguments(architecture))
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        owner, names = _repository(published)
        return MissingWeights(hf_hub_url(owner, names[0]) if owner else str(published.get("url", "")), size)

    def catalog(self) -> list[base.CatalogEntry]:
        entries = []
        for name in open_clip.list_models():
            tags = tuple(open_clip.list_pretrained_tags_by_model(name))
            on_disk = tuple(tag for tag in tags if weights_on_disk(open_clip.get_pretrained_cfg(name, tag)))
            entries.append(base.CatalogEntry(name, int(open_clip.get_model_config(name)["embed_dim"]), tags, on_disk))
        return entries


class ResizeAndCrop:
    """Resizes and crops an RGB image as open_clip does, but returns pixels [3, R, R] as uint8, which saves memory."""

    def __init__(self, preprocess: dict[str, Any]) -> None:
        steps = image_transform_v2(PreprocessCfg(**preprocess), is_train=False).transforms
        # without conversions and normalisation
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


class EncoderBase:
    """Base class of encoders; a subclass sets the towers `_visual` and `_text`, and defines `encode_patches`."""

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
            raise DuplexError(f"encoder {self.name!r} was loaded without its image tower; load it with towers='both'")
        return self._visual

    @property
    def text(self) -> Any:
        if self._text is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its text tower; load it with towers='both'")
        return self._text

    def encode_images(self, pixels: Tensor) -> Tensor:
        return self.encode_patches(pixels)[0]

    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @property
    def patch_shape(self) -> tuple[int, int]:
        _, count, width = self.encode_patches(self.image_transform(Image.new("RGB", (8, 8)))[None])[1].shape
        return count, width

    def normalise(self, pixels: Tensor) -> Tensor:
        """Convert uint8 pixels [B, 3, R, R] to the image tower's input: (pixels / 255 - mean) / standard deviation."""
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
        needing = {"hf_model_name"} if towers == "image" else {"hf_model_name", "hf_tokenizer_name"}
        if needing & set(source.architecture.get("text_cfg", {})) and find_spec("transformers") is None:
            raise DuplexError(f"encoder {source.name!r} needs transformers; run {install_command('blip')}")
        model = self.build(source)
        self.logit_scale = float(model.logit_scale.item())
        if towers != "text":
            self._visual = model.visual.to(self.device, self.dtype)
        if towers != "image":
            model.visual = None  # frees the memory of the image tower where only text is wanted
            self._text = ClipTextTower(model.to(self.device), self.tokenizer(source), precision=precision)

    def build(self, source: EncoderSource) -> Any:
        return build_model(source)

    def tokenizer(self, source: EncoderSource) -> Any:
        if source.folder is None and not source.name.startswith(HUB):
            return open_clip.get_tokenizer(source.name)
        text = source.architecture["text_cfg"]  # open_clip would read the stranger's file again, which may have changed
        options = {"context_length": text.get("context_length", 77), **(text.get("tokenizer_kwargs") or {})}
        files = text.get("hf_tokenizer_name")
        try:
            if not files:
                return open_clip.SimpleTokenizer(**options)
            options |= {"tokenizer_mode": text.get("tokenizer_mode"), "trust_remote_code": False}
            return open_clip.tokenizer.HFTokenizer(str(source.folder or files), **options)
        except Exception as error:  # of transformers, the hub's client or open_clip
            raise DuplexError(
                f"the tokenizer of encoder {source.name!r} cannot be loaded without running its own code "
                f"({first_line(error)}); choose another encoder"
            ) from error

    @torch.inference_mode()
    def encode_images(self, pixels: Tensor) -> Tensor:
        with float32_arithmetic(self.precision):
            output = self.visual(self.normalise(pixels))
        features: Tensor = output[0] if isinstance(output, tuple) else output  # CoCa returns its tokens, too
        return features.float()

    @torch.inference_mode()
    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(self.visual, "trunk"):
            with float32_arithmetic(self.precision):
                cells = self.visual.trunk.forward_features(self.normalise(pixels))
                features = self.visual.head(self.visual.trunk.forward_head(cells))
            return features.float(), patch_tokens(self.visual.trunk, cells).float()
        is_coca = getattr(self.visual, "attn_pool", None) is not None  # its `ln_post` reads pooled tokens
        if is_coca or not (hasattr(self.visual, "forward_intermediates") and hasattr(self.visual, "ln_post")):
            raise DuplexError(f"encoder {self.name!r} has no patch tokens; set extraction.tokens to none")
        with float32_arithmetic(self.precision):
            output = self.visual.forward_intermediates(
                self.normalise(pixels), indices=1, normalize_intermediates=True, output_fmt="NLC"
            )
        return output["image_features"].float(), output["image_intermediates"][-1].float()
