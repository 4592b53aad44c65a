"""Word vectors from a text file in GloVe's format: a word and its numbers a line, separated by spaces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rich.progress
from rich.console import Console

from duplex.errors import DuplexError
from duplex.evaluation.accumulator import Floats
from duplex.labels import prompt_name


@dataclass(frozen=True)
class WordVectors:
    """One vector a name, and the words that the file does not have."""

    vectors: Floats  # [names, w]
    missing: tuple[str, ...]


def read_word_vectors(path: Path, names: Sequence[str]) -> WordVectors:
    """A name's vector is the mean of its words' (`Faux.Fur`: faux, fur); a word unknown to the file is left out.

    A hyphenated word counts as its parts if the file lacks it as a whole. A name of which no word is known is an error.
    """
    words = [prompt_name(name).split() for name in names]
    wanted = {part for name in words for word in name for part in (word, *word.split("-"))}
    table = _read(path, wanted)
    missing: dict[str, None] = {}
    rows = []
    for name in words:
        parts = [part for word in name for part in ([word] if word in table else word.split("-")) if part]
        missing.update(dict.fromkeys(part for part in parts if part not in table))
        known = [table[part] for part in parts if part in table]
        rows.append(np.mean(known, axis=0) if known else None)
    lost = [name for name, row in zip(names, rows, strict=True) if row is None]
    if lost:
        raise DuplexError(
            f"{path} has no vector for any word of {_listed(lost)}; use another file or rename the labels"
        )
    return WordVectors(np.array(rows, dtype=np.float64), tuple(missing))


def _read(path: Path, wanted: set[str]) -> dict[str, Floats]:
    table: dict[str, Floats] = {}
    try:
        with _lines(path) as lines:
            for number, line in enumerate(lines, start=1):
                word, _, rest = line.rstrip().partition(" ")
                if word in wanted and _begins_with_number(rest):
                    table.setdefault(word, _numbers(rest, f"{path}, line {number}"))
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {error.strerror}") from error
    lengths = {vector.size for vector in table.values()}
    if len(lengths) > 1:
        raise DuplexError(f"{path} has vectors of several lengths: {', '.join(map(str, sorted(lengths)))}")
    return table


def _lines(path: Path) -> AbstractContextManager[Iterable[str]]:
    """The file's lines; a gigabyte of them takes seconds, so progress shows on stderr."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return rich.progress.open(
        path, "r", encoding="utf-8", errors="replace", description=path.name, console=console, disable=hidden
    )


def _begins_with_number(text: str) -> bool:
    """Some published files have lines of several words, such as "at name@domain.com 0.3 ..."."""
    try:
        float(text.partition(" ")[0])
    except ValueError:
        return False
    return True


def _numbers(text: str, place: str) -> Floats:
    try:
        vector = np.array(text.split(), dtype=np.float64)
    except ValueError as error:
        raise DuplexError(f"{place} is not a word and its numbers, as a GloVe file has it") from error
    if not np.isfinite(vector).all():
        raise DuplexError(f"{place} holds a number that is not finite")
    return vector


def _listed(names: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
