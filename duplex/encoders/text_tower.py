"""The interface of text towers: prompts of token embeddings in, text features out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from duplex.encoders.prompt_tree import Prompts, PromptTree


class TextTower(Protocol):
    """A frozen text tower that takes token *embeddings*, so that learned and fixed tokens are encoded alike.

    A prompt is a sequence of rows of a *lexicon* `[V, width]`: start token, context, names, end token. The lexicon
    holds frozen rows from `embedding` and learned ones; gradients flow into the lexicon and nowhere else.
    """

    width: int  # of a token embedding
    dim: int  # of a text feature, equal to the encoder's `dim`
    context_length: int  # most tokens of a prompt, start and end included
    logit_scale: float  # ln(1/τ) of the pretrained model

    @property
    def start(self) -> int:
        """Token id that begins every text."""

    @property
    def end(self) -> int:
        """Token id that ends every text."""

    def tokens(self, text: str) -> list[int]:
        """The token ids of a text without start and end; raises DuplexError for a word without an embedding."""

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        """The frozen embeddings `[n, width]` of token ids."""

    def encode(self, tree: PromptTree, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        """The text features `[P, dim]` of prompts: not normalised, differentiable in `lexicon`.

        `tree` stores the prompts by their common prefixes, each of which is encoded once where the tower allows it.
        `checkpoint` recomputes activations in the backward pass to save memory.
        """

    def encode_plain(self, sequences: Prompts, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        """The text features `[P, dim]` of prompts, each encoded by itself, to check `encode` against."""

    def encode_blocks(self, sequences: Prompts, lexicon: Tensor, block: int = 4096) -> Tensor:
        """The text features `[P, dim]` of prompts without gradients, encoding `block` prompts at a time."""
