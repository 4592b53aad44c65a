"""Read score files: `.npz` or `.h5` files with `scores [N, C]`, `target [N]` (column of each label) and `seen [C]`.

Optional arrays: `feasible_mask [C]` (the other columns score -inf), `k` (one or more, for top-k accuracy), `state [C]`
and `object [C]` (of each column, as numbers or text). Files with further arrays are refused. An `.h5` file is read in
blocks, so it may exceed memory.
"""

from __future__ import annotations

import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from numpy.typing import NDArray

from duplex.errors import UsageError, shown
from duplex.evaluation.accumulator import checked_columns, checked_names
from duplex.evaluation.topk import checked_mask
from duplex.labels import Bools, Ints
from duplex.system.hdf5 import HDF5_ERRORS, InvalidHDF5, find_dataset, refuse_sparse_file

REQUIRED = ("scores", "target", "seen")
OPTIONAL = ("feasible_mask", "k", "state", "object")
BLOCK = 1 << 23  # scores read at a time
MAX_KS = 1000
# raised by h5py, numpy and zipfile on damaged or hostile files
READ_ERRORS: tuple[type[Exception], ...] = (InvalidHDF5, *HDF5_ERRORS, EOFError, SyntaxError)
READ_ERRORS += (zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError)


@dataclass(frozen=True)
class ScoreFile:
    """An open file of scores and labels; the scores of an `.h5` file are read from disk when `scores` is sliced."""

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
        """Range of the first image's index in each block of images by which a score file is read."""
        return range(0, self.target.size, max(1, BLOCK // self.seen.size))

    def blocks(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield all scores in blocks of images: (slice of images, scores [b, C])."""
        for start in self.steps:
            rows = slice(start, min(start + self.steps.step, self.target.size))
            try:
                block = np.asarray(self.scores[rows])
            except READ_ERRORS as error:
                raise UsageError(f"{self.path}: 'scores' cannot be read: {_brief(error)}") from error
            yield rows, block


def require_same_columns(first: ScoreFile, second: ScoreFile) -> None:
    """Raise `UsageError` unless two score files have the same labels and columns, so that they can be compared.

    Columns are the same if they agree in which are seen, and in states and objects where both files list them.
    """
    for name, field in (("target", "target"), ("seen", "seen"), ("state", "states"), ("object", "objects")):
        a, b = (_as_text(getattr(scores, field)) for scores in (first, second))
        if a is not None and b is not None and not np.array_equal(a, b):
            raise UsageError(
                f"{first.path} and {second.path} differ in {name!r}; "
                "use scores of the same images and candidates, both in the same order"
            )


def _as_text(values: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return an array of bytes, which is how `.h5` files store text, as str; return other arrays unchanged."""
    return np.char.decode(values, "utf-8", "replace") if values is not None and values.dtype.kind == "S" else values


@contextmanager
def open_scores(path: Path) -> Iterator[ScoreFile]:
    """Open and check a score file; raise `UsageError` if anything is wrong with it."""
    if not path.is_file():
        raise UsageError(f"{path} is not a file; give an .npz or .h5 file with {', '.join(REQUIRED)}")
    with _open(path) as store:
        entries = _Entries(path, store)
        lacking = [name for name in REQUIRED if entries.find(name) is None]
        try:
            names = sorted(store)
        except READ_ERRORS as error:
            raise UsageError(f"{path} cannot be read: {_brief(error)}") from error
        if lacking:
            raise UsageError(f"{path} has no {', '.join(map(repr, lacking))}; it holds {names or 'nothing'}")
        for name in names:
            if name not in REQUIRED + OPTIONAL:
                known = ", ".join(REQUIRED + OPTIONAL)
                raise UsageError(f"{path} holds {shown(name)}, which is no part of a score file; expected only {known}")
        yield _checked(path, entries)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    kind = ".h5" if path.suffix == ".hdf5" else path.suffix
    if kind not in (".npz", ".h5"):
        raise UsageError(f"{path} is neither an .npz nor an .h5 file")
    try:
        refuse_sparse_file(path)
        store = h5py.File(path, "r") if kind == ".h5" else open_npz(path)
    except READ_ERRORS as error:
        raise UsageError(f"{path} cannot be read as {kind}: {_brief(error)}") from error
    try:
        yield store
    finally:
        with suppress(*READ_ERRORS):
            store.close()


@dataclass(frozen=True)
class _Entries:
    """Arrays of an open score file by name; errors in reading them raise `UsageError` with the file's path."""

    path: Path
    store: Any

    def find(self, name: str) -> Any:
        """Return the score file's array `name`, for `.h5` an HDF5 dataset that is not read yet; None if missing."""
        try:
            if name not in self.store:
                return None
            return find_dataset(self.store, name) if isinstance(self.store, h5py.File) else self.store.find(name)
        except InvalidHDF5 as error:
            raise UsageError(f"{self.path}: {error}") from error
        except READ_ERRORS as error:
            raise UsageError(f"{self.path}: {name!r} cannot be read: {_brief(error)}") from error

    def read(self, name: str, size: int | None = None) -> NDArray[Any] | None:
        """Read the score file's array `name`, of `size` values; return None if the file lacks it.

        Raise `UsageError` for another size; if `size` is None, for more than 1000 values.
        """
        array = self.find(name)
        if array is None:
            return None
        if size is None and math.prod(array.shape) > MAX_KS:
            raise UsageError(f"{self.path}: {name!r} has the shape {array.shape}; expected at most {MAX_KS} numbers")
        if size is not None and array.shape != (size,):
            raise UsageError(f"{self.path}: {name!r} has the shape {array.shape}; 'scores' requires ({size},)")
        try:
            return np.asarray(array[()])
        except READ_ERRORS as error:
            raise UsageError(f"{self.path}: {name!r} cannot be read: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    if "pickle" in str(error):
        return "it holds Python objects, which are not loaded for safety; save plain arrays"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _checked(path: Path, entries: _Entries) -> ScoreFile:
    scores = entries.find("scores")
    if len(scores.shape) != 2 or scores.dtype.kind not in "fiub" or 0 in scores.shape:
        raise UsageError(f"{path}: 'scores' must be numbers [images, columns], not {scores.shape} of {scores.dtype}")
    images, columns = scores.shape
    if columns > BLOCK << 3:
        raise UsageError(f"{path}: 'scores' has {columns:,} columns, more than can be evaluated at once")
    target = checked_columns(entries.read("target", images), f"{path}: 'target'")
    if target.min() < 0 or target.max() >= columns:
        raise UsageError(f"{path}: 'target' holds {target.min()} to {target.max()}; expected 0 to {columns - 1}")
    feasible = entries.read("feasible_mask", columns)
    states, objects = (_names(path, name, entries.read(name, columns)) for name in ("state", "object"))
    if states is not None and objects is not None:
        _refuse_repeated_pair(path, states, objects)
    return ScoreFile(
        path=path,
        scores=scores,
        target=target,
        seen=checked_mask(entries.read("seen", columns), f"{path}: 'seen'"),
        feasible_mask=None if feasible is None else checked_mask(feasible, f"{path}: 'feasible_mask'"),
        ks=_ks(path, entries.read("k")),
        states=states,
        objects=objects,
    )


def _refuse_repeated_pair(path: Path, states: NDArray[Any], objects: NDArray[Any]) -> None:
    """Raise `UsageError` if two columns of a score file have the same state and object.

    states, objects: state and object of each column [C].
    """
    kinds, m = np.unique(states, return_inverse=True)
    n = np.unique(objects, return_inverse=True)[1]
    pairs = n * kinds.size + m  # [C] equal for equal pairs
    order = np.argsort(pairs, kind="stable")
    repeated = np.flatnonzero(np.diff(pairs[order]) == 0)
    if repeated.size:
        first, second = order[repeated[0]], order[repeated[0] + 1]
        cells = (names[first] for names in (states, objects))
        pair = " ".join(cell.decode("utf-8", "replace") if isinstance(cell, bytes) else str(cell) for cell in cells)
        raise UsageError(f"{path}: columns {first} and {second} are both the pair {pair!r}; keep one column per pair")


def _ks(path: Path, values: NDArray[Any] | None) -> tuple[int, ...]:
    flat = np.atleast_1d(np.array(1) if values is None else values)
    if flat.ndim != 1 or not flat.size or flat.dtype.kind not in "iu" or flat.min() < 1:
        raise UsageError(f"{path}: 'k' must be one or more whole numbers from 1 on")
    return tuple(dict.fromkeys(int(k) for k in flat))


def _names(path: Path, name: str, values: NDArray[Any] | None) -> NDArray[Any] | None:
    return None if values is None else checked_names(values, values.size, f"{path}: {name!r}")


MAX_EXPANDED = 1 << 30  # bytes of an array that unpacks to more than MAX_RATIO times its packed size
MAX_RATIO = 100
NPY_MAGIC = b"\x93NUMPY"


class Archive:
    """An open `.npz` file; each array is read at most once."""

    def __init__(self, path: Path) -> None:
        self.bundle = zipfile.ZipFile(path)
        self._read: dict[str, NDArray[Any]] = {}

    def __contains__(self, name: object) -> bool:
        return f"{name}.npy" in self.bundle.namelist()

    def __iter__(self) -> Any:
        return (name.removesuffix(".npy") for name in self.bundle.namelist())

    def find(self, name: str) -> NDArray[Any]:
        """Return an `.npz` file's array `name`; raise `InvalidHDF5` (also for `.npz`) if it is invalid or too large."""
        if name in self._read:
            return self._read[name]
        info = self.bundle.getinfo(f"{name}.npy")
        with self.bundle.open(info) as file:
            shape, dtype = _header(file)
            start = file.tell()
        _refuse_objects(dtype, repr(name))
        size = math.prod(shape) * dtype.itemsize
        if size != info.file_size - start:
            raise InvalidHDF5(f"{name!r} declares {size:,} bytes and holds {max(0, info.file_size - start):,}")
        if size > MAX_EXPANDED and size > MAX_RATIO * info.compress_size:
            raise InvalidHDF5(
                f"{name!r} unpacks {info.compress_size:,} bytes to {size:,}, too many for .npz; save it as an .h5 file"
            )
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise InvalidHDF5(f"{name!r} is {size:,} bytes, more than this machine's memory; save it as an .h5 file")
        with self.bundle.open(info) as file:
            self._read[name] = np.lib.format.read_array(file, allow_pickle=False)
        return self._read[name]

    def close(self) -> None:
        self.bundle.close()


def open_npz(path: Path) -> Archive:
    """Open an `.npz` file; raise `InvalidHDF5` (also used for `.npz`) if it is a single `.npy` array."""
    with path.open("rb") as file:
        if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
            file.seek(0)
            _refuse_objects(_header(file)[1], "it")
            raise InvalidHDF5("it is a single array, not an .npz of several")
    return Archive(path)


def _refuse_objects(dtype: np.dtype[Any], name: str) -> None:
    if dtype.hasobject:
        raise InvalidHDF5(f"{name} holds Python objects, which are not loaded for safety; save plain arrays")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise InvalidHDF5(f"its format {version} is unknown; expected (1, 0) or (2, 0)")
    shape, _, dtype = readers[version](file)
    return shape, dtype
