"""A frozen text tower that turns prompts of token embeddings into semantic prototypes (the paper's Eq. 2 and 7).

Training re-encodes every prompt at every step, with gradients to the learned tokens. The tower therefore encodes a
`PromptTree`: matrix products run once for each distinct prefix, attention runs over each prefix's own ancestors, and
the last layer runs for the prompts' ends alone. `docs/text.md` has the argument and the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders import text_plain
from duplex.encoders.arithmetic import arithmetic
from duplex.encoders.prompt_tree import Prompts, PromptTree, blocks, padded
from duplex.encoders.text_attention import attend
from duplex.encoders.text_layout import Attention, Layout
from duplex.encoders.text_parts import TextParts
from duplex.encoders.text_vocabulary import Vocabulary
from duplex.errors import DuplexError

QUICK = 1.702  # QuickGELU's constant


class TextTower:
    """Prompts of token embeddings to features `[P, dim]`, not normalised, differentiable in the embeddings alone.

    A prompt is a list of rows of a *lexicon* `[V, width]`: start token, context, names, end token, frozen or learned.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, precision: str = "fp32") -> None:
        """`model` is an open_clip model; only its text part is kept. `tokenizer` is CLIP's own unless given."""
        self.parts, self.precision = TextParts.of(model, precision), precision
        self.vocabulary = Vocabulary(self.parts.table, tokenizer)
        self.width, self.dim = self.parts.width, self.parts.dim
        self.context_length, self.logit_scale = self.parts.context_length, self.parts.logit_scale
        self.shares_prefixes = self.parts.shares_prefixes
        self._layouts: WeakKeyDictionary[PromptTree, dict[torch.device, Layout]] = WeakKeyDictionary()

    # -- words ------------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """Id of the token that begins every text."""
        return _single(self.vocabulary.frame.opening, "start")

    @property
    def end(self) -> int:
        """Id of the token that ends every text."""
        return _single(self.vocabulary.frame.closing, "end")

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, without start and end."""
        return self.vocabulary.tokens(text)

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        """[n, width] frozen token embeddings."""
        return self.vocabulary.embedding(ids)

    # -- prompts ----------------------------------------------------------------------------------------------

    def encode(self, tree: PromptTree, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        """[P, dim] each prompt's feature. `checkpoint` recomputes layers in the backward pass to keep less."""
        if not self.shares_prefixes:
            return self.encode_plain(tree.sequences(), lexicon, checkpoint=checkpoint)
        self._check(tree.length, int(tree.rows.max()), lexicon)
        with arithmetic(self.precision):
            return self._shared(self._layout(tree, lexicon.device), lexicon, checkpoint)

    def encode_plain(self, sequences: Prompts, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        """[P, dim] the same, every prompt by itself through the tower's own blocks."""
        rows = padded(sequences)
        self._check(rows.shape[1], int(rows.max()), lexicon)
        free = self.parts.causal and self.parts.pools_end
        with arithmetic(self.precision):
            return text_plain.encode(self.parts, rows, lexicon, None if free else self._padding(), checkpoint)

    @torch.no_grad()
    def encode_blocks(self, sequences: Prompts, lexicon: Tensor, block: int = 4096) -> Tensor:
        """[P, dim] without gradients, `block` prompts at a time: memory beside the result does not grow with P."""
        rows = padded(sequences)
        out = lexicon.new_empty((len(rows), self.dim), dtype=self.parts.positions.dtype)
        for chosen, tree in blocks(rows, block):
            out[torch.from_numpy(chosen).to(out.device)] = self.encode(tree, lexicon)
        return out

    # -- inside -----------------------------------------------------------------------------------------------

    def _shared(self, layout: Layout, lexicon: Tensor, checkpoint: bool) -> Tensor:
        """[P, dim] each prompt's feature, every distinct prefix computed once."""
        x = F.embedding(layout.entry_rows, lexicon).to(self.parts.positions.dtype)
        x = x + self.parts.positions[layout.entry_depths]  # [E, width]
        for block, plan in zip(self.parts.blocks, layout.layers, strict=True):
            if checkpoint and x.requires_grad:
                x = recompute(self._layer, block, x, plan, use_reentrant=False)
            else:
                x = self._layer(block, x, plan)
        return F.embedding(layout.ends, self.parts.finish(x))

    def _layer(self, block: Any, x: Tensor, plan: Attention) -> Tensor:
        """[Q, width] a block's output for the plan's queries, from all states `[R, width]`."""
        dtype, attention = self.parts.dtype, block.attn
        states = F.linear(block.ln_1(x).to(dtype), attention.in_proj_weight, attention.in_proj_bias)
        o = attention.out_proj(attend(states, plan))
        x = _take(x, plan.taken) + block.ls_1(o.to(x.dtype))
        found: Tensor = x + block.ls_2(_mlp(block.mlp, block.ln_2(x).to(dtype)).to(x.dtype))
        return found

    def _layout(self, tree: PromptTree, device: torch.device) -> Layout:
        """Index tensors are built once for a tree and a device."""
        held = self._layouts.setdefault(tree, {})
        if device not in held:
            held[device] = Layout.of(tree, len(self.parts.blocks), self.parts.heads, device)
        return held[device]

    def _check(self, length: int, row: int, lexicon: Tensor) -> None:
        if length > self.context_length:
            raise DuplexError(
                f"a prompt has {length} tokens and this text tower reads {self.context_length}: "
                "shorten the context or the names"
            )
        if lexicon.ndim != 2 or lexicon.shape[1] != self.width:
            raise DuplexError(f"token embeddings {tuple(lexicon.shape)} do not fit a text tower of width {self.width}")
        if row >= len(lexicon):
            raise DuplexError(f"a prompt names row {row} of a lexicon of {len(lexicon)} rows")

    def _padding(self) -> Tensor:
        return self.vocabulary.embedding([self.vocabulary.frame.padding])[0]


def _single(ids: tuple[int, ...], name: str) -> int:
    if len(ids) != 1:
        raise DuplexError(f"this encoder's tokenizer has no single {name} token; choose a CLIP encoder for prompts")
    return ids[0]


def _mlp(mlp: Any, h: Tensor) -> Tensor:
    """[n, width]. QuickGELU, `x σ(1.702 x)`, is `silu(z) / 1.702` with `z = 1.702 x`: one pass over the wide activation
    and one tensor kept for the gradient where open_clip's own takes three of each."""
    if type(mlp.gelu).__name__ != "QuickGELU":
        own: Tensor = mlp(h)
        return own
    z = torch.addmm(mlp.c_fc.bias, h, mlp.c_fc.weight.t(), beta=QUICK, alpha=QUICK)  # [n, 4 * width]
    return torch.add(mlp.c_proj.bias, F.linear(F.silu(z), mlp.c_proj.weight), alpha=1 / QUICK)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows of `x`; unlike indexing, its gradient is summed in a fixed order on every device."""
    return x if index is None else F.embedding(index, x)
