"""What is in the file of a feature cache, and whether it is sound. `features.store` writes it.

cls    [N, d] float16   the encoder's output, not normalised
patch  [N, T, w] float16, where patch tokens were asked for
deep   [N, T, w] or [N, C, H, W] float16, where a depth was: what enters the image tower's last blocks; or in eight bits
       deep_codes of that shape in int8 and deep_steps [N, T] or [N, H, W] float16 (`features.eight_bits`)
held   [N] uint8        1 where `deep` is kept of a row, where it is not of all: it has the rows of those alone then
mark   [N] uint8        0 pending, 1 encoded, 2 + i bad because of REASONS[i]
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError
from duplex.features.identity import Identity, difference, repair
from duplex.system.hdf5 import DAMAGED, Unfit, as_text, find_dataset, read_attribute, refuse_hollow

FORMAT = "duplex-features-1"
SIGNATURE = b"\x89HDF\r\n\x1a\n"
HEAD = 1 << 16  # bytes, in which every cache names its format
ROWS = 65_536  # read at a time
HALF = np.dtype(np.float16)
CODES, STEPS, HELD = "deep_codes", "deep_steps", "held"
DEEP = ("deep", CODES, STEPS)
FORMS: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
    "cls": ((2,), HALF),
    "mark": ((1,), np.dtype(np.uint8)),
    HELD: ((1,), np.dtype(np.uint8)),
    "patch": ((3,), HALF),
    "deep": ((3, 4), HALF),
    CODES: ((3, 4), np.dtype(np.int8)),
    STEPS: ((2, 3), HALF),
}
OPTIONAL = (HELD, "patch", *DEEP)
PENDING, ENCODED, FIRST_BAD = 0, 1, 2
NOT_FINITE = "features not finite"
REASONS = (  # append only: their places are in the files
    "missing",
    "empty",
    "unreadable",
    "not a picture",
    "damaged",
    "too large",
    "pixel type",
    "cannot be resized",
    NOT_FINITE,
)
Marks = NDArray[np.uint8]
Half = NDArray[np.float16]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Span:
    """The rows that a file holds: [start, stop) of the data set's `total`."""

    start: int
    stop: int
    total: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop == self.total


def reason(mark: int) -> str:
    return REASONS[int(mark) - FIRST_BAD]


def mark_of(why: str) -> int:
    return FIRST_BAD + REASONS.index(why)


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def refuse_foreign(path: Path) -> None:
    """Whatever lies at `path` and is no cache of ours, whole or damaged, is somebody's: it is never written over.
    Nor is a file that only has the name of an unfinished cache."""
    for place, sign in ((path, FORMAT.encode()), (partial_path(path), SIGNATURE[:4])):
        if os.path.lexists(place) and not _bears(place, sign):
            raise DuplexError(
                f"{place} exists and is not a feature cache, so it is left alone; "
                "choose another place with --out, or move it"
            )


def _bears(path: Path, sign: bytes) -> bool:
    """Whether a file is HDF5 as far as its first bytes tell, and holds `sign` near its beginning."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD)
    return head.startswith(SIGNATURE[:4]) and sign in head


@contextmanager
def open_file(path: Path, *, joined: bool = True) -> Iterator[Any]:
    """Open a finished cache or shard for reading, after a look at its form; `joined`: it may be a view of shards, all
    of which must be there."""
    if not path.is_file():
        left = " (an unfinished one lies beside it)" if partial_path(path).exists() else ""
        raise DuplexError(f"{path} does not exist{left}; {repair(path)}")
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except DAMAGED as error:
        raise DuplexError(f"{path} is not an HDF5 file ({_said(error)}); {repair(path)}") from error
    try:
        if as_text(read_attribute(file, "format")) != FORMAT:
            raise DuplexError(f"{path} is not a feature cache of duplex; {repair(path)}")
        check_form(file, path, virtual=joined)
        yield file
    except (Unfit, OSError, RuntimeError) as error:  # the latter two from reading on
        raise DuplexError(f"{path} is damaged: {_said(error)}; {repair(path)}") from error
    finally:
        with suppress(*DAMAGED):
            file.close()


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_identity(file: Any) -> Identity:
    """What the cache was made by: short texts."""
    group = file.get("identity") if isinstance(file.get("identity", getlink=True), h5py.HardLink) else None
    if not isinstance(group, h5py.Group):
        raise Unfit("there is no group 'identity'")
    found = {key: as_text(read_attribute(group, key)) for key in group.attrs}
    for key, value in found.items():
        if value is None or not isinstance(key, str):  # a name that is no text comes as bytes
            raise Unfit(f"the identity's {key!r} is not a text")
    return {key: value for key, value in found.items() if value is not None}


def read_span(file: Any) -> Span:
    numbers = [read_attribute(file, key) for key in ("start", "stop", "total")]
    if not all(isinstance(number, int | np.integer) for number in numbers):
        raise Unfit("its start, stop or total is no whole number")
    start, stop, total = map(int, numbers)
    if not 0 <= start < stop <= total:
        raise Unfit(f"its rows are {start} to {stop} of {total}")
    return Span(start, stop, total)


def read_held(file: Any) -> Bools | None:
    """Of which rows what enters the last blocks is kept [N]; None: of all."""
    return file[HELD][...].astype(bool) if HELD in file else None


def kept_rows(name: str, rows: slice, held: Bools | None) -> slice:
    """Where a data set has what it keeps of these rows."""
    if held is None or name not in DEEP:
        return rows
    start, stop, _ = rows.indices(len(held))
    return slice(int(held[:start].sum()), int(held[:stop].sum()))


def kept_places(rows: NDArray[np.int64], held: Bools | None) -> NDArray[np.int64]:
    """Where a data set has what it keeps of these rows [n], all of which are held."""
    return rows if held is None else (np.cumsum(held) - 1)[rows]


def row_bytes(name: str, row: tuple[int, ...]) -> int:
    """Of one picture's row of this shape."""
    return int(np.prod(row)) * FORMS[name][1].itemsize


def check_values(file: Any, path: Path) -> None:
    """Every encoded row is numbers. Reads all of the features."""
    marks = file["mark"][...]
    for start in range(0, len(marks), ROWS):
        values = file["cls"][start : start + ROWS]
        wrong = (marks[start : start + ROWS] == ENCODED) & ~np.isfinite(values).all(axis=1)
        if wrong.any():
            row = start + int(wrong.argmax())
            raise DuplexError(f"{path} is damaged: row {row} holds what is not a number; {repair(path)}")


def check_form(file: Any, path: Path, *, virtual: bool, unfinished: bool = False) -> None:
    """The parts there must be, their types and shapes, and marks that mean something; `virtual`: a view of shards will
    do. Raises `Unfit`."""
    try:
        _check_form(file, path, virtual, unfinished)
    except DAMAGED as error:
        raise Unfit(_said(error)) from error


def _check_form(file: Any, path: Path, virtual: bool, unfinished: bool) -> None:
    if not unfinished:  # which is all holes at first
        refuse_hollow(path)
    if as_text(read_attribute(file, "format")) != FORMAT:
        raise Unfit("it is not a feature cache of duplex")
    span, identity = read_span(file), read_identity(file)
    names = ["cls", "mark", *(name for name in OPTIONAL if name in file)]
    strange = sorted(set(file) - {*names, "identity"})
    if strange:
        raise Unfit(f"it holds {strange[0]!r}, which no cache has")
    for name in names:
        data = find_dataset(file, name, virtual=virtual)
        ndims, dtype = FORMS[name]
        some = name in DEEP and HELD in file  # how many, only `held` knows
        if not (some or data.shape[:1] == (span.rows,)) or data.ndim not in ndims or data.dtype != dtype:
            raise Unfit(f"{name!r} is {data.shape} of {data.dtype}, which does not fit its {span.rows} rows")
        if data.id.get_create_plist().get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.VIRTUAL):
            raise Unfit(f"{name!r} is stored in pieces, as no cache is")
    if identity.get("dim") != str(file["cls"].shape[1]):
        raise Unfit(f"its rows are {file['cls'].shape[1]} wide, its identity says {identity.get('dim')}")
    if any(file[name].is_virtual for name in names):
        _check_joined(file, path)
    _check_deep(file)
    highest = int(file["mark"][...].max())
    if highest >= FIRST_BAD + len(REASONS):
        raise Unfit(f"the mark {highest} has no meaning")


def _check_deep(file: Any) -> None:
    """What is kept of the last blocks' input belongs together."""
    if (CODES in file and "deep" in file) or (CODES in file) != (STEPS in file):
        raise Unfit(f"it holds some of 'deep', {CODES!r} and {STEPS!r}; it is the first alone or the others")
    if CODES in file and places(file[CODES].shape[1:]) != file[STEPS].shape[1:]:
        raise Unfit(f"{STEPS!r} is {file[STEPS].shape}, which does not fit {CODES!r}")
    if HELD not in file:
        return
    if file[HELD][...].max() > 1 or not any(name in file for name in DEEP):
        raise Unfit(f"{HELD!r} does not say of which rows anything is kept")
    rows = int(file[HELD][...].sum())
    for name in DEEP:
        if name in file and len(file[name]) != rows:
            raise Unfit(f"{name!r} is of {len(file[name])} rows, {HELD!r} says {rows}")


def places(row: tuple[int, ...]) -> tuple[int, ...]:
    """Of one picture's tokens [T, w] or map [C, H, W]: [T] or [H, W]."""
    return row[1:] if len(row) == 3 else row[:1]


def _check_joined(file: Any, path: Path) -> None:
    """A view is of shards beside it, and they are still those it was made of: one may have been made again, by another
    encoder or of other rows."""
    if not all(file[name].is_virtual for name in file if name != "identity"):
        raise Unfit("it is partly a view of other files")
    for name in (name for name in file if name != "identity"):
        for source in file[name].virtual_sources():
            if source.dset_name != name or Path(source.file_name).name != source.file_name or source.file_name == ".":
                raise Unfit(f"{name!r} is a view of {source.file_name!r}, which no shard is called")
            if not (path.parent / source.file_name).is_file():  # HDF5 itself would read zeros
                raise DuplexError(
                    f"{path} joins {source.file_name}, which is not beside it; "
                    "bring it back or extract that shard again"
                )
    for source in file["mark"].virtual_sources():
        (start,), (last,) = source.vspace.get_select_bounds()
        with open_file(path.parent / source.file_name, joined=False) as shard:
            span, other = read_span(shard), difference(read_identity(shard), read_identity(file))
        if other is None and (span.start, span.stop) == (start, last + 1):
            continue
        raise DuplexError(
            f"{path} joins {source.file_name}, which was made again with another {other or 'set of rows'} since; "
            f"`duplex extract` that shard as the others were, then `duplex cache join {path}`"
        )
