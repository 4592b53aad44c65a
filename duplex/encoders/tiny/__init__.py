"""The packaged tiny CLIP for the benchmark `shapes`, trained by `benchmarks/train_tiny_encoder.py`.

It has embeddings only for the words of its training captions; other words raise an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duplex.encoders.base import PACKAGED, CatalogEntry, EncoderFamily, EncoderSource, read_config, refuse_other_weights
from duplex.encoders.libraries import open_clip
from duplex.encoders.open_clip import ClipEncoder, complete_preprocess, read_weights
from duplex.encoders.tiny import tower  # noqa: F401 (registers the image tower)
from duplex.errors import UsageError

CONFIG = Path(__file__).with_name("model.json")
WEIGHTS = Path(__file__).with_name("weights.safetensors")
TAG = "packaged"  # of the weights
TOKENS = "token_embedding.weight"
_tokenizer = cache(open_clip.SimpleTokenizer)


def load_state(path: Path = WEIGHTS) -> tuple[dict[str, Tensor], Tensor]:
    """Read the float32 weights (NaN: untrained token embeddings), and the trained tokens' ids."""
    stored = read_weights(path)
    rows = stored.pop("token_rows").long()
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    text = read_config(CONFIG)["architecture"]["text_cfg"]
    embedding = torch.full((text["vocab_size"], text["width"]), float("nan"))
    embedding[rows] = state[TOKENS]
    return {**state, TOKENS: embedding}, rows


class TinyFamily(EncoderFamily):
    """The encoder family whose only member is the packaged encoder `tiny`."""

    def find(self, name: str, weights: str | None = None) -> EncoderSource:
        if name != PACKAGED:
            raise UsageError(f"unknown encoder {name!r}; the packaged encoder is named {PACKAGED!r}")
        refuse_other_weights(name, weights, TAG)
        config = read_config(CONFIG, ("architecture", "preprocess"))
        preprocess = complete_preprocess(config["preprocess"], config["architecture"])
        return EncoderSource(PACKAGED, config["architecture"], preprocess, WEIGHTS)

    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> ClipEncoder:
        return TinyEncoder(source, towers=towers, device=device, precision=precision)

    def missing_weights(self, name: str, weights: str | None) -> None:
        self.find(name, weights)

    def unknown_words(self, texts: Iterable[str]) -> list[str]:
        rows = set(load_state()[1].tolist())
        words = dict.fromkeys(word for text in texts for word in text.lower().split())
        return [word for word in words if not rows.issuperset(_tokenizer().encode(word))]

    def catalog(self) -> list[CatalogEntry]:
        return [CatalogEntry(PACKAGED, self.find(PACKAGED).dim, (TAG,), (TAG,))]


class TinyEncoder(ClipEncoder):
    def build(self, source: EncoderSource) -> Any:
        model = open_clip.CLIP(**source.architecture)
        model.load_state_dict(load_state(source.weights)[0])
        return model.eval().requires_grad_(False)

    def tokenizer(self, source: EncoderSource) -> None:
        return None
