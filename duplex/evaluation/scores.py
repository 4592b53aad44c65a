"""Anyone's scores: an `.npz` or `.h5` file with `scores [N, C]`, `target [N]`, `seen [C]`, checked at the door.

Optional: `live [C]` (columns that take part), `k` (one or more), `state [C]` and `object [C]` (what each column is made
of, as numbers or text). An `.h5` file is read in blocks of rows, so it may be larger than memory.
"""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from duplex.errors import UsageError
from duplex.evaluation.archives import open_npz
from duplex.labels import Bools, Ints
from duplex.system.hdf5 import DAMAGED, Unfit, find_dataset, refuse_hollow

NEEDED = ("scores", "target", "seen")
OPTIONAL = ("live", "k", "state", "object")
BLOCK = 1 << 23  # scores read at a time
SHORT = 1000  # values that `k` may have
READING = (  # what h5py, numpy and zipfile raise on a file that is damaged or hostile
    *(Unfit, *DAMAGED, EOFError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)


@dataclass(frozen=True)
class ScoreFile:
    """An open score file. `scores` may be an HDF5 data set: slice it."""

    path: Path
    scores: Any  # [N, C]
    target: Ints  # [N] column of each image's label
    seen: Bools  # [C]
    live: Bools | None  # [C]
    ks: tuple[int, ...]
    states: NDArray[Any] | None  # [C]
    objects: NDArray[Any] | None  # [C]

    @property
    def steps(self) -> range:
        """First rows of the blocks."""
        return range(0, self.target.size, max(1, BLOCK // self.seen.size))

    def blocks(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """(rows, scores [b, C]) from first to last."""
        for start in self.steps:
            rows = slice(start, min(start + self.steps.step, self.target.size))
            try:
                block = np.asarray(self.scores[rows])
            except READING as error:
                raise UsageError(f"{self.path}: 'scores' cannot be read: {_brief(error)}") from error
            yield rows, block


@contextmanager
def open_scores(path: Path) -> Iterator[ScoreFile]:
    """Open and check a score file; what is wrong with it is said in one sentence."""
    if not path.is_file():
        raise UsageError(f"{path} is not a file; give an .npz or .h5 file with {', '.join(NEEDED)}")
    with _open(path) as store:
        entries = _Entries(path, store)
        lacking = [name for name in NEEDED if entries.find(name) is None]
        if lacking:
            raise UsageError(f"{path} has no {', '.join(map(repr, lacking))}; it holds {entries.names() or 'nothing'}")
        yield _checked(path, entries)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    kind = ".h5" if path.suffix == ".hdf5" else path.suffix
    if kind not in (".npz", ".h5"):
        raise UsageError(f"{path} is neither an .npz nor an .h5 file")
    try:
        refuse_hollow(path)
        store = h5py.File(path, "r") if kind == ".h5" else open_npz(path)
    except READING as error:
        raise UsageError(f"{path} cannot be read as {kind}: {_brief(error)}") from error
    try:
        yield store
    finally:
        with suppress(*READING):
            store.close()


@dataclass(frozen=True)
class _Entries:
    """The arrays of an open file, each looked at before it is read."""

    path: Path
    store: Any

    def find(self, name: str) -> Any:
        """An array with its shape and type, unread; None where there is none."""
        try:
            if name not in self.store:
                return None
            return find_dataset(self.store, name) if isinstance(self.store, h5py.File) else self.store.find(name)
        except Unfit as error:
            raise UsageError(f"{self.path}: {error}") from error
        except READING as error:
            raise UsageError(f"{self.path}: {name!r} cannot be read: {_brief(error)}") from error

    def names(self) -> list[str]:
        try:
            return sorted(self.store)
        except READING as error:
            raise UsageError(f"{self.path} cannot be read: {_brief(error)}") from error

    def read(self, name: str, size: int | None = None) -> NDArray[Any] | None:
        """The whole of a list of `size` values (None: any short one)."""
        found = self.find(name)
        if found is None:
            return None
        if size is None and math.prod(found.shape) > SHORT:
            raise UsageError(f"{self.path}: {name!r} has the shape {found.shape}; it is a few numbers")
        if size is not None and found.shape != (size,):
            raise UsageError(f"{self.path}: {name!r} has the shape {found.shape}, 'scores' asks for ({size},)")
        try:
            return np.asarray(found[()])
        except READING as error:
            raise UsageError(f"{self.path}: {name!r} cannot be read: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    if "pickle" in str(error):
        return "it holds Python objects, which are never loaded; save plain arrays"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _checked(path: Path, entries: _Entries) -> ScoreFile:
    scores = entries.find("scores")
    if len(scores.shape) != 2 or scores.dtype.kind not in "fiub" or 0 in scores.shape:
        raise UsageError(f"{path}: 'scores' must be numbers [images, columns], not {scores.shape} of {scores.dtype}")
    images, columns = scores.shape
    if columns > BLOCK << 3:
        raise UsageError(f"{path}: 'scores' has {columns:,} columns, more than can be evaluated at once")
    target = _whole(path, "target", entries.read("target", images))
    if target.min() < 0 or target.max() >= columns:
        raise UsageError(f"{path}: 'target' holds {target.min()} to {target.max()}, its columns are 0 to {columns - 1}")
    return ScoreFile(
        path=path,
        scores=scores,
        target=target,
        seen=_mask(path, "seen", entries.read("seen", columns)),
        live=None if (live := entries.read("live", columns)) is None else _mask(path, "live", live),
        ks=_ks(path, entries.read("k")),
        states=_names(path, "state", entries.read("state", columns)),
        objects=_names(path, "object", entries.read("object", columns)),
    )


def _whole(path: Path, name: str, values: Any) -> Ints:
    kind, limit = values.dtype.kind, 2.0**62
    if not (kind in "iu" or (kind == "f" and (np.abs(values) < limit).all() and (values == np.trunc(values)).all())):
        raise UsageError(f"{path}: {name!r} must be whole numbers, the column of each image's label")
    if kind == "u" and values.max() > np.iinfo(np.int64).max:
        raise UsageError(f"{path}: {name!r} holds {values.max()}, which no column has")
    found: Ints = values.astype(np.int64)
    return found


def _mask(path: Path, name: str, values: Any) -> Bools:
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise UsageError(f"{path}: {name!r} must be true or false for each column")
    found: Bools = values.astype(bool)
    return found


def _ks(path: Path, values: NDArray[Any] | None) -> tuple[int, ...]:
    flat = np.atleast_1d(np.array(1) if values is None else values)
    if flat.ndim != 1 or not flat.size or flat.dtype.kind not in "iu" or flat.min() < 1:
        raise UsageError(f"{path}: 'k' must be one or more whole numbers from 1 on")
    return tuple(dict.fromkeys(int(k) for k in flat))


def _names(path: Path, name: str, values: NDArray[Any] | None) -> NDArray[Any] | None:
    if values is None:
        return None
    if values.dtype.kind == "O" and all(isinstance(value, str | bytes) for value in values.tolist()):
        return np.array([value.encode() if isinstance(value, str) else value for value in values.tolist()])
    if values.dtype.kind not in "biufSUT":
        raise UsageError(f"{path}: {name!r} must be numbers or texts, not {values.dtype}")
    return values
