"""The feature cache: one HDF5 file, one row a picture, aligned with the manifest.

An unfinished cache is `NAME.partial` beside its place. Its layout (contiguous, allocated early) is complete before the
first row is encoded, so rows are plain writes at fixed offsets and a process killed at any moment leaves a file that
opens. A row counts once its mark is written, which happens after the row itself has reached the disk; the finished
file takes its name in one rename. Nothing in the file depends on when or in how many attempts it was written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError
from duplex.features.identity import Identity, check_identity, repair
from duplex.features.layout import (
    FIRST_BAD,
    FORMAT,
    FORMS,
    HELD,
    PENDING,
    Bools,
    Marks,
    Span,
    check_form,
    kept_rows,
    open_file,
    partial_path,
    read_held,
    read_identity,
    read_span,
    reason,
    row_bytes,
)
from duplex.system.files import FULL, replaced, unwritable
from duplex.system.hdf5 import DAMAGED, Unfit

EXTRACTION = ("extraction", "or give this one another --out")  # what writers of a cache do (`duplex.system.lock`)


@dataclass(frozen=True)
class Features:
    """A finished cache in memory. `reasons` belongs to the bad rows, in their order."""

    path: Path
    identity: Identity
    span: Span
    cls: NDArray[np.float32]  # [N, d], not normalised; zero where bad
    marks: Marks  # [N]

    @cached_property
    def bad(self) -> NDArray[np.bool_]:
        return self.marks >= FIRST_BAD

    @cached_property
    def reasons(self) -> list[str]:
        return [reason(mark) for mark in self.marks[self.bad]]


def open_features(path: Path | str, expect: Mapping[str, str | None] | None = None) -> Features:
    """Read a finished cache whole. `expect` is the encoder's identity and {"manifest": sha256}: a cache of another
    encoder, weights file, preprocessing, precision or manifest is refused, and so is an unfinished one."""
    path = Path(path)
    with open_file(path) as file:
        identity, span, marks = read_identity(file), read_span(file), file["mark"][...]
        if expect is not None:
            check_identity(identity, expect, path)
        if not span.whole:
            raise DuplexError(
                f"{path} holds rows {span.start} to {span.stop} of {span.total}; `duplex cache join` joins shards"
            )
        if (marks == PENDING).any():
            raise DuplexError(
                f"{path} has {int((marks == PENDING).sum())} rows that were never encoded; {repair(path)}"
            )
        return Features(path, identity, span, file["cls"][...].astype(np.float32), marks)


def unfinish(path: Path) -> None:
    """Take a finished cache up again, as a copy: it stays whole, and whatever else its name is linked to as well."""
    with replaced(partial_path(path)) as scratch:
        shutil.copyfile(path, scratch)


def describe(file: Any, identity: Mapping[str, str], span: Span) -> None:
    """Write what a file is. Fixed-length strings: variable ones live in a heap whose bytes need not repeat."""
    file.attrs["format"] = np.bytes_(FORMAT)
    for key in ("start", "stop", "total"):
        file.attrs[key] = np.int64(getattr(span, key))
    group = file.create_group("identity")
    for key, value in sorted(identity.items()):
        group.attrs[key] = np.bytes_(value.encode())


class PartialCache:
    """An unfinished cache that rows are written into. Whoever holds it holds its lock (`duplex.system.lock`)."""

    def __init__(self, path: Path) -> None:
        """Open the partial file of the cache at `path`; raises `Unfit` where there is no sound one."""
        self.path = path
        self.partial = partial_path(path)
        with _opened(self.partial) as file:
            check_form(file, self.partial, virtual=False, unfinished=True)
            self.identity, self.span = read_identity(file), read_span(file)
            self.marks: Marks = file["mark"][...]
            self._held = read_held(file)
            self._offset = {name: file[name].id.get_offset() for name in file if name != "identity"}
            self._shape = {name: file[name].shape[1:] for name in self._offset}
        self._file = self.partial.open("r+b")
        self._waiting: list[tuple[int, Marks]] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._offset)

    @property
    def done(self) -> int:
        return int((self.marks != PENDING).sum())

    @classmethod
    def create(
        cls,
        path: Path,
        identity: Mapping[str, str],
        span: Span,
        dim: int,
        beside: Mapping[str, tuple[int, ...]] | None = None,
        held: Bools | None = None,
    ) -> PartialCache:
        """Lay the file out under another name first, so that a partial file is always a whole layout. `beside` are the
        shapes of what is kept of one picture beside its CLS feature; `held` [N] are the rows of which what enters the
        last blocks is."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error
        shapes = {"cls": (dim,), **(beside or {}), **({} if held is None else {HELD: ()}), "mark": ()}
        rows = {name: kept_rows(name, slice(0, span.rows), held).stop for name in shapes}
        needed = sum(rows[name] * row_bytes(name, row) for name, row in shapes.items()) + (1 << 16)
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise DuplexError(
                f"{path} needs {_size(needed)} and {path.parent} has {_size(free)} free; make room or choose --out"
            )
        with replaced(partial_path(path)) as scratch, h5py.File(scratch, "w", locking="best-effort") as file:
            describe(file, identity, span)
            for name, row in shapes.items():
                _allocate(file, name, (rows[name], *row), FORMS[name][1])
            if held is not None:
                file[HELD][...] = held
        return cls(path)

    def write(self, row: int, marks: Marks, **values: NDArray[Any]) -> None:
        """Write a block of rows, each data set's that it keeps of them; they count from the next `commit` on."""
        rows = slice(row, row + len(marks))
        for name, block in values.items():
            place = kept_rows(name, rows, self._held)
            if len(block):
                data = np.ascontiguousarray(block, FORMS[name][1]).tobytes()
                self._put(data, self._offset[name] + place.start * row_bytes(name, self._shape[name]))
        self._waiting.append((row, marks))

    def commit(self) -> None:
        """Rows to the disk first, then their marks: a mark never stands for a row that a power cut took."""
        if not self._waiting:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        for row, marks in self._waiting:
            self._put(marks.tobytes(), self._offset["mark"] + row)
            self.marks[row : row + len(marks)] = marks
        self._waiting.clear()

    def finish(self) -> None:
        """Everything to the disk, then the cache takes its name."""
        self.commit()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self.close()
        os.replace(self.partial, self.path)

    def close(self) -> None:
        self._file.close()

    def _put(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DuplexError:
        full = error.errno in FULL
        what = "the disk is full" if full else str(error.strerror or error)
        return DuplexError(
            f"{self.partial} could not be written: {what}; its {self.done} finished rows are kept: "
            f"{'make room and ' if full else ''}run the same command again to go on"
        )


def _opened(partial: Path) -> Any:
    """An unfinished file for reading; what the system says of reading it passes through."""
    try:
        return h5py.File(partial, "r", locking="best-effort")
    except DAMAGED as error:
        if getattr(error, "errno", None) is not None:  # not of what is in it: whoever may read it may go on
            raise
        raise Unfit(str(error)) from error


def _allocate(file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """A contiguous data set whose place in the file is fixed at once. Zeros come from the file system."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape)
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(dtype), space, plist)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
