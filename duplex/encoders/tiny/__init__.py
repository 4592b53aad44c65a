"""The packaged tiny CLIP: an open_clip architecture with weights small enough to ship, for the embedded benchmark.

`train.py` beside this file made the weights. Only the token rows of words that its captions used are kept; a text with
another word has no meaning to this model and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duplex.system.files import write_tensors

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent
CONFIG, WEIGHTS = HERE / "model.json", HERE / "weights.safetensors"
TOKENS = "token_embedding.weight"


def load_config(path: Path = CONFIG) -> dict[str, Any]:
    """`architecture` (open_clip's arguments) and `preprocess` (how a picture becomes a tensor)."""
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def build(config: Mapping[str, Any]) -> torch.nn.Module:
    """The model with random weights."""
    from duplex.encoders.openclip import CLIP

    model: torch.nn.Module = CLIP(**config["architecture"])
    return model


def load_state(folder: Path = HERE) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """(config, float32 state dict, token rows in use). The embedding is full size; rows not in use are NaN, so that a
    token nobody trained cannot pass unnoticed."""
    import torch
    from safetensors.torch import load_file

    config = load_config(folder / CONFIG.name)
    stored = load_file(folder / WEIGHTS.name)
    rows = stored.pop("token_rows").long()
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    text = config["architecture"]["text_cfg"]
    embedding = torch.full((text["vocab_size"], text["width"]), float("nan"))
    embedding[rows] = state[TOKENS]
    return config, {**state, TOKENS: embedding}, rows


def save_state(model: torch.nn.Module, rows: torch.Tensor, folder: Path = HERE) -> Path:
    """Write the weights in half precision. `model` embeds only the tokens in use; `rows` are their vocabulary ids."""
    import torch

    tensors = {n: t.half() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    tensors["token_rows"] = rows.to(torch.int32)
    path = folder / WEIGHTS.name
    write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    return path


@cache
def _tokenizer() -> Any:
    from duplex.encoders.openclip import SimpleTokenizer

    return SimpleTokenizer()


def unknown_words(texts: Iterable[str]) -> list[str]:
    """The words of some texts that the packaged encoder has never seen, each once, in their order."""
    rows = set(load_state()[2].tolist())
    words = dict.fromkeys(word for text in texts for word in text.lower().split())
    return [word for word in words if not rows.issuperset(_tokenizer().encode(word))]
