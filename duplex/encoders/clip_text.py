"""The text tower of an open_clip model: features of prompts of token embeddings (the Duplex paper's Eq. 2 and 7).

Prompts are encoded as a prefix tree (`PromptTree`): matrix products run once per distinct prefix, attention runs over
each prefix's ancestors, and the last layer runs for each prompt's end token alone. `docs/text.md` has the derivation
and timings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders.prompt_tree import PAD, Ints, Prompts, PromptTree, check_length, pad_prompts, tree_blocks
from duplex.encoders.text_attention import AttentionPlan, TreeLayout, attend
from duplex.encoders.text_parts import TextParts, Vocabulary
from duplex.errors import DuplexError
from duplex.system.precision import float32_arithmetic

QUICK = 1.702  # QuickGELU's constant


class ClipTextTower:
    """A frozen `TextTower` made of the text part of an open_clip model.

    Args:
        tokenizer: None for CLIP's byte-pair tokenizer.
        precision: number format of matrix products (norms and positions are float32).
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, precision: str = "fp32") -> None:
        self.parts = TextParts.of(model, precision)
        self.precision = precision
        self.vocabulary = Vocabulary(self.parts.table, tokenizer)
        self.width = self.parts.width
        self.dim = self.parts.dim
        self.context_length = self.parts.context_length
        self.logit_scale = self.parts.logit_scale
        self.shares_prefixes = self.parts.shares_prefixes
        self._layouts: WeakKeyDictionary[PromptTree, dict[torch.device, TreeLayout]] = WeakKeyDictionary()

    @property
    def start(self) -> int:
        return _single(self.vocabulary.frame.opening, "start")

    @property
    def end(self) -> int:
        return _single(self.vocabulary.frame.closing, "end")

    def tokens(self, text: str) -> list[int]:
        return self.vocabulary.tokens(text)

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        return self.vocabulary.embedding(ids)

    def encode(self, tree: PromptTree, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        if not self.shares_prefixes:
            return self.encode_plain(tree.sequences(), lexicon, checkpoint=checkpoint)
        self._check(tree.length, int(tree.rows.max()), lexicon)
        with float32_arithmetic(self.precision):
            return self._shared(self._layout(tree, lexicon.device), lexicon, checkpoint)

    def encode_plain(self, sequences: Prompts, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        rows = pad_prompts(sequences)
        self._check(rows.shape[1], int(rows.max()), lexicon)
        padding = None
        if not (self.parts.causal and self.parts.pools_end):
            padding = self.vocabulary.embedding([self.vocabulary.frame.padding])[0]
        with float32_arithmetic(self.precision):
            return encode_separately(self.parts, rows, lexicon, padding, checkpoint)

    @torch.no_grad()
    def encode_blocks(self, sequences: Prompts, lexicon: Tensor, block: int = 4096) -> Tensor:
        rows = pad_prompts(sequences)
        features = lexicon.new_empty((len(rows), self.dim), dtype=self.parts.positions.dtype)
        for prompts, tree in tree_blocks(rows, block):
            features[torch.from_numpy(prompts).to(features.device)] = self.encode(tree, lexicon)
        return features

    def _shared(self, layout: TreeLayout, lexicon: Tensor, checkpoint: bool) -> Tensor:
        """The text features [P, dim] of the P prompts in a prefix tree, computing every distinct prefix once."""
        x = F.embedding(layout.entry_rows, lexicon).to(self.parts.positions.dtype)
        x = x + self.parts.positions[layout.entry_depths]  # [E, width]
        for block, plan in zip(self.parts.blocks, layout.layers, strict=True):
            if checkpoint and x.requires_grad:
                x = recompute(self._layer, block, x, plan, use_reentrant=False)
            else:
                x = self._layer(block, x, plan)
        return F.embedding(layout.ends, self.parts.finish(x))

    def _layer(self, block: Any, x: Tensor, plan: AttentionPlan) -> Tensor:
        """Run a transformer block on hidden states `x` [R, width]; return the outputs [Q, width] of Q tokens.

        plan: index tensors of the attention, which list the Q tokens (queries) and the tokens that each attends to.
        """
        dtype, attention = self.parts.dtype, block.attn
        states = F.linear(block.ln_1(x).to(dtype), attention.in_proj_weight, attention.in_proj_bias)
        o = attention.out_proj(attend(states, plan))
        if plan.query_states is not None:  # unlike indexing, the gradient is summed in a fixed order on every device
            x = F.embedding(plan.query_states, x)
        x = x + block.ls_1(o.to(x.dtype))
        output: Tensor = x + block.ls_2(_mlp(block.mlp, block.ln_2(x).to(dtype)).to(x.dtype))
        return output

    def _layout(self, tree: PromptTree, device: torch.device) -> TreeLayout:
        """The index tensors by which a prefix tree of prompts is encoded; built once per tree and device."""
        layouts = self._layouts.setdefault(tree, {})
        if device not in layouts:
            layouts[device] = TreeLayout.of(tree, len(self.parts.blocks), self.parts.heads, device)
        return layouts[device]

    def _check(self, length: int, row: int, lexicon: Tensor) -> None:
        check_length(length, self.context_length)
        if lexicon.ndim != 2 or lexicon.shape[1] != self.width:
            raise DuplexError(f"token embeddings {tuple(lexicon.shape)} do not fit a text tower of width {self.width}")
        if row >= len(lexicon):
            raise DuplexError(f"a prompt uses token embedding {row}; expected one from 0 to {len(lexicon) - 1}")


def encode_separately(
    parts: TextParts, sequences: Ints, lexicon: Tensor, padding: Tensor | None, checkpoint: bool = False
) -> Tensor:
    """The text features [P, dim] of prompts, each encoded by itself in the tower's own blocks.

    Args:
        sequences: row in `lexicon` (the table of token embeddings) of each prompt's tokens [P, L], padded with -1.
        padding: embedding `[width]` of the padding token, to fill prompts up to the context length as the model's
            tokenizer does; None to fill them up to the longest, enough in a causal tower pooled at the end token.
        checkpoint: whether to recompute blocks in the backward pass.
    """
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
    if parts.pools_end:
        pooled = x[torch.arange(len(x), device=x.device), real.sum(1) - 1]
    else:
        pooled = x[:, 0] if parts.cls is None and parts.pool == "first" else x[:, -1]
    return parts.finish(pooled.to(parts.positions.dtype))


def _mask(parts: TextParts, real: Tensor, x: Tensor) -> Tensor | None:
    """The mask that is added to attention scores: [L, L], or [P * heads, L, L] if padding is masked, too.

    None if every token attends to every other. P: number of prompts. L: tokens per prompt.
    """
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


def _single(ids: tuple[int, ...], name: str) -> int:
    if len(ids) != 1:
        raise DuplexError(f"this encoder's tokenizer has no single {name} token; choose a CLIP encoder for prompts")
    return ids[0]


def _mlp(mlp: Any, h: Tensor) -> Tensor:
    """The output [n, width] of the MLP of a transformer block.

    QuickGELU, `x σ(1.702 x)`, is computed as `silu(z) / 1.702` with `z = 1.702 x`: one pass and one tensor saved for
    the gradient; open_clip's code takes three of each.
    """
    if type(mlp.gelu).__name__ != "QuickGELU":
        output: Tensor = mlp(h)
        return output
    z = torch.addmm(mlp.c_fc.bias, h, mlp.c_fc.weight.t(), beta=QUICK, alpha=QUICK)  # [n, 4 * width]
    return torch.add(mlp.c_proj.bias, F.linear(F.silu(z), mlp.c_proj.weight), alpha=1 / QUICK)
