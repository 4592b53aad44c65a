"""The tokenizer of SigLIP 2, Gemma's, read from its file tokenizer.json without another library.

It is a byte-pair encoding of whole texts: a space becomes `▁`, characters become tokens (those that the
vocabulary lacks: their UTF-8 bytes), and neighbouring tokens merge, the pair with the lowest rank first,
as long as the file has a rank for any pair. So a word is encoded in another way at the beginning of a
text than after a space. As SigLIP 2 was trained, texts have no start token, and `<eos>` at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duplex.encoders.base import read_config
from duplex.encoders.libraries import open_clip
from duplex.errors import DuplexError

TOKENIZER_FILE = "tokenizer.json"
SPACE = "▁"
END = "<eos>"
PADDING = "<pad>"


class GemmaTokenizer:
    """Maps texts to token ids, as the tokenizers of open_clip do.

    ids: id of each token. ranks: rank of each pair of tokens that merge.
    """

    def __init__(
        self,
        ids: dict[str, int],
        ranks: dict[tuple[str, str], int],
        context_length: int = 64,
        clean: Callable[[str], str] = open_clip.tokenizer.get_clean_fn("canonicalize"),
    ) -> None:
        self._ids = ids
        self._ranks = ranks
        self._context_length = context_length
        self._clean = clean

    def __call__(self, texts: Sequence[str], context_length: int | None = None) -> Tensor:
        """Ids [P, L] of texts with end tokens, cut or padded to `context_length`."""
        length = context_length or self._context_length
        rows = torch.full((len(texts), length), self._ids[PADDING])
        for row, text in zip(rows, texts, strict=True):
            ids = [*self.encode(text)[: length - 1], self._ids[END]]
            row[: len(ids)] = torch.tensor(ids)
        return rows

    def encode(self, text: str) -> list[int]:
        """Ids of a text's tokens, without the end token."""
        tokens = []
        for character in self._clean(text).replace(" ", SPACE):
            whole = character in self._ids
            tokens += [character] if whole else [f"<0x{byte:02X}>" for byte in character.encode()]
        while True:
            ranked = [(self._ranks[pair], place) for place, pair in enumerate(pairwise(tokens)) if pair in self._ranks]
            if not ranked:
                return [self._ids[token] for token in tokens]
            _, place = min(ranked)
            tokens[place : place + 2] = [tokens[place] + tokens[place + 1]]

    def decode(self, ids: Sequence[int]) -> str:
        names = {number: token for token, number in self._ids.items()}
        return "".join(names[number] for number in ids).replace(SPACE, " ")


def read_gemma_tokenizer(path: Path, context_length: int) -> GemmaTokenizer | None:
    """The tokenizer in a tokenizer.json; None if the file holds a tokenizer of another kind."""
    found = _read(path, path.stat().st_mtime_ns)
    return None if found is None else GemmaTokenizer(*found, context_length)


@lru_cache(maxsize=1)  # a file has half a million merges
def _read(path: Path, _: int) -> tuple[dict[str, int], dict[tuple[str, str], int]] | None:
    config = read_config(path, ("model", "normalizer"))
    model = config["model"]
    try:
        if not _is_gemma(config):
            return None
        merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        ranks = {(left, right): rank for rank, (left, right) in enumerate(merges)}
        ids = {str(token): int(number) for token, number in model["vocab"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DuplexError(f"{path} holds no complete tokenizer ({error}); download the file again") from error
    return ids, ranks


def _is_gemma(config: dict[str, Any]) -> bool:
    model = config["model"]
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    has_bytes = model.get("type") == "BPE" and model.get("byte_fallback") and not model.get("ignore_merges")
    return bool(has_bytes) and config["normalizer"] == normalizer and {END, PADDING} <= set(model["vocab"])
