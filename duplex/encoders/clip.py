"""CLIP models of open_clip as frozen encoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duplex.encoders.clip_text import ClipTextTower
from duplex.encoders.encoder_source import EncoderSource
from duplex.encoders.families import CatalogEntry, EncoderFamily, MissingWeights
from duplex.encoders.frozen_encoder import FrozenEncoder
from duplex.encoders.hub import weights_on_disk
from duplex.encoders.open_clip_source import build_model, find_source, missing_weights
from duplex.encoders.openclip import open_clip
from duplex.errors import DuplexError
from duplex.system.precision import float32_arithmetic


class ClipFamily(EncoderFamily):
    """Encoder family of all open_clip architectures, and of folders and hub repositories in open_clip's format."""

    usage = "local-dir:FOLDER and hf-hub:OWNER/NAME of open_clip"

    def find(self, name: str, weights: str | None) -> EncoderSource:
        return find_source(name, weights)

    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> ClipEncoder:
        return ClipEncoder(source, towers=towers, device=device, precision=precision)

    def missing_weights(self, name: str, weights: str | None) -> MissingWeights | None:
        return missing_weights(name, weights)

    def catalog(self) -> list[CatalogEntry]:
        entries = []
        for name in open_clip.list_models():
            tags = tuple(open_clip.list_pretrained_tags_by_model(name))
            on_disk = tuple(tag for tag in tags if weights_on_disk(open_clip.get_pretrained_cfg(name, tag)))
            entries.append(CatalogEntry(name, int(open_clip.get_model_config(name)["embed_dim"]), tags, on_disk))
        return entries


class ClipEncoder(FrozenEncoder):
    """A frozen open_clip model as an encoder."""

    def __init__(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> None:
        super().__init__(source, device=device, precision=precision)
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
        return open_clip.get_tokenizer(source.name if source.folder is None else f"local-dir:{source.folder}")

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
            return features.float(), as_tokens(cells).float()
        if not hasattr(self.visual, "forward_intermediates") or not hasattr(self.visual, "ln_post"):
            raise DuplexError(f"encoder {self.name!r} has no patch tokens; extract with --tokens none")
        with float32_arithmetic(self.precision):
            output = self.visual.forward_intermediates(
                self.normalise(pixels), indices=1, normalize_intermediates=True, output_fmt="NLC"
            )
        return output["image_features"].float(), output["image_intermediates"][-1].float()


def as_tokens(cells: Tensor) -> Tensor:
    """A feature map [B, w, H, W] as tokens [B, H*W, w]; an input [B, T, w] is returned unchanged."""
    return cells.flatten(2).transpose(1, 2) if cells.ndim == 4 else cells
