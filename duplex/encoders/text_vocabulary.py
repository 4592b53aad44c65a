"""Tokenizers with their frozen token embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from duplex.errors import DuplexError


@dataclass(frozen=True)
class TokenFrame:
    """The token ids that a tokenizer adds to a text: before it, after it, and as padding."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    padding: int


class Vocabulary:
    """A tokenizer and its embedding table `[V, width]`; rows without a trained embedding are NaN and refused."""

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
        """The tokenizer with `encode` and `decode`: open_clip wraps those of other libraries."""
        return getattr(self.tokenizer, "tokenizer", self.tokenizer)

    @cached_property
    def frame(self) -> TokenFrame:
        """The frame, found by tokenizing a text of one word."""
        ids = [int(i) for i in self.tokenizer(["a"], context_length=16)[0]]
        word = self._ids("a")
        start = next((i for i in range(len(ids)) if ids[i : i + len(word)] == word), None)
        if start is None:
            raise DuplexError(
                "this encoder's tokenizer writes a word differently inside a text; choose another encoder"
            )
        closing, pad = ids[start + len(word) :], ids[-1]
        while closing and closing[-1] == pad:
            closing.pop()
        return TokenFrame(tuple(ids[:start]), tuple(closing), pad)

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text without its frame; raise DuplexError for a word without an embedding."""
        ids = self._ids(text)
        if not self._untrained.isdisjoint(ids):
            known = (word for word in text.split() if not self._untrained.isdisjoint(self._ids(word)))
            raise self._unknown(next(known, text))
        return ids

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Return the frozen embeddings [n, width] of token ids."""
        index = torch.as_tensor(ids, dtype=torch.long, device=self.table.device)
        for token in index.flatten().tolist():
            if not 0 <= token < len(self.table):
                raise DuplexError(f"token {token} is not among this text tower's {len(self.table)}")
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
