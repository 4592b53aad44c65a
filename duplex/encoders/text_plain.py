"""Prompts encoded one by one through the tower's own blocks: the reference, and the way of towers that are not causal.

Where only the end token is read and no token sees a later one, whatever follows the end cannot matter and prompts are
cut to the longest. Everywhere else a prompt is filled up to the context length with the padding token, as the model's
own tokenizer would have done.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders.prompt_tree import PAD, Ints
from duplex.encoders.text_parts import TextParts


def encode(
    parts: TextParts, sequences: Ints, lexicon: Tensor, padding: Tensor | None, checkpoint: bool = False
) -> Tensor:
    """[P, dim] from padded lexicon rows `[P, L]`; `padding` `[width]` is None where it cannot matter. `checkpoint`
    recomputes blocks in the backward pass."""
    device = lexicon.device
    rows = torch.from_numpy(sequences).to(device)
    if padding is not None:
        rows = F.pad(rows, (0, parts.context_length - rows.shape[1]), value=PAD)
    real = rows != PAD
    x = F.embedding(rows.clamp(min=0), lexicon)  # [P, L, width]
    filler = x.new_zeros(()) if padding is None else padding.to(x)
    x = torch.where(real[..., None], x, filler).to(parts.positions.dtype)
    if parts.cls is not None:
        x = torch.cat([x, parts.cls.expand(len(x), 1, -1)], 1)
    x = x + parts.positions[: x.shape[1]]
    mask = _mask(parts, real, x)
    with torch.autocast(device.type, parts.dtype, enabled=parts.dtype in (torch.bfloat16, torch.float16)):
        for block in parts.blocks:
            if checkpoint and x.requires_grad:
                x = recompute(block, x, attn_mask=mask, use_reentrant=False)
            else:
                x = block(x, attn_mask=mask)
    return parts.finish(_pooled(parts, x, real).to(parts.positions.dtype))


def _mask(parts: TextParts, real: Tensor, x: Tensor) -> Tensor | None:
    """[L, L], or [P * heads, L, L] where padding is masked as well; added to the scores."""
    length = x.shape[1]
    mask = None if parts.mask is None else parts.mask[:length, :length].to(x)
    if parts.cls is None and not parts.mask_padding:
        return mask
    valid = real
    if parts.cls is not None:
        one = torch.ones_like(real[:, :1])
        valid = torch.cat([real, one] if parts.cls_mask_after else [one, real], 1)
    hidden = torch.zeros_like(valid, dtype=x.dtype).masked_fill(~valid, float("-inf"))  # [P, L]
    each = hidden[:, None].expand(-1, length, -1).repeat_interleave(parts.heads, 0)
    return each if mask is None else each + mask


def _pooled(parts: TextParts, x: Tensor, real: Tensor) -> Tensor:
    """[P, width] the state that the feature is read from."""
    if parts.pools_end:
        return x[torch.arange(len(x), device=x.device), real.sum(1) - 1]
    return x[:, 0] if parts.cls is None and parts.pool == "first" else x[:, -1]
