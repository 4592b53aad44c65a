"""Write, open and check a feature cache: an HDF5 file, one row per image, in the manifest's order.

cls                 [N, d] float16: encoder outputs, not normalised
patch               [N, T, w] float16, optional: patch tokens
block_inputs        [N, T, w] or [N, C, H, W] float16, optional: inputs of the image tower's last blocks
pixels              [N, 3, R, R] uint8, optional: the images after the encoder's resize and crop
status              [N] uint8: 0 pending, 1 encoded, 2 + i bad because of REASONS[i]
checksums           [N, K] uint32: CRC-32 of each row of the K data sets of features and tokens, in the order of
                    `DATASETS`; the one of `cls` also covers the row's status
contents            [N, 32] uint8: sha256 of each image file, by which other caches find rows to copy; zero for a
                    file that was missing, and for imported features
negatives           [K, d] float16: of drawn images of no pair, with their CRC-32 (`negative_checksums`, [K] uint32)

N: number of images; d: width of features; T, w: number and width of tokens; C: channels of feature
maps. The attributes `start`, `stop` and `total` say which rows of the manifest the file holds:
all, or those of one shard. The attributes of the group `identity` are the settings with which the
file was made: encoder, manifest, options.

An unfinished cache is the file `NAME.partial` beside its final path. It has its complete layout
before the first row is encoded, so rows are written at fixed offsets, and a process killed at any
moment leaves a file that can be opened. The bytes of a finished file depend neither on the time
nor on how often the extraction was interrupted.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError
from duplex.system.files import FULL, expanded_path, replace_file, report_write_errors, size_text, sole_writer

FORMATS = "duplex-features-"  # every version's name begins so
FORMAT = FORMATS + "4"
PIXELS = "pixels"
CHECKSUMS = "checksums"
CONTENTS = "contents"
NEGATIVES, NEGATIVE_CHECKSUMS = "negatives", "negative_checksums"
HALF = np.dtype(np.float16)
DATASETS: dict[str, np.dtype[Any]] = {
    "cls": HALF,
    "status": np.dtype(np.uint8),
    "patch": HALF,
    "block_inputs": HALF,
    PIXELS: np.dtype(np.uint8),
    CHECKSUMS: np.dtype(np.uint32),
    CONTENTS: np.dtype(np.uint8),
}
PENDING = 0
ENCODED = 1
FIRST_BAD = 2
COPIED = 255  # encoded, in an unfinished cache: a row of another cache, which belongs to no batch
REASONS = (  # append only: files store their positions
    "missing",
    "empty",
    "unreadable",
    "not an image",
    "damaged",
    "too large",
    "unsupported pixel type",
    "cannot be resized",
    "features not finite",
    "features all zero",
    "crop outside of the image",
)
NOT_FINITE = FIRST_BAD + REASONS.index("features not finite")
ALL_ZERO = FIRST_BAD + REASONS.index("features all zero")
BAD_FEATURES = (NOT_FINITE, ALL_ZERO)  # of images that can be read, but have no usable features
Shapes = Mapping[str, tuple[int, ...]]  # HDF5 data set -> shape of one image's values
Statuses = NDArray[np.uint8]
Contents = NDArray[np.uint8]  # [N, 32]
SHA256 = 32  # bytes


class DamagedCache(Exception):
    """Raised for a damaged feature cache; callers add the file and what to do to the message."""


@dataclass(frozen=True)
class Span:
    """The rows of a manifest in a cache file: from `start` to before `stop`, of `total` rows."""

    start: int
    stop: int
    total: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop == self.total


def status_reason(status: int) -> str:
    return REASONS[int(status) - FIRST_BAD]


def status_of_reason(reason: str) -> int:
    return FIRST_BAD + REASONS.index(reason)


def value_names(present: Container[str]) -> list[str]:
    """The names in `present` of HDF5 data sets with features, tokens or pixels, in a fixed order."""
    others = ("status", CHECKSUMS, CONTENTS)
    return [name for name in DATASETS if name in present and name not in others]


def row_bytes(name: str, row: tuple[int, ...]) -> int:
    """Number of bytes that one image's values, of shape `row`, take in the HDF5 data set `name`."""
    return int(np.prod(row)) * DATASETS[name].itemsize


def cache_shapes(dim: int, token_shapes: Shapes | None = None) -> dict[str, tuple[int, ...]]:
    """HDF5 data set -> shape of one image's values, for features of width `dim` and some tokens."""
    shapes = {"cls": (dim,), "status": (), CONTENTS: (SHA256,), **(token_shapes or {})}
    shapes[CHECKSUMS] = (len(value_names(shapes)),)
    return {name: shapes[name] for name in DATASETS if name in shapes}


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


BLOCK = 2**26  # bytes read or copied at once
Checksums = NDArray[np.uint32]


def row_checksums(block: NDArray[Any], statuses: Statuses | None = None) -> Checksums:
    """CRC-32 [B] of each row of an array [B, ...], after the row's status if `statuses` are given."""
    width = int(np.prod(block.shape[1:]))
    rows = np.ascontiguousarray(block).reshape(len(block), width).view(np.uint8)
    begins = [0] * len(rows)
    if statuses is not None:
        begins = [zlib.crc32(bytes([status])) for status in statuses]
    sums = [zlib.crc32(row.data, begin) for row, begin in zip(rows, begins, strict=True)]
    return np.array(sums, np.uint32)


def stored_checksums(file: Any, name: str, rows: Any = slice(None)) -> Checksums:
    """The checksums that an open cache stores for rows of its HDF5 data set `name`."""
    return np.asarray(file[CHECKSUMS][rows, value_names(file).index(name)])


def contents_digest(file: Any, rows: NDArray[np.int64] | slice = slice(None)) -> str:
    """Digest of the CLS features and statuses in `rows` of an open cache, from their checksums."""
    return hashlib.sha256(stored_checksums(file, "cls")[rows].tobytes()).hexdigest()


def read_rows(file: Any, name: str, rows: Any = slice(None)) -> NDArray[Any]:
    """Read rows (a slice or ascending numbers) of a data set; `DamagedCache` for a wrong checksum."""
    values: NDArray[Any] = file[name][rows]
    statuses: Statuses = file["status"][rows]
    checksums = row_checksums(values, statuses if name == "cls" else None)
    wrong = checksums != stored_checksums(file, name, rows)
    refuse_wrong(name, np.arange(len(file["status"]))[rows], wrong & (statuses != PENDING))
    return values


def verify_checksums(file: Any) -> None:
    """Read an open cache; raises `DamagedCache` if a row does not match its checksum."""
    for name in value_names(file):
        step = max(1, BLOCK * len(file[name]) // max(1, file[name].nbytes))
        for start in range(0, len(file[name]), step):
            read_rows(file, name, slice(start, start + step))


def refuse_wrong(name: str, rows: NDArray[np.int64], wrong: NDArray[np.bool_]) -> None:
    """Raise `DamagedCache` for the first of the `rows` [B] that the mask `wrong` [B] marks, if any."""
    if wrong.any():
        raise DamagedCache(f"row {rows[wrong.argmax()]} of {name!r} does not match its checksum")


Identity = dict[str, str]
LIBRARIES = ("torch", "open_clip_torch", "pillow")  # recorded; they affect the last bits
SHARD = re.compile(r"(?P<stem>.+)\.shard-(?P<k>\d+)-of-(?P<n>\d+)(?P<suffix>\.\w+)?")  # file names
ROOT = "root"  # the folder of the images, as params.yaml gives it; absent in older caches
ENCODING = "encoding"  # `features.encode.encoding_code`, which only caches compare
IMPORTED = "imported"  # the encoder's name in a cache of imported features
DISPLAY_NAMES = {  # in messages, compared in this order: what others follow from comes before them
    "encoder": "encoder",
    "architecture": "encoder architecture",
    "weights": "weights file",
    "code": "code of its encoder family",
    ENCODING: "version of the code that encodes images",
    "preprocessing": "preprocessing",
    "precision": "precision",
    "manifest": "manifest",
    ROOT: "folder of images",
    "dim": "feature width",
    "tokens": "setting of `tokens`",
    "block_inputs": "number of block inputs",
    PIXELS: "setting of `pixels`",
}


def check_identity(stored: Mapping[str, str], expect: Mapping[str, str | None], path: Path) -> None:
    """Raise `DuplexError`, naming the first difference, unless a cache has the expected settings.

    Of imported features, only manifest and width are compared. None: the setting must be absent.
    """
    imported = stored.get("encoder") == IMPORTED
    others = sorted(set(expect) - set(DISPLAY_NAMES) - set(LIBRARIES))
    for key in ("manifest", "dim") if imported else (*DISPLAY_NAMES, *others):
        if key in expect and _differs(key, stored, expect):
            shorten = str if key == ROOT else shortened
            values = f"it has {shorten(stored.get(key))}, but {shorten(expect[key])} is needed"
            name = DISPLAY_NAMES.get(key, key)
            raise DuplexError(f"{path} was made with another {name} ({values}); {repair_hint(path)}")


def cache_identity(
    encoder: Identity,
    manifest_sha256: str,
    tokens: str = "none",
    block_inputs: int = 0,
    root: str | None = None,
    pixels: bool = False,
) -> Identity:
    """The settings that a cache's bytes depend on, except defaults; `root`: the images' folder."""
    options = {
        ROOT: root,
        "tokens": tokens if tokens != "none" else None,
        "block_inputs": block_inputs or None,
        PIXELS: "true" if pixels else None,
    }
    given = {key: str(value) for key, value in options.items() if value is not None}
    return {**encoder, "manifest": manifest_sha256, **given}


def first_difference(stored: Mapping[str, str], expect: Mapping[str, str]) -> str | None:
    """The name, for messages, of the first setting in which two caches differ; None if equal."""
    for key in [*DISPLAY_NAMES, *sorted({*stored, *expect} - set(DISPLAY_NAMES))]:
        if _differs(key, stored, expect):
            if key == ROOT:
                return f"{DISPLAY_NAMES[ROOT]} ({stored[ROOT]} → {expect[ROOT]})"
            return DISPLAY_NAMES.get(key, f"{key} version" if key in LIBRARIES else key)
    return None


def repair_hint(path: Path, effect: str = "makes it again") -> str:
    """The end of an error message: the command that writes the cache or shard `path`, its effect."""
    command = extract_command(path)
    if shard := SHARD.fullmatch(path.name):
        whole = path.with_name(shard["stem"] + (shard["suffix"] or ""))
        command = extract_command(whole, f"{shard['k']}/{shard['n']}")
    return f"`{command}` {effect}"


def extract_command(path: Path, shard: str | None = None) -> str:
    """The `duplex extract` command that writes the cache at `path`, or its `shard` k/n."""
    # a project's caches are artifacts/NAME/features.h5; the name of others is unknown
    target = path.parent.name if path.name == "features.h5" else f"NAME --out {path}"
    return f"duplex extract --dataset {target}{'' if shard is None else f' --shard {shard}'}"


def _differs(key: str, stored: Mapping[str, str | None], expect: Mapping[str, str | None]) -> bool:
    values = (stored.get(key), expect.get(key))
    return values[0] != values[1] and not (key == ROOT and None in values)


def shortened(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= 40 else f"{value[:12]}…"


HDF5_SIGNATURE = b"\x89HDF"
HEAD = 1 << 16  # bytes within which every cache names its format


def refuse_foreign(path: Path) -> None:
    """Raise `DuplexError` if writing a cache to `path` would overwrite a file of another kind."""
    for file, signature in ((path, FORMATS.encode()), (partial_path(path), HDF5_SIGNATURE)):
        if not os.path.lexists(file):
            continue
        head = None
        if file.is_file():
            with file.open("rb") as stream:
                head = stream.read(HEAD)
        if head is None or (head and not (head.startswith(HDF5_SIGNATURE) and signature in head)):
            raise DuplexError(
                f"{file} exists and is not a feature cache, so it is not overwritten; "
                "give another path (--out), or move this file"
            )


@contextmanager
def open_cache(path: Path) -> Iterator[Any]:
    """Open a finished cache or shard; `DuplexError` if it is missing, damaged or of another version."""
    require_cache_file(path)
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        raise DuplexError(f"{path} cannot be opened as an HDF5 file: {error}; {repair_hint(path)}") from error
    with file:
        try:
            version = read_format(file)
            if not version.startswith(FORMATS):
                raise DuplexError(f"{path} is not a feature cache of duplex; give a file that `duplex extract` wrote")
            if version != FORMAT:
                raise DuplexError(
                    f"{path} has the format {version}, but this version of duplex reads {FORMAT}; {repair_hint(path)}"
                )
            yield file
        except (DamagedCache, OSError, RuntimeError) as error:  # the latter two are h5py's
            raise DuplexError(f"{path} is damaged: {error}; {repair_hint(path)}") from error


def require_cache_file(path: Path) -> None:
    if not path.exists():
        begun = partial_path(path).exists()
        if begun:
            raise DuplexError(f"{path} is not finished; {repair_hint(path, 'finishes it')}")
        raise DuplexError(f"{path} does not exist; {repair_hint(path, 'makes it')}")


def read_format(file: Any) -> str:
    """The attribute `format` of an open HDF5 file; "" if the file has none."""
    return bytes(file.attrs.get("format", b"")).decode(errors="replace")


def read_identity(file: Any) -> Identity:
    return {key: value.decode() for key, value in file["identity"].attrs.items()}


def read_row_span(file: Any) -> Span:
    return Span(int(file.attrs["start"]), int(file.attrs["stop"]), int(file.attrs["total"]))


@dataclass(frozen=True)
class Features:
    """The CLS features of all images in a finished feature cache, loaded into memory."""

    path: Path
    identity: Identity
    cls: NDArray[np.float32]  # [N, d], not normalised; zero where bad
    statuses: Statuses  # [N]
    contents: str  # digest of `cls` and `statuses`

    @cached_property
    def bad(self) -> NDArray[np.bool_]:
        return self.statuses >= FIRST_BAD


def read_features(path: Path | str, expect: Mapping[str, str | None] | None = None) -> Features:
    """Read the CLS features of a finished cache; raises `DuplexError` if it is incomplete.

    Args:
        path: the HDF5 file.
        expect: settings that the cache must have been made with, such as {"manifest": sha256}
    """
    path = expanded_path(path, "the feature cache")
    with open_cache(path) as file:
        identity = read_identity(file)
        span = read_row_span(file)
        statuses = file["status"][...]
        if expect is not None:
            check_identity(identity, expect, path)
        if not span.whole:
            raise DuplexError(
                f"{path} is a shard with {span.rows} of {span.total} rows; join all shards with `duplex cache join`"
            )
        pending = int((statuses == PENDING).sum())
        if pending:
            raise DuplexError(f"{path} has rows that were never encoded ({pending}); {repair_hint(path)}")
        cls = read_rows(file, "cls").astype(np.float32)
        return Features(path, identity, cls, statuses, contents_digest(file))


def read_cache_digest(path: Path) -> str:
    """A digest of the features in a finished cache, computed quickly from the stored checksums."""
    with open_cache(path) as file:
        return contents_digest(file)


@contextmanager
def claim_cache(path: Path) -> Iterator[None]:
    """Hold the lock for writing a cache; raises `DuplexError` if another process holds it."""
    refuse_foreign(path)
    with sole_writer(path, "extraction", "or give this one another --out"):
        yield


class PartialCache:
    """An unfinished feature cache that rows are written to, under the lock of `claim_cache`."""

    def __init__(self, path: Path) -> None:
        """Open the unfinished file of the cache `path`; `DamagedCache` if it cannot be continued."""
        self.path = path
        self.partial = partial_path(path)
        try:
            opened = h5py.File(self.partial, "r", locking="best-effort")
        except OSError as error:
            if error.errno is not None:  # a fault of the file system, not of the file's contents
                raise
            raise DamagedCache(str(error)) from error
        with opened as file:
            if read_format(file) != FORMAT:
                raise DamagedCache("this version of duplex did not write it")
            self.identity = read_identity(file)
            self.span = read_row_span(file)
            self.statuses: Statuses = file["status"][...]
            self.contents: Contents = file[CONTENTS][...]
            self._offset = {name: file[name].id.get_offset() for name in DATASETS if name in file}
            self.shapes = {name: file[name].shape[1:] for name in self._offset}
        self._file = self.partial.open("r+b")
        self._uncommitted: list[tuple[NDArray[np.int64], Statuses]] = []

    @property
    def names(self) -> list[str]:
        return value_names(self.shapes)

    @property
    def done(self) -> int:
        """Number of finished rows; rows of unreadable images count, too."""
        return int((self.statuses != PENDING).sum())

    @classmethod
    def create(
        cls,
        path: Path,
        identity: Mapping[str, str],
        span: Span,
        dim: int,
        token_shapes: Shapes | None = None,
        constants: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    ) -> PartialCache:
        """Create an unfinished cache for features of width `dim`, tokens of given shapes, whole arrays `constants`."""
        with report_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        shapes = cache_shapes(dim, token_shapes)
        needed = span.rows * sum(row_bytes(name, row) for name, row in shapes.items()) + (1 << 16)
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise DuplexError(
                f"{path} needs {size_text(needed)}, but {path.parent} has only {size_text(free)} free; "
                "make room, or choose another place with --out"
            )
        # under a scratch name first, so that a partial file always has its whole layout
        with replace_file(partial_path(path)) as scratch, h5py.File(scratch, "w", locking="best-effort") as file:
            # text of fixed length, so that equal caches have equal bytes
            file.attrs["format"] = np.bytes_(FORMAT)
            for key in ("start", "stop", "total"):
                file.attrs[key] = np.int64(getattr(span, key))
            group = file.create_group("identity")
            for key, value in sorted(identity.items()):
                group.attrs[key] = np.bytes_(value.encode())
            for name, row in shapes.items():
                _allocate(file, name, (span.rows, *row), DATASETS[name])
            for name, values in constants.items():
                _allocate(file, name, values.shape, values.dtype)
                file[name][...] = values
        return cls(path)

    def write(self, rows: int | Sequence[int] | NDArray[np.int64], statuses: Statuses, **values: NDArray[Any]) -> None:
        """Write rows, given by numbers or the first of them; they count as finished after `commit`."""
        if isinstance(rows, int):
            rows = np.arange(rows, rows + len(statuses))
        places = np.asarray(rows, np.int64)
        blocks = {name: np.ascontiguousarray(values[name], DATASETS[name]) for name in self.names}
        for name, block in blocks.items():
            expected = (len(statuses), *self.shapes[name])
            if block.shape != expected:
                raise DuplexError(
                    f"{self.partial}: the encoder returned {name!r} of shape {block.shape}, not {expected}; "
                    "correct the encoder's output or, for 'cls', its attribute `dim`"
                )
        final = np.where(statuses == COPIED, ENCODED, statuses)
        covered = {"cls": final}  # by the checksum, beside the row itself
        sums = [row_checksums(block, covered.get(name)) for name, block in blocks.items()]
        contents = values.get(CONTENTS, np.zeros((len(statuses), SHA256), np.uint8))
        blocks |= {CHECKSUMS: np.stack(sums, axis=1), CONTENTS: contents}
        for name, block in blocks.items():
            self._put(name, places, block)
        self.contents[places] = contents
        self._uncommitted.append((places, statuses))

    def commit(self) -> None:
        """Flush written rows to disk, then mark them as finished: a crash loses no marked row."""
        if not self._uncommitted:
            return
        self._sync()
        for places, statuses in self._uncommitted:
            self._put("status", places, statuses)
            self.statuses[places] = statuses
        self._uncommitted.clear()

    def finish(self) -> None:
        """Commit all rows, then rename the unfinished file to the cache's final name."""
        self.commit()
        copied = np.flatnonzero(self.statuses == COPIED)
        self._put("status", copied, np.full(len(copied), ENCODED, np.uint8))
        self.statuses[copied] = ENCODED
        self._sync()
        self.close()
        os.replace(self.partial, self.path)

    def close(self) -> None:
        self._file.close()

    def _put(self, name: str, places: NDArray[np.int64], block: NDArray[Any]) -> None:
        size = row_bytes(name, self.shapes[name])
        ends = np.flatnonzero(np.diff(places) != 1) + 1  # of consecutive rows, which are written at once
        with self._report_write_errors():
            for run, values in zip(np.split(places, ends), np.split(block, ends), strict=True):
                view = memoryview(values.tobytes())
                offset = self._offset[name] + int(run[0]) * size if len(run) else 0
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


def _allocate(file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    # contiguous, and with its space at once, so that its offset is known before rows are written
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_obj_track_times(False)
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(dtype), h5py.h5s.create_simple(shape), plist)
