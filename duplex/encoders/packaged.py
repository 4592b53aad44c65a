"""The tiny CLIP that ships with the package: half-precision weights and only the vocabulary that it has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from open_clip.tokenizer import SimpleTokenizer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from duplex.encoders.source import EncoderSource
from duplex.errors import DuplexError

ROWS = "token_rows"


def read_weights(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The full state: tokens without a stored row are NaN, so that nothing computed from one can pass for a feature."""
    stored = _read(path)
    rows = stored.pop(ROWS).long()
    for name in list(stored):
        if name.endswith("token_embedding.weight"):
            full = torch.full(expected[name].shape, torch.nan)
            full[rows] = stored[name].float()
            stored[name] = full
    return {name: tensor.to(expected[name].dtype) for name, tensor in stored.items()}


class PackagedTokenizer(SimpleTokenizer):
    """CLIP's tokenizer, which refuses words that the packaged encoder has no embedding for."""

    def __init__(self, source: EncoderSource) -> None:
        super().__init__(context_length=source.architecture["text_cfg"].get("context_length", 77))
        self.known = frozenset(_read(source.weights)[ROWS].tolist())

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = super().encode(text)
        if not self.known.issuperset(tokens):
            words = [
                word for word in text.split() if not self.known.issuperset(super(PackagedTokenizer, self).encode(word))
            ]
            named = words[0] if words else text
            raise DuplexError(
                f"the packaged encoder has never seen the word {named!r}; choose an encoder with a full vocabulary in "
                "params.yaml (`duplex encoders list`)"
            )
        return tokens


def _read(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DuplexError(f"{path} cannot be read ({error}); reinstall the package") from None
