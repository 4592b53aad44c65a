"""Anyone's scores: an `.npz` or `.h5` file with `scores [N, C]`, `target [N]`, `seen [C]`, checked at the door.

Optional: `live [C]` (columns that take part), `k` (one or more), `state [C]` and `object [C]` (what each column is made
of, as numbers or text). An `.h5` file is read in blocks of rows, so it may be larger than memory.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from duplex.errors import UsageError
from duplex.labels import Bools, Ints

NEEDED = ("scores", "target", "seen")
OPTIONAL = ("live", "k", "state", "object")
BLOCK = 1 << 23  # scores read at a time


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
            yield rows, np.asarray(self.scores[rows])


@contextmanager
def open_scores(path: Path) -> Iterator[ScoreFile]:
    """Open and check a score file; what is wrong with it is said in one sentence."""
    if not path.is_file():
        raise UsageError(f"{path} is not a file; give an .npz or .h5 file with {', '.join(NEEDED)}")
    with _open(path) as store:
        lacking = [name for name in NEEDED if name not in store]
        if lacking:
            raise UsageError(f"{path} has no {', '.join(map(repr, lacking))}; it holds {sorted(store) or 'nothing'}")
        yield _checked(path, {name: _entry(path, store, name) for name in (*NEEDED, *OPTIONAL) if name in store})


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    opener = {".npz": lambda: np.load(path, allow_pickle=False), ".h5": lambda: h5py.File(path, "r")}
    kind = ".h5" if path.suffix == ".hdf5" else path.suffix
    if kind not in opener:
        raise UsageError(f"{path} is neither an .npz nor an .h5 file")
    try:
        store = opener[kind]()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read as {kind}: {_brief(error)}") from error
    if not hasattr(store, "close"):
        raise UsageError(f"{path} is a single array, not an .npz of {', '.join(NEEDED)}")
    with store:
        yield store


def _entry(path: Path, store: Any, name: str) -> Any:
    """An array of the file; HDF5 scores stay on disk."""
    try:
        entry = store[name]
        if getattr(entry, "shape", None) is None:
            raise UsageError(f"{path}: {name!r} is a folder or empty, not an array")
        return entry if name == "scores" else np.asarray(entry[()])
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: {name!r} cannot be read: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    if "allow_pickle" in str(error) or "pickle" in str(error):
        return "it holds Python objects, which are never loaded; save plain arrays"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _checked(path: Path, entries: dict[str, Any]) -> ScoreFile:
    scores = entries["scores"]
    if len(scores.shape) != 2 or scores.dtype.kind not in "fiub" or 0 in scores.shape:
        raise UsageError(f"{path}: 'scores' must be numbers [images, columns], not {scores.shape} of {scores.dtype}")
    images, columns = scores.shape
    target = _whole(path, "target", entries["target"], images)
    if target.min() < 0 or target.max() >= columns:
        raise UsageError(f"{path}: 'target' holds {target.min()} to {target.max()}, its columns are 0 to {columns - 1}")
    return ScoreFile(
        path=path,
        scores=scores,
        target=target,
        seen=_mask(path, "seen", entries["seen"], columns),
        live=_mask(path, "live", entries["live"], columns) if "live" in entries else None,
        ks=_ks(path, entries.get("k", np.array(1))),
        states=_names(path, "state", entries, columns),
        objects=_names(path, "object", entries, columns),
    )


def _sized(path: Path, name: str, values: NDArray[Any], size: int) -> NDArray[Any]:
    if values.shape != (size,):
        raise UsageError(f"{path}: {name!r} has the shape {values.shape}, 'scores' asks for ({size},)")
    return values


def _whole(path: Path, name: str, values: NDArray[Any], size: int) -> Ints:
    values = _sized(path, name, values, size)
    if values.dtype.kind not in "iu" and not (values.dtype.kind == "f" and np.array_equal(values, np.trunc(values))):
        raise UsageError(f"{path}: {name!r} must be whole numbers, the column of each image's label")
    return values.astype(np.int64)


def _mask(path: Path, name: str, values: NDArray[Any], size: int) -> Bools:
    values = _sized(path, name, values, size)
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise UsageError(f"{path}: {name!r} must be true or false for each column")
    return values.astype(bool)


def _ks(path: Path, values: NDArray[Any]) -> tuple[int, ...]:
    flat = np.atleast_1d(values)
    if flat.ndim != 1 or not flat.size or flat.dtype.kind not in "iu" or flat.min() < 1:
        raise UsageError(f"{path}: 'k' must be one or more whole numbers from 1 on")
    return tuple(dict.fromkeys(int(k) for k in flat))


def _names(path: Path, name: str, entries: dict[str, Any], size: int) -> NDArray[Any] | None:
    return _sized(path, name, entries[name], size) if name in entries else None
