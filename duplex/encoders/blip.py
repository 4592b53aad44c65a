"""BLIP (Li et al., 2022) behind the encoders' interface: the two unimodal sides of its image-text retrieval model.

    encoder: {name: "blip:Salesforce/blip-itm-base-coco"}      # a repository of the hub, or blip:FOLDER

A picture's feature is the projected class token of the vision model, a text's that of the text model; the temperature
is that of BLIP's contrastive loss at its start. Needs the extra: pip install 'duplex[blip]'.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders.arithmetic import arithmetic
from duplex.encoders.clip import PictureTransform
from duplex.encoders.hub import fetch_from_hub
from duplex.encoders.openclip import LOADING, load_state_dict
from duplex.encoders.prompt_tree import Prompts, PromptTree, blocks, padded
from duplex.encoders.source import EncoderSource, complete_preprocess
from duplex.errors import DuplexError
from duplex.system.precision import dtype_of

BLIP = "blip:"
TEMPERATURE = 0.07
WORDS = ("tokenizer.json", "vocab.txt")  # whichever a folder has


def blip_source(name: str) -> EncoderSource:
    """`blip:FOLDER` or `blip:OWNER/MODEL`: its config, its pictures' preprocessing, its weights, its words."""
    place = name.removeprefix(BLIP)
    folder = Path(place).expanduser()
    if not folder.is_dir():
        files = ("config.json", "preprocessor_config.json", "model.safetensors")
        folder = [fetch_from_hub(place, (file,), name) for file in files][-1].parent
        fetch_from_hub(place, WORDS, name)
    config, prepared = (_read(folder / file) for file in ("config.json", "preprocessor_config.json"))
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise DuplexError(f"{weights} does not exist; the encoder's weights are missing and never made up")
    try:
        given = {"mean": prepared["image_mean"], "std": prepared["image_std"], "interpolation": "bicubic"}
        size = {"image_size": config["vision_config"]["image_size"]}
        architecture = {"blip": config, "embed_dim": config["image_text_hidden_size"], "vision_cfg": size}
    except (KeyError, TypeError) as error:
        raise DuplexError(f"{folder} is not of BLIP's retrieval model: it lacks {error}") from error
    preprocess = complete_preprocess({**given, "resize_mode": "squash"}, architecture)
    if Path(place).expanduser().is_dir():  # which may be moved
        name = BLIP + hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()[:12]
    return EncoderSource(name, architecture, preprocess, weights, folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DuplexError(f"{path} cannot be read ({error}); a BLIP folder needs it") from error


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise DuplexError("BLIP needs the transformers library: pip install 'duplex[blip]'") from error
    return transformers


class BlipEncoder:
    """A BLIP model, frozen."""

    def __init__(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> None:
        self.name, self.dim, self.identity = source.name, source.dim, source.identity(precision)
        self.device, self._precision, self._dtype = torch.device(device), precision, dtype_of(precision)
        self.image_transform = PictureTransform(source.preprocess)
        model, self.logit_scale = _build(source).to(self.device), -math.log(TEMPERATURE)
        self._vision = (model.vision_model, model.vision_proj) if towers != "text" else None
        self._text = BlipText(model, source, precision) if towers != "image" else None
        for part in self._vision or ():
            part.to(self._dtype)
        mean, std = (torch.tensor(source.preprocess[key], device=self.device) for key in ("mean", "std"))
        self._mean, self._std = mean.view(3, 1, 1), std.view(3, 1, 1)

    @property
    def text(self) -> Any:
        if self._text is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its text tower; load it with towers='both'")
        return self._text

    def encode_images(self, pixels: Tensor) -> Tensor:
        """[B, 3, R, R] uint8 -> [B, d] float32, not normalised."""
        return self.encode_patches(pixels)[0]

    @torch.inference_mode()
    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The same features, and the last layer's patch tokens [B, T, w], float32."""
        if self._vision is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its image tower; load it with towers='both'")
        x = pixels.to(self.device).float().div_(255).sub_(self._mean).div_(self._std).to(self._dtype)
        with arithmetic(self._precision):
            tokens = self._vision[0](pixel_values=x).last_hidden_state
            features = self._vision[1](tokens[:, 0])
        return features.float(), tokens[:, 1:].float()

    @property
    def patches(self) -> tuple[int, int]:
        """(T, w) of one picture's patch tokens."""
        config = self._vision[0].config if self._vision is not None else None
        if config is None:
            raise DuplexError(f"encoder {self.name!r} was loaded without its image tower; load it with towers='both'")
        return (config.image_size // config.patch_size) ** 2, int(config.hidden_size)


class BlipText:
    """BLIP's text model over prompts of token embeddings, as `TextTower` is over CLIP's. Every token sees every other,
    so that prompts share no computation."""

    def __init__(self, model: Any, source: EncoderSource, precision: str) -> None:
        transformers = _library()
        self._model, self._project = model.text_encoder, model.text_proj
        self._precision, self.logit_scale = precision, -math.log(TEMPERATURE)
        for part in (self._model, self._project):
            part.to(dtype_of(precision))
        self._words = transformers.AutoTokenizer.from_pretrained(str(source.folder), local_files_only=True)
        self._table = self._model.embeddings.word_embeddings.weight
        self.width, self.dim = int(self._table.shape[1]), source.dim
        self.context_length = int(self._model.config.max_position_embeddings)
        self.start, self.end = int(self._words.cls_token_id), int(self._words.sep_token_id)

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, without start and end."""
        ids = self._words.encode(text, add_special_tokens=False)
        return [int(token) for token in ids]

    def embedding(self, ids: Any) -> Tensor:
        """[n, width] frozen token embeddings."""
        index = torch.as_tensor(ids, dtype=torch.long, device=self._table.device)
        rows: Tensor = self._table.detach()[index]
        return rows.float()

    def encode(self, tree: PromptTree, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        """[P, dim] each prompt's feature, differentiable in the lexicon."""
        return self.encode_plain(tree.sequences(), lexicon, checkpoint=checkpoint)

    def encode_plain(self, sequences: Prompts, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        rows = torch.from_numpy(padded(sequences)).to(lexicon.device)
        if rows.shape[1] > self.context_length:
            raise DuplexError(
                f"a prompt has {rows.shape[1]} tokens and this text tower reads {self.context_length}: "
                "shorten the context or the names"
            )
        there = rows >= 0
        x = lexicon[rows.clamp(min=0)].to(self._table.dtype)  # [P, L, width]
        if checkpoint and x.requires_grad:
            found: Tensor = recompute(self._features, x, there, use_reentrant=False)
            return found
        return self._features(x, there)

    def _features(self, x: Tensor, there: Tensor) -> Tensor:
        with arithmetic(self._precision):  # a copy: the library adds positions in place
            states = self._model(inputs_embeds=x.clone(), attention_mask=there.long()).last_hidden_state
            features: Tensor = self._project(states[:, 0])
        return features.float()

    @torch.no_grad()
    def encode_blocks(self, sequences: Prompts, lexicon: Tensor, block: int = 1024) -> Tensor:
        """[P, dim] without gradients, `block` prompts at a time."""
        rows = padded(sequences)
        out = torch.empty((len(rows), self.dim), device=lexicon.device)
        for chosen, tree in blocks(rows, block):
            out[torch.from_numpy(chosen).to(out.device)] = self.encode(tree, lexicon)
        return out


def _build(source: EncoderSource) -> Any:
    """The model with its file's weights: all of them."""
    transformers = _library()
    config = transformers.BlipConfig(**source.architecture["blip"])
    model = transformers.BlipForImageTextRetrieval(config)
    try:
        state = load_state_dict(str(source.weights))
    except LOADING as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise DuplexError(f"{source.weights} cannot be read as weights: {reason}") from error
    missing = model.load_state_dict(state, strict=False).missing_keys
    missing = [name for name in missing if not name.endswith("position_ids")]
    if missing:
        raise DuplexError(f"{source.weights} lacks {missing[0]!r}: it does not hold the weights of {source.name!r}")
    return model.eval().requires_grad_(False)
