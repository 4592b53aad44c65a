"""Checks of a feature cache (HDF5 file of image features, see `features.layout`) before it is read or overwritten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from duplex.errors import DuplexError
from duplex.features import layout
from duplex.features.checksums import read_blocks
from duplex.features.identity import Identity, first_difference, repair_hint
from duplex.system.hdf5 import (
    HDF5_ERRORS,
    InvalidHDF5,
    as_text,
    describe_error,
    find_dataset,
    hdf5_errors_as_invalid,
    read_attribute,
    refuse_sparse_file,
)

HDF5_SUFFIXES = {".h5", ".hdf5"}
HDF5_SIGNATURE = b"\x89HDF"
HEAD = 1 << 16  # bytes within which every cache names its format


def refuse_foreign(path: Path) -> None:
    """Raise `DuplexError` if writing a feature cache to `path` would overwrite a file of another kind.

    Feature caches of any version may be overwritten, even damaged or unfinished ones. So may empty files whose name
    ends in .h5 or .hdf5.
    """
    for file, signature in ((path, layout.FORMATS.encode()), (layout.partial_path(path), HDF5_SIGNATURE)):
        head = b""
        if file.is_file():
            with file.open("rb") as stream:
                head = stream.read(HEAD)
        is_empty = file.is_file() and not head and HDF5_SUFFIXES.intersection(path.suffixes)
        if os.path.lexists(file) and not is_empty and not (head.startswith(HDF5_SIGNATURE) and signature in head):
            raise DuplexError(
                f"{file} exists and is not a feature cache, so it is not overwritten; "
                "choose another place with --out, or move it"
            )


@contextmanager
def open_cache(path: Path, *, joined: bool = True) -> Iterator[Any]:
    """Open a finished feature cache, or a shard (part) of one, for reading, after checking its layout.

    Raises `DuplexError` for any other file, and for damage that is noticed later, inside the `with` block.

    joined: also allow a cache whose values are in shard files, to which it refers; all of them must exist.
    """
    require_cache_file(path)
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except HDF5_ERRORS as error:
        raise DuplexError(f"{path} is not an HDF5 file ({describe_error(error)}); {_hint(path)}") from error
    try:
        version = as_text(read_attribute(file, "format")) or ""
        if not version.startswith(layout.FORMATS):
            raise DuplexError(f"{path} is not a feature cache of duplex; {_hint(path)}")
        if version != layout.FORMAT:
            raise DuplexError(
                f"{path} has the format {version} of another version, expected {layout.FORMAT}; {repair_hint(path)}"
            )
        check_layout(file, path, virtual=joined)
        yield file
    except (InvalidHDF5, OSError, RuntimeError) as error:
        raise DuplexError(f"{path} is damaged: {describe_error(error)}; {repair_hint(path)}") from error
    finally:
        with suppress(*HDF5_ERRORS):
            file.close()


def _hint(path: Path) -> str:
    """Return the advice that ends an error message about a file that is not a valid feature cache.

    If its name ends in .h5 or .hdf5, the advice is the command that writes the cache again; else, to name another file.
    """
    return repair_hint(path) if HDF5_SUFFIXES.intersection(path.suffixes) else "name a file that `duplex extract` wrote"


def require_cache_file(path: Path) -> None:
    """Raise `DuplexError` unless `path` is a file or a link to one."""
    if not path.exists():
        unfinished = " (an unfinished one lies beside it)" if layout.partial_path(path).exists() else ""
        raise DuplexError(f"{path} does not exist{unfinished}; {repair_hint(path)}")
    if not path.is_file():
        raise DuplexError(f"{path} is not a file; name the cache's file")


def read_identity(file: Any) -> Identity:
    """Return the identity of an open feature cache: the names and values of the settings that it was made with.

    Raises `InvalidHDF5` if the identity is missing or a value is not text.
    """
    group = file.get("identity") if isinstance(file.get("identity", getlink=True), h5py.HardLink) else None
    if not isinstance(group, h5py.Group):
        raise InvalidHDF5("there is no group 'identity'")
    identity = {}
    for key in group.attrs:
        value = as_text(read_attribute(group, key))
        if value is None or not isinstance(key, str):  # h5py returns a key that is no text as bytes
            raise InvalidHDF5(f"the attribute {key!r} is not text")
        identity[key] = value
    return identity


def read_row_span(file: Any) -> layout.Span:
    """Return the range of manifest rows (one per image) that an open feature cache holds.

    Raises `InvalidHDF5` if the file states no valid range.
    """
    numbers = [read_attribute(file, key) for key in ("start", "stop", "total")]
    if not all(isinstance(number, int | np.integer) for number in numbers):
        raise InvalidHDF5("its start, stop or total is not a whole number")
    start, stop, total = map(int, numbers)
    if not 0 <= start < stop <= total:
        raise InvalidHDF5(f"its rows are {start} to {stop} of {total}")
    return layout.Span(start, stop, total)


def check_values(file: Any, path: Path) -> None:
    """Read all values of an open feature cache; raise an error if a row does not match its checksum.

    Also raise one if CLS features are not finite although the row's status says that the image was encoded.
    """
    statuses = file["status"][...]
    for name in layout.value_names(file):
        for rows, values in read_blocks(file, name):
            if name == "cls":
                wrong = (statuses[rows] == layout.ENCODED) & ~np.isfinite(values).all(axis=1)
                if wrong.any():
                    row = rows.start + int(wrong.argmax())
                    raise DuplexError(f"{path} is damaged: row {row} is not finite; {repair_hint(path)}")


def check_layout(file: Any, path: Path, *, virtual: bool, unfinished: bool = False) -> None:
    """Raise `InvalidHDF5` unless an open file has the HDF5 data sets of a feature cache, in valid types and shapes.

    The rows' statuses (whether each image is encoded) must be valid, too.

    virtual: allow a cache joined from shards (files with a part of the rows each), which hold its values.
    unfinished: allow a sparse file, which an extraction creates before it writes features.
    """
    with hdf5_errors_as_invalid():
        if not unfinished:
            refuse_sparse_file(path)
        if as_text(read_attribute(file, "format")) != layout.FORMAT:
            raise InvalidHDF5("it is not a feature cache of this version")
        names = [name for name in layout.DATASETS if name in layout.REQUIRED or name in file]
        unknown = sorted(set(file) - {*names, "identity"})
        if unknown:
            raise InvalidHDF5(f"it holds {unknown[0]!r}, which is no part of a cache")
        rows = read_row_span(file).rows
        for name in names:
            data = find_dataset(file, name, virtual=virtual)
            dimensions, dtype = layout.DATASETS[name]
            if data.shape[:1] != (rows,) or data.ndim not in dimensions or data.dtype != dtype:
                raise InvalidHDF5(f"{name!r} is {data.shape} of {data.dtype}, which does not fit its {rows} rows")
            if data.id.get_create_plist().get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.VIRTUAL):
                raise InvalidHDF5(f"{name!r} is stored in chunks; expected a contiguous array")
        _check_block_inputs(file)
        if file[layout.CHECKSUMS].shape[1] != len(layout.value_names(file)):
            raise InvalidHDF5(f"{layout.CHECKSUMS!r} does not fit the other data sets")
        width, dim = file["cls"].shape[1], read_identity(file).get("dim")
        if dim != str(width):
            raise InvalidHDF5(f"its rows have {width} numbers, its identity says {dim}")
        if any(file[name].is_virtual for name in names):
            _check_shards(file, path, names)
        highest = int(file["status"][...].max())
        if highest >= layout.FIRST_BAD + len(layout.REASONS):
            raise InvalidHDF5(f"the status {highest} of a row has no meaning")


def _check_block_inputs(file: Any) -> None:
    if (layout.CODES in file and "block_inputs" in file) or (layout.CODES in file) != (layout.SCALES in file):
        expected = f"the array 'block_inputs', or the arrays {layout.CODES!r} and {layout.SCALES!r}"
        raise InvalidHDF5(f"its block inputs are incomplete or there twice; expected {expected}")
    if layout.CODES in file and layout.scale_shape(file[layout.CODES].shape[1:]) != file[layout.SCALES].shape[1:]:
        raise InvalidHDF5(f"{layout.SCALES!r} is {file[layout.SCALES].shape}, which does not fit {layout.CODES!r}")


def _check_shards(file: Any, path: Path, names: list[str]) -> None:
    """Raise an error unless all shard files to which a joined feature cache refers exist and still fit it.

    A shard no longer fits if it was extracted again with other settings or other rows.
    """
    if not all(file[name].is_virtual for name in names):
        raise InvalidHDF5("some of the arrays are links to shards and others are not; expected all or none")
    for name in names:
        for source in file[name].virtual_sources():
            if source.dset_name != name or Path(source.file_name).name != source.file_name or source.file_name == ".":
                raise InvalidHDF5(f"{name!r} is a view of {source.file_name!r}, which is not the name of a shard")
            if not (path.parent / source.file_name).is_file():  # HDF5 itself would return zeros
                raise DuplexError(
                    f"{path} joins {source.file_name}, which is not beside it; restore it or extract that shard again"
                )
    for source in file["status"].virtual_sources():
        (start,), (last,) = source.vspace.get_select_bounds()
        with open_cache(path.parent / source.file_name, joined=False) as shard:
            span, key = read_row_span(shard), first_difference(read_identity(shard), read_identity(file))
        if key is not None or (span.start, span.stop) != (start, last + 1):
            raise DuplexError(
                f"{path} joins {source.file_name}, which was extracted again with another {key or 'set of rows'}; "
                f"`duplex extract` that shard like the others, then `duplex cache join {path}`"
            )
