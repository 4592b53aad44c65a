"""Small text towers with random weights, and prompts for them."""

from typing import Any

import torch
from torch import Tensor, nn

from duplex.encoders.libraries import open_clip

VISION = {"image_size": 8, "layers": 1, "width": 16, "patch_size": 8, "head_width": 8}
VOCABULARY, CONTEXT = 64, 12
START, END = VOCABULARY - 2, VOCABULARY - 1


class FakeTokenizer:
    """Words are numbers; what stands before, after and behind a text is chosen by the test."""

    def __init__(self, opening: list[int], closing: list[int], padding: int) -> None:
        self.opening, self.closing, self.padding = opening, closing, padding

    def encode(self, text: str) -> list[int]:
        return [int(word) if word.isdigit() else 7 for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def __call__(self, texts: list[str], context_length: int = CONTEXT) -> Tensor:
        rows = [[*self.opening, *self.encode(text), *self.closing] for text in texts]
        return torch.tensor([row + [self.padding] * (context_length - len(row)) for row in rows])


def small_model(
    text: dict[str, Any] | None = None, *, quick_gelu: bool = False, custom: bool = False, coca: bool = False
) -> Any:
    """A float64 model in which no weight, bias or norm is at its neutral start."""
    config = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": 2} | (text or {})
    torch.manual_seed(0)
    model: nn.Module
    if coca:
        decoder = {"context_length": CONTEXT, "width": 16, "heads": 2, "layers": 1}
        vision = VISION | {"attentional_pool": True}
        model = open_clip.CoCa(8, multimodal_cfg=decoder, text_cfg=config, vision_cfg=vision)
    else:
        model = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(8, VISION, config, quick_gelu=quick_gelu)
    model = model.double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def text_ids(sequences: list[list[int]], padding: int = 0) -> Tensor:
    """What a tokenizer would hand to `encode_text`."""
    return torch.tensor([s + [padding] * (CONTEXT - len(s)) for s in sequences])
