"""The text part of an open_clip model of any class, and its tokenizer with frozen token embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from duplex.errors import DuplexError, require
from duplex.system.precision import dtype_of

CHILDREN = {"ln_1", "attn", "ls_1", "ln_2", "mlp", "ls_2"}  # of a block whose attention a prompt tree can replace


@dataclass(frozen=True, eq=False)
class TextParts:
    """The frozen modules and settings of an open_clip text tower that turn token embeddings into text features."""

    blocks: nn.ModuleList
    table: Tensor  # [V, width] token embeddings
    positions: Tensor  # [positions, width]
    norm: nn.Module
    projection: Tensor | nn.Linear | None
    mask: Tensor | None  # [positions, positions] added to scores; None: every token attends to every other
    pool: str
    heads: int
    cls: Tensor | None  # [width] CoCa's class token, after the padding
    cls_mask_after: bool  # whether CoCa's padding mask has the class token last (its position) or first
    mask_padding: bool
    context_length: int  # tokens of a text, without CoCa's class token
    logit_scale: float  # ln(1/τ), as open_clip stores it
    dtype: torch.dtype  # of matrix products

    @classmethod
    def of(cls, model: Any, precision: str = "fp32") -> TextParts:
        """The text part of an open_clip model, frozen; parameters are copied only to convert their precision."""
        dtype = dtype_of(precision)
        text = getattr(model, "text", model)
        blocks = getattr(getattr(text, "transformer", None), "resblocks", None)
        if blocks is None:
            raise DuplexError(
                f"the text tower {type(text).__name__} does not take token embeddings, which prompts need; "
                "choose one with open_clip's own text transformer, such as ViT-B-32 (`duplex encoders list`)"
            )
        pool = getattr(text, "text_pool_type", None) or text.pool_type
        require(pool, ("argmax", "eos", "last", "first"), "pooling of a text tower")
        parts = cls(
            blocks=blocks,
            table=text.token_embedding.weight,
            positions=text.positional_embedding,
            norm=text.ln_final,
            projection=text.text_projection,
            mask=text.attn_mask,
            pool=pool,
            heads=int(blocks[0].attn.num_heads),
            cls=getattr(text, "cls_emb", None),
            cls_mask_after=bool(getattr(text, "correct_cls_mask", False)),
            mask_padding=bool(getattr(text, "use_pad_mask", False)),
            context_length=int(text.context_length),
            logit_scale=float(model.logit_scale.detach()) if hasattr(model, "logit_scale") else 0.0,
            dtype=dtype,
        )
        parts = parts._converted()
        for module in (parts.blocks, parts.norm, parts.projection):
            if isinstance(module, nn.Module):
                module.eval().requires_grad_(False)
        return parts

    @property
    def width(self) -> int:
        return int(self.positions.shape[1])

    @property
    def dim(self) -> int:
        if self.projection is None:
            return self.width
        return self.projection.shape[1] if isinstance(self.projection, Tensor) else self.projection.out_features

    @property
    def pools_end(self) -> bool:
        """Whether the text feature is the hidden state of the end token."""
        return self.cls is None and self.pool in ("argmax", "eos")

    @property
    def causal(self) -> bool:
        """Whether a token attends to exactly the tokens before it and itself."""
        if self.mask is None or self.cls is not None or self.mask_padding:
            return False
        later = torch.ones_like(self.mask, dtype=torch.bool).triu(1)
        return bool(torch.equal(self.mask, torch.zeros_like(self.mask).masked_fill(later, float("-inf"))))

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts can be encoded as a prefix tree, which computes common prefixes once.

        This holds for causal towers of standard blocks whose text feature is the hidden state of the end token.
        """
        return (
            self.causal
            and self.pools_end
            and all(
                {name for name, _ in block.named_children()} == CHILDREN
                and isinstance(block.attn, nn.MultiheadAttention)
                and block.attn.in_proj_bias is not None
                for block in self.blocks
            )
        )

    def finish(self, x: Tensor) -> Tensor:
        """The text features [n, dim] of pooled hidden states [n, width], after norm and projection."""
        x = self.norm(x)
        if self.projection is None:
            return x
        return x @ self.projection if isinstance(self.projection, Tensor) else self.projection(x)

    def _converted(self) -> TextParts:
        wide = torch.float64 if self.positions.dtype == torch.float64 else torch.float32
        narrow = wide if self.dtype == torch.float32 else self.dtype
        changes: dict[str, Any] = {"dtype": narrow}
        if narrow != wide or any(weight.dtype != wide for weight in self.blocks.parameters()):
            blocks = copy.deepcopy(self.blocks).to(wide)
            for module in blocks.modules():
                if isinstance(module, nn.Linear | nn.MultiheadAttention):
                    module.to(narrow)
            changes["blocks"] = blocks
        for name in ("positions", "norm", "projection", "cls"):
            part = getattr(self, name)
            if isinstance(part, nn.Module):
                dtypes = {weight.dtype for weight in part.parameters()}
                changes[name] = part if dtypes <= {wide} else copy.deepcopy(part).to(wide)
            elif part is not None:
                changes[name] = part.detach().to(wide)
        return replace(self, **changes)


@dataclass(frozen=True)
class TokenFrame:
    """The token ids that a tokenizer adds to a text: before it, after it, and as padding."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    padding: int


class Vocabulary:
    """A tokenizer and its embedding table `[V, width]`; tokens without a trained embedding (NaN) raise DuplexError."""

    def __init__(self, table: Tensor, tokenizer: Any = None) -> None:
        self.table = table.detach()
        self._tokenizer = tokenizer
        untrained = self.table.isnan().any(1).nonzero().flatten()
        self._untrained = frozenset(untrained.tolist())

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, else CLIP's byte-pair tokenizer; loaded on first use."""
        if self._tokenizer is not None:
            return self._tokenizer
        from duplex.encoders.openclip import SimpleTokenizer

        return SimpleTokenizer()

    @cached_property
    def _inner(self) -> Any:
        return getattr(self.tokenizer, "tokenizer", self.tokenizer)

    @cached_property
    def frame(self) -> TokenFrame:
        """Token ids that the tokenizer adds to a text (start, end, padding), found by tokenizing one word."""
        ids = [int(i) for i in self.tokenizer(["a"], context_length=16)[0]]
        word = self._ids("a")
        start = next((i for i in range(len(ids)) if ids[i : i + len(word)] == word), None)
        if start is None:
            raise DuplexError(
                "this encoder's tokenizer gives a word other tokens inside a text than alone; choose another encoder"
            )
        closing, pad = ids[start + len(word) :], ids[-1]
        while closing and closing[-1] == pad:
            closing.pop()
        return TokenFrame(tuple(ids[:start]), tuple(closing), pad)

    def tokens(self, text: str) -> list[int]:
        """A text's token ids without start, end, padding; raises DuplexError for a word without an embedding."""
        ids = self._ids(text)
        if not self._untrained.isdisjoint(ids):
            known = (word for word in text.split() if not self._untrained.isdisjoint(self._ids(word)))
            raise self._unknown(next(known, text))
        return ids

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        """The frozen embeddings [n, width] of token ids."""
        index = torch.as_tensor(ids, dtype=torch.long, device=self.table.device)
        for token in index.flatten().tolist():
            if not 0 <= token < len(self.table):
                raise DuplexError(f"token {token} is not among the {len(self.table)} tokens of this text tower")
            if token in self._untrained:
                raise self._unknown(str(self._inner.decode([token])).strip())
        return self.table[index]

    def _ids(self, text: str) -> list[int]:
        clean: Callable[[str], str] | None = getattr(self.tokenizer, "clean_fn", None)
        if self._inner is self.tokenizer:
            return [int(i) for i in self.tokenizer.encode(text)]
        return [int(i) for i in self._inner.encode(clean(text) if clean else text, add_special_tokens=False)]

    def _unknown(self, word: str) -> DuplexError:
        return DuplexError(
            f"this encoder's text tower was trained without the word {word!r}; "
            "name another encoder (see `duplex encoders list`) or leave the word out"
        )
