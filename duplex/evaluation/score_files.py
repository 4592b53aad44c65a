"""Read score files (.npz, .h5): arrays `scores [N, C]`, `target [N]` (columns) and `seen [C]`.

Optional arrays: `feasible_mask [C]` (columns outside of it score -inf), `k` (for top-k accuracy),
`state [C]` and `object [C]` (each column's, as numbers or text). An `.h5` file is read in blocks,
so it may be larger than memory.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from duplex.errors import UsageError, shown
from duplex.evaluation.accumulate import checked_label_columns, checked_mask, checked_names
from duplex.labels import Bools, Ints

REQUIRED = ("scores", "target", "seen")
OPTIONAL = ("feasible_mask", "k", "state", "object")
BLOCK = 1 << 23  # scores read at a time
READ_ERRORS = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class ScoreFile:
    """An open file of scores and labels; `.h5` scores are read when `scores` is sliced."""

    path: Path
    scores: Any  # [N, C]
    target: Ints  # [N] column of each image's label
    seen: Bools  # [C]
    feasible_mask: Bools | None  # [C]
    ks: tuple[int, ...]
    states: NDArray[Any] | None  # [C]
    objects: NDArray[Any] | None  # [C]

    @property
    def steps(self) -> range:
        """The index of the first image of each block."""
        return range(0, self.target.size, max(1, BLOCK // self.seen.size))

    def blocks(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield all scores in blocks: a slice of images, and their scores [b, C]."""
        for start in self.steps:
            rows = slice(start, min(start + self.steps.step, self.target.size))
            with _report_read_errors(self.path, "scores"):
                block = np.asarray(self.scores[rows])
            yield rows, block


def require_same_columns(first: ScoreFile, second: ScoreFile) -> None:
    """Raise `UsageError` unless two files have the same labels, seen columns and names."""
    for name, field in (("target", "target"), ("seen", "seen"), ("state", "states"), ("object", "objects")):
        a, b = getattr(first, field), getattr(second, field)
        if a is not None and b is not None and not np.array_equal(a, b):
            raise UsageError(
                f"{first.path} and {second.path} differ in {name!r}; "
                "use scores of the same images and candidates, both in the same order"
            )


@contextmanager
def open_score_file(path: Path) -> Iterator[ScoreFile]:
    """Context manager: open and check a score file; raises `UsageError` if anything is wrong."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}; give an .npz or .h5 file with {', '.join(map(repr, REQUIRED))}")
    if path.suffix not in (".npz", ".h5", ".hdf5"):
        raise UsageError(f"{path} is neither an .npz nor an .h5 file; save the scores in one of these formats")
    try:
        store = np.load(path, allow_pickle=False) if path.suffix == ".npz" else h5py.File(path, "r")
    except READ_ERRORS as error:
        raise UsageError(f"{path} cannot be read as {path.suffix} ({error}); copy the file or save it again") from error
    if isinstance(store, np.ndarray):
        raise UsageError(f"{path} holds a single array; save {', '.join(map(repr, REQUIRED))} with numpy.savez")
    with store:
        names = sorted(store)
        lacking = [repr(name) for name in REQUIRED if name not in names]
        if lacking:
            raise UsageError(f"{path} lacks {' and '.join(lacking)}; add or rename arrays (found: {names or 'none'})")
        for name in names:
            if name not in REQUIRED + OPTIONAL:
                known = ", ".join(REQUIRED + OPTIONAL)
                raise UsageError(f"{path} has the unknown array {shown(name)}; remove it (known arrays: {known})")
        yield _checked(path, store)


@contextmanager
def _report_read_errors(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except READ_ERRORS as error:
        raise UsageError(f"{path}: {name!r} cannot be read ({error}); save it again, as a plain array") from error


def _find(path: Path, store: Any, name: str) -> Any:
    with _report_read_errors(path, name):
        found = store[name]
    if not isinstance(found, np.ndarray | h5py.Dataset) or found.shape is None:
        raise UsageError(f"{path}: {name!r} is {'empty' if hasattr(found, 'shape') else 'a group'}; expected an array")
    return found


def _read(path: Path, store: Any, name: str, size: int | None = None) -> NDArray[Any] | None:
    if name not in store:
        return None
    found = _find(path, store, name)
    if size is not None and found.shape != (size,):
        raise UsageError(f"{path}: {name!r} has the shape {found.shape}; expected ({size},), to match 'scores'")
    with _report_read_errors(path, name):
        if isinstance(found, h5py.Dataset) and h5py.check_string_dtype(found.dtype):
            return np.array(found.asstr("utf-8")[()], dtype=str)
        values = np.asarray(found[()])
        return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values


def _checked(path: Path, store: Any) -> ScoreFile:
    scores = _find(path, store, "scores")
    if len(scores.shape) != 2 or scores.dtype.kind not in "fiub" or 0 in scores.shape:
        raise UsageError(
            f"{path}: 'scores' has shape {scores.shape} and type {scores.dtype}; expected a non-empty "
            "array of numbers of shape [images, columns]"
        )
    images, columns = scores.shape
    target = checked_label_columns(_read(path, store, "target", images), f"{path}: 'target'")
    if target.min() < 0 or target.max() >= columns:
        raise UsageError(f"{path}: 'target' holds {target.min()} to {target.max()}; expected 0 to {columns - 1}")
    seen = _read(path, store, "seen", columns)
    feasible = _read(path, store, "feasible_mask", columns)
    states = _names(path, store, "state", columns)
    objects = _names(path, store, "object", columns)
    if states is not None and objects is not None:
        _refuse_repeated_pair(path, states, objects)
    given = _read(path, store, "k")
    ks = np.atleast_1d(1 if given is None else given)
    if ks.ndim != 1 or not ks.size or ks.dtype.kind not in "iu" or ks.min() < 1:
        raise UsageError(f"{path}: 'k' must be one or more whole numbers of at least 1")
    return ScoreFile(
        path=path,
        scores=scores,
        target=target,
        seen=checked_mask(seen, f"{path}: 'seen'"),
        feasible_mask=None if feasible is None else checked_mask(feasible, f"{path}: 'feasible_mask'"),
        ks=tuple(dict.fromkeys(ks.tolist())),
        states=states,
        objects=objects,
    )


def _names(path: Path, store: Any, name: str, columns: int) -> NDArray[Any] | None:
    values = _read(path, store, name, columns)
    return None if values is None else checked_names(values, columns, f"{path}: {name!r}")


def _refuse_repeated_pair(path: Path, states: NDArray[Any], objects: NDArray[Any]) -> None:
    kinds, m = np.unique(states, return_inverse=True)
    n = np.unique(objects, return_inverse=True)[1]
    pairs = n * kinds.size + m  # [C] equal for equal pairs
    order = np.argsort(pairs, kind="stable")
    repeated = np.flatnonzero(np.diff(pairs[order]) == 0)
    if repeated.size:
        first, second = order[repeated[0]], order[repeated[0] + 1]
        pair = f"{states[first]} {objects[first]}"
        raise UsageError(f"{path}: columns {first} and {second} are both the pair {pair!r}; keep one column per pair")
