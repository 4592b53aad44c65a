"""Classifiers of timm, without their heads, as frozen encoders of images.

    encoder: {name: "timm:resnet18", weights: a1_in1k}     # a tag that timm publishes, a file, or random:SEED

ResNet-18 is the backbone of the methods without CLIP. There is no text tower: word vectors come from a file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duplex.encoders.clip import as_tokens
from duplex.encoders.encoder_source import EncoderSource, complete_preprocess, read_weights
from duplex.encoders.families import EncoderFamily
from duplex.encoders.frozen_encoder import FrozenEncoder
from duplex.encoders.hub import fetch_weights
from duplex.encoders.openclip import timm
from duplex.encoders.random_weights import initialised_by, random_seed
from duplex.errors import DuplexError, UsageError
from duplex.system.precision import float32_arithmetic

PREFIX = "timm:"


class TimmFamily(EncoderFamily):
    """Encoder family of timm's classifiers, named `timm:MODEL`, with weights from a published tag or a file."""

    usage = "timm:MODEL (images alone)"

    def find(self, name: str, weights: str | None) -> EncoderSource:
        model = name.removeprefix(PREFIX)
        if not timm.is_model(model):
            raise UsageError(f"unknown encoder {name!r}: timm has no model {model!r}")
        published: Any = map(timm.get_pretrained_cfg, timm.list_pretrained(f"{model}.*"))
        tags = [config.tag for config in published if config is not None and config.hf_hub_id]  # others are pickles
        listed = ", ".join(tags) or "none"
        if weights is None:
            raise UsageError(f"encoder {name!r} needs weights: a file, or one of its tags ({listed})")
        path, seed = Path(weights).expanduser(), random_seed(weights)
        is_local = path.is_file() or seed is not None
        if not is_local and weights not in tags:
            raise UsageError(f"weights {weights!r} are neither a file nor a tag of {name!r} ({listed})")
        config: Any = timm.get_pretrained_cfg(model if is_local else f"{model}.{weights}")
        options = {"mean": list(config.mean), "std": list(config.std), "interpolation": config.interpolation}
        size = {"image_size": config.input_size[-1]}
        with torch.device("meta"):  # allocates no weights
            shape: Any = timm.create_model(model, pretrained=False, num_classes=0)
        architecture = {"timm_model_name": model, "embed_dim": int(shape.num_features), "vision_cfg": size}
        if not is_local:
            path = fetch_weights({"hf_hub": f"{config.hf_hub_id}/model.safetensors"}, f"{name} + {weights}")
        return EncoderSource(name, architecture, complete_preprocess(options, architecture), path, seed=seed)

    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> TimmEncoder:
        return TimmEncoder(source, towers=towers, device=device, precision=precision)


class TimmEncoder(FrozenEncoder):
    """A frozen timm classifier without its head, as an encoder of images."""

    text = None

    def __init__(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> None:
        super().__init__(source, device=device, precision=precision)
        if towers != "text":
            self._visual = _build(source).to(self.device, self.dtype)

    @torch.inference_mode()
    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        with float32_arithmetic(self.precision):
            cells = self.visual.forward_features(self.normalise(pixels))
            features = self.visual.forward_head(cells)
        return features.float(), as_tokens(cells).float()


def _build(source: EncoderSource) -> Any:
    create = partial(timm.create_model, source.architecture["timm_model_name"], pretrained=False, num_classes=0)
    if source.seed is not None:
        with initialised_by(source.seed):
            return create().eval().requires_grad_(False)
    model: Any = create()
    classifier = str(model.default_cfg.get("classifier", "fc"))
    state = read_weights(source.weights)
    state = {name: tensor for name, tensor in state.items() if name.partition(".")[0] != classifier}
    mismatched = sorted(set(state) ^ set(model.state_dict()))
    if mismatched:
        verb = "lacks" if mismatched[0] in model.state_dict() else "holds an unknown"
        raise DuplexError(f"{source.weights} {verb} {mismatched[0]!r}: it does not hold the weights of {source.name!r}")
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)
