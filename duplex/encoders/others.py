"""BLIP and timm's classifiers as frozen encoders.

    encoder: {name: "blip:Salesforce/blip-itm-base-coco"}  # a Hugging Face repository, or blip:FOLDER
    encoder: {name: "timm:resnet18", weights: a1_in1k}     # a tag of timm, a file, or random:SEED

BLIP (Li et al., 2022; extra `blip`) is used with both towers of its image-text retrieval model;
features are projected class tokens. timm's classifiers, without their heads, encode only images;
word vectors come from a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders import base, strangers
from duplex.encoders.base import EncoderFamily, EncoderSource, MissingWeights, hub_file_on_disk, random_seed
from duplex.encoders.image_blocks import patch_tokens
from duplex.encoders.libraries import timm
from duplex.encoders.open_clip import EncoderBase, complete_preprocess, initialised_by, read_weights
from duplex.encoders.prompt_tree import Prompts, PromptTree, check_length, pad_prompts, tree_blocks
from duplex.errors import DuplexError, UsageError, install_command
from duplex.system.files import json_digest
from duplex.system.threads import dtype_of, float32_arithmetic

BLIP_PREFIX = "blip:"
TIMM_PREFIX = "timm:"
TIMM_FILES = ("model.safetensors",)
TEMPERATURE = 0.07
RETRIEVAL = "a BLIP retrieval model; choose one, such as blip:Salesforce/blip-itm-base-coco"
BLIP_FILES = ("config.json", "preprocessor_config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")  # either suffices


class BlipFamily(EncoderFamily):
    """BLIP models: `blip:FOLDER`, or `blip:OWNER/MODEL` on the Hugging Face hub."""

    usage = f"blip:OWNER/NAME or blip:FOLDER (needs {install_command('blip')})"

    def find(self, name: str, weights: str | None = None) -> EncoderSource:
        base.refuse_other_weights(name, weights)
        if find_spec("transformers") is None:  # before its weights are downloaded
            raise DuplexError(f"BLIP needs the transformers library; run {install_command('blip')}")
        place = name.removeprefix(BLIP_PREFIX)
        folder = Path(place).expanduser()
        is_local = folder.is_dir()
        if not is_local:
            for file in BLIP_FILES:
                folder = base.fetch_from_hub(place, (file,), name).parent
            base.fetch_from_hub(place, TOKENIZER_FILES, name)
        for file in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
            strangers.refuse_code(folder / file)
        config = base.read_config(folder / "config.json")
        image_config = base.read_config(folder / "preprocessor_config.json")
        try:
            options = {"mean": image_config["image_mean"], "std": image_config["image_std"]}
            size = {"image_size": config["vision_config"]["image_size"]}
            width = config["image_text_hidden_size"]
        except (KeyError, TypeError) as error:
            raise DuplexError(f"{folder}: its configuration lacks {error}, so it is not {RETRIEVAL}") from error
        architecture = {"blip": config, "embed_dim": width, "vision_cfg": size}
        options |= {"interpolation": "bicubic", "resize_mode": "squash"}
        preprocess = complete_preprocess(options, architecture)
        if is_local:  # the name must not depend on the folder's place
            name = BLIP_PREFIX + json_digest(architecture)[:12]
        return EncoderSource(name, architecture, preprocess, folder / "model.safetensors", folder)

    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> BlipEncoder:
        return BlipEncoder(source, towers=towers, device=device, precision=precision)

    def missing_weights(self, name: str, weights: str | None) -> MissingWeights | None:
        base.refuse_other_weights(name, weights)
        place = name.removeprefix(BLIP_PREFIX)
        needed = [*((file,) for file in BLIP_FILES), TOKENIZER_FILES]
        if Path(place).expanduser().is_dir() or all(hub_file_on_disk(place, names) for names in needed):
            return None
        return MissingWeights(f"https://huggingface.co/{place}", None)


class BlipEncoder(EncoderBase):
    def __init__(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> None:
        super().__init__(source, device=device, precision=precision)
        model = _build_blip(source).to(self.device)
        self.logit_scale = -math.log(TEMPERATURE)
        if towers != "text":
            self._visual = model.vision_model.to(self.dtype)
            self._project = model.vision_proj.to(self.dtype)
        if towers != "image":
            self._text = BlipTextTower(model, source, precision)

    @torch.inference_mode()
    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        with float32_arithmetic(self.precision):
            tokens = self.visual(pixel_values=self.normalise(pixels)).last_hidden_state
            features = self._project(tokens[:, 0])
        return features.float(), tokens[:, 1:].float()


class BlipTextTower:
    """BLIP's text model as a `TextTower`; not causal, so common prefixes cannot be shared."""

    def __init__(self, model: Any, source: EncoderSource, precision: str) -> None:
        self._model = model.text_encoder
        self._project = model.text_proj
        self._precision = precision
        self.logit_scale = -math.log(TEMPERATURE)
        for part in (self._model, self._project):
            part.to(dtype_of(precision))
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            str(source.folder), local_files_only=True, trust_remote_code=False
        )
        self._table = self._model.embeddings.word_embeddings.weight
        self.width = int(self._table.shape[1])
        self.dim = source.dim
        self.context_length = int(self._model.config.max_position_embeddings)
        self.start = int(self._tokenizer.cls_token_id)
        self.end = int(self._tokenizer.sep_token_id)

    def tokens(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        index = torch.as_tensor(ids, dtype=torch.long, device=self._table.device)
        rows: Tensor = self._table.detach()[index]
        return rows.float()

    def encode(self, tree: PromptTree, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        return self.encode_plain(tree.sequences(), lexicon, checkpoint=checkpoint)

    def encode_plain(self, sequences: Prompts, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        rows = torch.from_numpy(pad_prompts(sequences)).to(lexicon.device)
        check_length(rows.shape[1], self.context_length)
        real = rows >= 0
        x = lexicon[rows.clamp(min=0)].to(self._table.dtype)  # [P, L, width]
        if checkpoint and x.requires_grad:
            features: Tensor = recompute(self._features, x, real, use_reentrant=False)
            return features
        return self._features(x, real)

    def _features(self, x: Tensor, real: Tensor) -> Tensor:
        inputs = x.clone()  # the library adds positions in place
        with float32_arithmetic(self._precision):
            output = self._model(inputs_embeds=inputs, attention_mask=real.long())
            features: Tensor = self._project(output.last_hidden_state[:, 0])
        return features.float()

    @torch.no_grad()
    def encode_blocks(self, sequences: Prompts, lexicon: Tensor, block: int = 1024) -> Tensor:
        rows = pad_prompts(sequences)
        features = torch.empty((len(rows), self.dim), device=lexicon.device)
        for prompts, tree in tree_blocks(rows, block):
            features[torch.from_numpy(prompts).to(features.device)] = self.encode(tree, lexicon)
        return features


def _build_blip(source: EncoderSource) -> Any:
    import transformers

    config = transformers.BlipConfig(**strangers.known_blip_options(source.architecture["blip"]))
    model: Any = transformers.BlipForImageTextRetrieval(config)
    missing = model.load_state_dict(read_weights(source.weights), strict=False).missing_keys
    missing = [name for name in missing if not name.endswith("position_ids")]
    if missing:
        raise DuplexError(f"{source.weights} lacks {missing[0]!r}, so it does not hold {RETRIEVAL}")
    return model.eval().requires_grad_(False)


class TimmFamily(EncoderFamily):
    """timm's classifiers, named `timm:MODEL`; their weights are a published tag, a file or random."""

    usage = "timm:MODEL (images alone)"
    has_text = False

    def find(self, name: str, weights: str | None) -> EncoderSource:
        config, path = self._published(name, weights)
        model = name.removeprefix(TIMM_PREFIX)
        options = {"mean": list(config.mean), "std": list(config.std), "interpolation": config.interpolation}
        size = {"image_size": config.input_size[-1]}
        with torch.device("meta"):  # allocates no weights
            shape: Any = timm.create_model(model, pretrained=False, num_classes=0)
        width = int(getattr(shape, "head_hidden_size", shape.num_features))
        architecture = {"timm_model_name": model, "embed_dim": width, "vision_cfg": size}
        if path is None:
            path = base.fetch_from_hub(config.hf_hub_id, TIMM_FILES, f"{name} + {weights}")
        preprocess = complete_preprocess(options, architecture)
        return EncoderSource(name, architecture, preprocess, path, seed=random_seed(weights))

    @staticmethod
    def _published(name: str, weights: str | None) -> tuple[Any, Path | None]:
        # timm's configuration, and the path of local (or random) weights; None for a published tag
        model = name.removeprefix(TIMM_PREFIX)
        if not timm.is_model(model):
            raise UsageError(f"unknown encoder {name!r}; `timm.list_models()` lists the models of timm")
        published: Any = map(timm.get_pretrained_cfg, timm.list_pretrained(f"{model}.*"))
        # others than the hub's are pickles
        tags = [config.tag for config in published if config is not None and config.hf_hub_id]
        listed = ", ".join(tags) or "none"
        if weights is None:
            raise UsageError(f"{name!r} needs weights; give `weights` (--weights), a file or a tag ({listed})")
        path = Path(weights).expanduser()
        is_local = path.is_file() or random_seed(weights) is not None
        if not is_local and weights not in tags:
            raise UsageError(f"weights {weights!r} are neither a file nor a tag of {name!r} (its tags: {listed})")
        config: Any = timm.get_pretrained_cfg(model if is_local else f"{model}.{weights}")
        return config, path if is_local else None

    def missing_weights(self, name: str, weights: str | None) -> MissingWeights | None:
        config, path = self._published(name, weights)
        if path is not None or hub_file_on_disk(config.hf_hub_id, TIMM_FILES):
            return None
        return MissingWeights(f"https://huggingface.co/{config.hf_hub_id}", None)

    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> TimmEncoder:
        return TimmEncoder(source, towers=towers, device=device, precision=precision)


class TimmEncoder(EncoderBase):
    text = None

    def __init__(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> None:
        super().__init__(source, device=device, precision=precision)
        if towers != "text":
            self._visual = _build_timm(source).to(self.device, self.dtype)

    @torch.inference_mode()
    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        with float32_arithmetic(self.precision):
            cells = self.visual.forward_features(self.normalise(pixels))
            features = self.visual.forward_head(cells)
        return features.float(), patch_tokens(self.visual, cells).float()


def _build_timm(source: EncoderSource) -> Any:
    name = source.architecture["timm_model_name"]
    create = partial(timm.create_model, name, pretrained=False, num_classes=0)
    if source.seed is not None:
        with initialised_by(source.seed):
            return create().eval().requires_grad_(False)
    model: Any = create()
    classifier = str(model.default_cfg.get("classifier", "fc"))
    stored = read_weights(source.weights)
    state = {key: value for key, value in stored.items() if key.partition(".")[0] != classifier}
    expected = model.state_dict()
    shapes = {key: value.shape for key, value in state.items()}
    absent = [key for key, value in expected.items() if shapes.get(key) != value.shape]
    unknown = sorted(set(state) - set(expected))
    if absent or unknown:
        problem = f"holds the unknown tensor {unknown[0]!r} and lacks" if unknown else "lacks"
        names = ", ".join(map(repr, (absent or list(expected))[:3]))
        raise DuplexError(
            f"{source.weights} does not hold the weights of {source.name!r} in timm's layout: "
            f"it {problem} {len(absent)} of {len(expected)} tensors; "
            f"give tensors with timm's names and shapes, such as {names}"
        )
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)
