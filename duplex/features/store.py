"""Write and read a feature cache: one HDF5 file, one row per image, in the order of the manifest.

An unfinished cache is `NAME.partial` beside its final path. Its layout is complete before the first row is encoded, so
that rows are plain writes at fixed offsets and a process killed at any moment leaves a file that opens. A finished file
is renamed to its final path. Its bytes depend neither on time nor on the number of attempts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError
from duplex.features.checks import (
    check_layout,
    open_cache,
    read_format,
    read_identity,
    read_row_span,
    refuse_foreign,
)
from duplex.features.checksums import contents_digest, read_rows, row_checksums
from duplex.features.identity import Identity, check_identity, repair_hint
from duplex.features.layout import (
    CHECKSUMS,
    DATASETS,
    FIRST_BAD,
    FORMAT,
    PENDING,
    DamagedCache,
    Span,
    Statuses,
    partial_path,
    row_bytes,
    value_names,
)
from duplex.system.files import FULL, checked_path, replace_file, report_write_errors, sole_writer


@dataclass(frozen=True)
class Features:
    """The CLS features of all images of a finished feature cache, in memory."""

    path: Path
    identity: Identity
    cls: NDArray[np.float32]  # [N, d], not normalised; zero where bad
    statuses: Statuses  # [N]
    contents: str  # digest of `cls` and `statuses`

    @cached_property
    def bad(self) -> NDArray[np.bool_]:
        return self.statuses >= FIRST_BAD


def open_features(path: Path | str, expect: Mapping[str, str | None] | None = None) -> Features:
    """Read the CLS features of a finished feature cache into memory; raise `DuplexError` if it is incomplete.

    Args:
        path: the HDF5 file.
        expect: settings that the cache must have been made with, such as {"manifest": sha256}; None: any.
    """
    path = checked_path(path, "the feature cache")
    with open_cache(path) as file:
        identity = read_identity(file)
        span = read_row_span(file)
        statuses = file["status"][...]
        if expect is not None:
            check_identity(identity, expect, path)
        if not span.whole:
            raise DuplexError(
                f"{path} is a shard, rows {span.start} to {span.stop} of {span.total}; `duplex cache join` joins all"
            )
        pending = int((statuses == PENDING).sum())
        if pending:
            raise DuplexError(f"{path} has {pending} rows that were never encoded; {repair_hint(path)}")
        return Features(path, identity, read_rows(file, "cls").astype(np.float32), statuses, contents_digest(file))


def read_contents_digest(path: Path) -> str:
    """A digest of the features in a finished cache, fast because it is computed from their stored checksums."""
    with open_cache(path) as file:
        return contents_digest(file)


@contextmanager
def claim_cache(path: Path) -> Iterator[None]:
    """Hold the lock for writing the cache at `path`.

    Raises `DuplexError` if another process holds it, or if a file of another kind is at `path`.
    """
    refuse_foreign(path)
    with sole_writer(path, "extraction", "or give this one another --out"):
        yield


class PartialCache:
    """An unfinished feature cache, to write rows into. The caller must hold the cache's lock (`claim_cache`)."""

    def __init__(self, path: Path) -> None:
        """Open the unfinished file of the cache `path`. Raises `DamagedCache` if it has another format or layout."""
        self.path = path
        self.partial = partial_path(path)
        with _open_partial(self.partial) as file:
            if read_format(file) != FORMAT:
                raise DamagedCache("it is not a feature cache of this version")
            check_layout(file)
            self.identity = read_identity(file)
            self.span = read_row_span(file)
            self.statuses: Statuses = file["status"][...]
            self._offset = {name: file[name].id.get_offset() for name in DATASETS if name in file}
            self._shape = {name: file[name].shape[1:] for name in self._offset}
        self._file = self.partial.open("r+b")
        self._uncommitted: list[tuple[int, Statuses]] = []

    @property
    def done(self) -> int:
        """Number of rows that are finished: encoded, or of an unreadable image."""
        return int((self.statuses != PENDING).sum())

    @classmethod
    def create(
        cls,
        path: Path,
        identity: Mapping[str, str],
        span: Span,
        dim: int,
        token_shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> PartialCache:
        """Create the unfinished file of the cache `path`, with no row encoded yet.

        Args:
            path: the finished cache's path.
            identity: settings that the cache's bytes depend on.
            span: rows of the manifest that the file holds.
            dim: width of the features.
            token_shapes: the data sets of tokens, each with its shape per image.
        """
        with report_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        row_shapes = {"cls": (dim,), "status": (), **(token_shapes or {})}
        row_shapes[CHECKSUMS] = (len(value_names(row_shapes)),)
        shapes = {name: row_shapes[name] for name in DATASETS if name in row_shapes}
        needed = span.rows * sum(row_bytes(name, row) for name, row in shapes.items()) + (1 << 16)
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise DuplexError(
                f"{path} needs {_size(needed)} and {path.parent} has {_size(free)} free; make room or choose --out"
            )
        # under a scratch name first, so that a partial file always has its whole layout
        with replace_file(partial_path(path)) as scratch, h5py.File(scratch, "w", locking="best-effort") as file:
            file.attrs["format"] = np.bytes_(FORMAT)  # text of fixed length, so that equal caches have equal bytes
            for key in ("start", "stop", "total"):
                file.attrs[key] = np.int64(getattr(span, key))
            group = file.create_group("identity")
            for key, value in sorted(identity.items()):
                group.attrs[key] = np.bytes_(value.encode())
            for name, row in shapes.items():
                _allocate(file, name, (span.rows, *row), DATASETS[name][1])
        return cls(path)

    def write(self, row: int, statuses: Statuses, **values: NDArray[Any]) -> None:
        """Write the rows of consecutive images, from cache row `row` on; they count as finished after `commit`.

        Args:
            row: the first image's row.
            statuses: [B], whether each image was encoded, or why it was not.
            values: by data set the images' values [B, ...], for all data sets but `status` and `checksums`.
        """
        blocks = {name: np.ascontiguousarray(values[name], DATASETS[name][1]) for name in value_names(self._offset)}
        for name, block in blocks.items():
            if block.shape != (expected := (len(statuses), *self._shape[name])):
                raise DuplexError(
                    f"{self.partial}: the encoder returned {name} of shape {block.shape}; expected {expected}"
                )
        sums = [row_checksums(block, statuses if name == "cls" else None) for name, block in blocks.items()]
        for name, block in {**blocks, CHECKSUMS: np.stack(sums, axis=1)}.items():
            self._put(block.tobytes(), self._offset[name] + row * row_bytes(name, self._shape[name]))
        self._uncommitted.append((row, statuses))

    def commit(self) -> None:
        """Flush written rows to disk, and only then mark them as finished: a crash loses no row that is marked."""
        if not self._uncommitted:
            return
        self._sync()
        for row, statuses in self._uncommitted:
            self._put(statuses.tobytes(), self._offset["status"] + row)
            self.statuses[row : row + len(statuses)] = statuses
        self._uncommitted.clear()

    def finish(self) -> None:
        """Write everything to disk and rename the file to the cache's final name."""
        self.commit()
        self._sync()
        self.close()
        os.replace(self.partial, self.path)

    def close(self) -> None:
        self._file.close()

    def _put(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        with self._report_write_errors():
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view = view[written:]
                offset += written

    def _sync(self) -> None:
        with self._report_write_errors():
            os.fsync(self._file.fileno())

    @contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DuplexError(
                f"{self.partial} could not be written: {error.strerror}; its {self.done} finished rows are kept: "
                f"{'make room and ' if error.errno in FULL else ''}run the same command again to continue"
            ) from error


def _open_partial(partial: Path) -> Any:
    try:
        return h5py.File(partial, "r", locking="best-effort")
    except OSError as error:
        if error.errno is not None:  # a fault of the file system, not of the file's contents
            raise
        raise DamagedCache(str(error)) from error


def _allocate(file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    # contiguous, and with its space at once, so that its offset is known before rows are written
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape)
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(dtype), space, plist)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
