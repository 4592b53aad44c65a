"""Word vectors of states and objects in GloVe's format, and nearest neighbours by cosine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import rich.progress
from numpy.typing import NDArray
from rich.console import Console

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulate import Floats
from duplex.labels import Ints, prompt_name
from duplex.system.files import expanded_path

LISTED = 10  # names in an error message
PUBLISHED_WIDTH = 300  # of the vectors in glove.6B.300d.txt, by which CSP's code computes feasibility
# Names for which CSP's code looks up other words; of UT-Zappos, then of the other benchmarks
OTHER_WORDS = {
    "faux fur": "fake fur",
    "faux leather": "fake leather",
    "full grain leather": "thick leather",
    "hair calf": "hair leather",
    "patent leather": "shiny leather",
    "nubuck": "grainy leather",
    "boots ankle": "ankle boots",
    "boots knee high": "knee high boots",
    "boots mid-calf": "midcalf boots",
    "shoes boat shoes": "boat shoes",
    "shoes clogs and mules": "clogs shoes",
    "shoes flats": "flats shoes",
    "shoes heels": "heels",
    "shoes loafers": "loafers",
    "shoes oxfords": "oxford shoes",
    "shoes sneakers and athletic shoes": "sneakers",
    "traffic light": "traffic light",
    "trash can": "trashcan",
    "dry-erase board": "dry erase board",
    "black and white": "black white",
    "eiffel tower": "tower",
}
BLOCK = 1 << 22  # similarities in memory at once: 32 MiB
Vectors = NDArray[np.floating]


@dataclass(frozen=True)
class WordVectors:
    """One vector per state or object, and the words in their names for which the file has none."""

    vectors: Floats  # [names, w]
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """What a run records of them."""
        return {"width": self.vectors.shape[1], "missing": list(self.missing)}


def unlike_published(record: Mapping[str, Any] | None) -> str:
    """Why feasibility by these vectors (`WordVectors.to_dict`) is not that of CSP's code; empty if it is."""
    remedy = "set evaluation.word_vectors to glove.6B.300d.txt"
    if record is None:
        return f"feasibility is by the encoder's text features, not by GloVe vectors; {remedy}"
    if record["width"] != PUBLISHED_WIDTH:
        return f"word vectors have {record['width']} numbers, not {PUBLISHED_WIDTH}; {remedy}"
    if record["missing"]:
        return f"there are no word vectors of {', '.join(map(repr, record['missing'][:LISTED]))}; {remedy}"
    return ""


def word_vectors_file(path: str | Path | None) -> Path | None:
    """The file's absolute path; None if `path` is None. `UsageError` if it is missing."""
    if path is None:
        return None
    file = expanded_path(path, "word_vectors")
    if not file.is_file():
        problem = "is not a file" if file.exists() else "does not exist"
        raise UsageError(f"word_vectors: {path} {problem}; expected a text file in GloVe format")
    return file.resolve()


def read_word_vectors(path: Path, names: Sequence[str]) -> WordVectors:
    """Read one vector per name: the mean over its words or their hyphenated parts.

    Words are those of the name (`light_bulb`: light, bulb) or, as in CSP's code, of `OTHER_WORDS`.
    """
    plain = [prompt_name(name) for name in names]
    words = [OTHER_WORDS.get(name, name).split() for name in plain]
    wanted = set(chain.from_iterable(words))
    table = _read(path, wanted.union(*(word.split("-") for word in wanted)))
    missing: dict[str, None] = {}
    rows = []
    for name in words:
        parts: list[str] = []
        for word in name:
            parts += [word] if word in table else filter(None, word.split("-"))
        missing.update(dict.fromkeys(part for part in parts if part not in table))
        known = [table[part] for part in parts if part in table]
        rows.append(np.mean(known, axis=0) if known else None)
    lost = [repr(name) for name, row in zip(names, rows, strict=True) if row is None]
    if lost:
        more = f" and {len(lost) - LISTED} more" if len(lost) > LISTED else ""
        raise DuplexError(
            f"{path} has no vector for any word of {', '.join(lost[:LISTED])}{more}; "
            "use another file or rename the labels"
        )
    return WordVectors(np.array(rows, dtype=np.float64), tuple(missing))


def _read(path: Path, wanted: set[str]) -> dict[str, Floats]:
    table: dict[str, Floats] = {}
    console = Console(stderr=True)
    hidden = not console.is_terminal
    try:
        with rich.progress.open(
            path, "r", encoding="utf-8", errors="replace", description=path.name, console=console, disable=hidden
        ) as lines:
            for number, line in enumerate(lines, start=1):
                word, _, rest = line.rstrip().partition(" ")
                vector = _numbers(rest, f"{path}, line {number}") if word in wanted else None
                if vector is not None:
                    table.setdefault(word, vector)
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {error.strerror}; fix this, or change `word_vectors`") from error
    lengths = {vector.size for vector in table.values()}
    if len(lengths) > 1:
        raise DuplexError(f"{path} has vectors of different lengths, {sorted(lengths)}; use vectors of one length")
    return table


def _numbers(text: str, place: str) -> Floats | None:
    try:
        float(text.partition(" ")[0])
    except ValueError:  # of several words, such as "at a@b.com 0.3", as in published files
        return None
    try:
        vector = np.array(text.split(), dtype=np.float64)
    except ValueError as error:
        raise DuplexError(f"{place}: expected a word followed by numbers, as in GloVe files; fix the line") from error
    if not np.isfinite(vector).all():
        raise DuplexError(f"{place} holds a number that is NaN or infinite; correct or remove the line")
    return vector


def unit(vectors: Vectors) -> Floats:
    """`vectors` with rows scaled to unit length; rows of zeros stay zero."""
    wide = np.asarray(vectors, dtype=np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.asarray(np.divide(wide, length, out=np.zeros_like(wide), where=length > 0))


def nearest(queries: Vectors, gallery: Vectors, k: int) -> tuple[Ints, Floats]:
    """Rows of the k vectors in `gallery` nearest to each query [Q, k], the first of equals, and cosines."""
    return most_similar(unit(queries), unit(gallery), k)


def most_similar(queries: Vectors, gallery: Vectors, k: int) -> tuple[Ints, Floats]:
    """As `nearest`, for vectors of unit length."""
    k = min(k, len(gallery))
    nearest_rows = np.empty((len(queries), k), dtype=np.int64)
    cosines = np.empty((len(queries), k), np.result_type(queries, gallery))
    step = max(1, BLOCK // max(1, len(gallery)))
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        similar = queries[block] @ gallery.T  # [b, N]
        nearest_rows[block] = _largest(similar, k)
        cosines[block] = np.take_along_axis(similar, nearest_rows[block], axis=1)
    return nearest_rows, cosines


def _largest(similar: Floats, k: int) -> Ints:
    if not k:
        return np.empty((len(similar), 0), dtype=np.int64)
    last = np.partition(similar, -k, axis=1)[:, -k, None]
    above, equal = similar > last, similar == last
    room = k - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=1) <= room))
    columns = np.nonzero(chosen)[1].reshape(len(similar), k)
    order = np.argsort(-np.take_along_axis(similar, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)


def silhouette(vectors: Vectors, groups: Ints) -> float:
    """Mean over vectors of (b - a) / max(a, b).

    a is a vector's mean cosine distance to the others of its group, b that to the nearest other group. With m the mean
    of a group's unit vectors, the mean distance of z to the group is 1 - z m. Each group has at least two vectors.
    """
    z = unit(vectors)
    _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    means = np.zeros((len(counts), z.shape[1]))
    np.add.at(means, group, z)
    means /= counts[:, None]
    distances = 1 - z @ means.T  # [n, G]
    own = np.arange(len(z)), group
    a = distances[own] * counts[group] / (counts[group] - 1)  # its distance to itself is 0
    distances[own] = np.inf
    b = distances.min(axis=1)
    return float(np.mean((b - a) / np.maximum(np.maximum(a, b), np.finfo(float).tiny)))


def precision(rows: Ints, labels: Ints, wanted: Ints) -> float:
    """Share of retrieved `rows` [Q, k] with the label `wanted` [Q]; NaN without items."""
    return float((labels[rows] == wanted[:, None]).mean()) if rows.size else float("nan")
