"""Write the features of images to a cache: encode them, or find them in other caches by content.

The last bits of a feature depend on its batch. Images are therefore always grouped into the same
batches, and a resumed extraction gives the same features.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from duplex.data.contents import file_digests
from duplex.errors import DuplexError, UsageError, require
from duplex.features import encode
from duplex.features.encode import (
    ImageRows,
    WantedOutputs,
    decode_batches,
    decoding_workers,
    encode_batches,
    encoding_code,
)
from duplex.features.file import (
    BLOCK,
    CONTENTS,
    COPIED,
    ENCODED,
    ENCODING,
    FIRST_BAD,
    NEGATIVE_CHECKSUMS,
    NEGATIVES,
    PENDING,
    PIXELS,
    ROOT,
    SHA256,
    Contents,
    DamagedCache,
    Identity,
    PartialCache,
    Span,
    Statuses,
    cache_identity,
    claim_cache,
    first_difference,
    open_cache,
    partial_path,
    read_identity,
    read_row_span,
    read_rows,
    row_bytes,
    row_checksums,
    status_reason,
    verify_checksums,
)
from duplex.features.shards import plan_shard
from duplex.features.tokens import read_negatives
from duplex.system.files import replace_file
from duplex.system.processes import ProgressBar

if TYPE_CHECKING:
    from duplex.encoders.base import Encoder

OWN = ("manifest", ROOT, "tokens", "block_inputs", PIXELS)  # settings apart from the encoder
LARGEST_CHOICE = 1024  # rows that h5py reads at once fast, if they are not neighbours
TOKENS = ("none", "patch")
COMMIT_SECONDS = 1.0  # between commits, which wait for the disk; a killed run repeats this long
LISTED_BAD = 5  # bad images that an error lists


@dataclass(frozen=True)
class ExtractionSettings:
    """Which images an encoder encodes, what is stored of each, and in batches of which size."""

    root: Path  # folder of the images
    manifest_sha256: str  # digest of the list of images
    recorded_root: str | None = None  # as the cache should record it, such as `root` in params.yaml
    batch_size: int = 64
    num_workers: int | Literal["auto"] = "auto"  # decoding processes; auto: one fewer than cores; 0: none
    tokens: str = "none"  # or patch: patch tokens are stored, too
    block_inputs: int = 0  # last blocks of the image tower whose input is stored, to train them
    pixels: bool = False  # also store the images as they enter the encoder, to train any block
    max_bad: float = 0.01  # share of unreadable images above which `DuplexError` is raised

    def __post_init__(self) -> None:
        require(self.tokens, TOKENS, "tokens")

    @property
    def outputs(self) -> WantedOutputs:
        return WantedOutputs(self.tokens == "patch", self.block_inputs, self.pixels)

    def identity(self, encoder: Encoder) -> Identity:
        """The identity of a cache of these images, encoded by `encoder` with the code as it is."""
        return cache_identity(
            {**encoder.identity.to_dict(), ENCODING: encoding_code(encoder.identity.encoder)},
            self.manifest_sha256,
            self.tokens,
            self.block_inputs,
            self.recorded_root,
            self.pixels,
        )


@dataclass(frozen=True)
class ExtractionJob:
    """One extraction: the cache file's path, identity and rows, the images, and the encoder."""

    path: Path
    identity: Identity
    span: Span
    rows: ImageRows
    encoder: Encoder
    settings: ExtractionSettings
    reuse: Sequence[Path]
    fresh: bool


@dataclass(frozen=True)
class BadImage:
    """An image that has no features because it could not be read or encoded."""

    row: int
    image: str
    reason: str


@dataclass(frozen=True)
class ExtractionReport:
    """Result of an extraction: numbers of rows and of those encoded before, seconds, bad images."""

    path: Path
    rows: int
    resumed: int
    seconds: float
    bad: list[BadImage] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as text: a summary line, then one line per image without features."""
        resumed = f", {self.resumed} of them encoded before" if self.resumed else ""
        encoded = self.rows - self.resumed
        rate = ""
        if encoded and self.seconds:
            rate = f", {encoded / self.seconds:.1f} images per second"
        listed = [f"  bad: row {bad.row}, {bad.image}: {bad.reason}" for bad in self.bad]
        return [f"{self.path}: {self.rows} rows{resumed}{rate}, {len(self.bad)} bad", *listed]

    def to_dict(self) -> dict[str, object]:
        record = {"rows": self.rows, "resumed": self.resumed, "seconds": round(self.seconds, 3)}
        return {**record, "bad": [asdict(image) for image in self.bad]}


def extract(
    images: Sequence[str],
    out: Path,
    encoder: Encoder,
    settings: ExtractionSettings,
    *,
    shard: tuple[int, int] | None = None,
    reuse: Sequence[Path] = (),
    fresh: bool = False,
) -> ExtractionReport:
    """Encode images into the feature cache `out`; a `shard` (k, n), k from 0, into a file beside it.

    A finished cache with the same settings is kept, an unfinished one is resumed. Images found in
    an earlier cache at `out` or in `reuse` are copied from there, unless `fresh`.
    """
    root = settings.root
    if not root.is_dir():
        raise UsageError(f"the image folder {root} does not exist; correct `root` (a project sets it in params.yaml)")
    if out.is_dir():
        raise UsageError(f"{out} is a folder; give --out the path of a file, such as {out / 'features.h5'}")
    span, path = plan_shard(len(images), settings.batch_size, shard, out)
    rows = ImageRows(images[span.start : span.stop], root, encoder.image_transform)
    job = ExtractionJob(path, settings.identity(encoder), span, rows, encoder, settings, reuse, fresh)
    with claim_cache(path):
        return _run(job)


def _run(job: ExtractionJob) -> ExtractionReport:
    rows = job.span.rows
    began = time.monotonic()
    contents = None
    finished = None if job.fresh else _read_if_finished(job)
    if finished is not None:
        statuses, contents_then = finished
        contents = image_contents(job.rows.root, job.rows.images)
        if np.array_equal(contents, contents_then):
            return ExtractionReport(job.path, rows, rows, 0.0, _checked_bad_images(statuses, job))
        with replace_file(partial_path(job.path)) as scratch:  # the cache itself stays as it is
            shutil.copyfile(job.path, scratch)
    with closing(_open_or_create(job)) as cache:
        if not job.fresh:
            _find_encoded(cache, job, contents)
        resumed = cache.done
        _encode_pending(cache, job)
        bad = _checked_bad_images(cache.statuses, job)
        cache.finish()
    return ExtractionReport(job.path, rows, resumed, time.monotonic() - began, bad)


def _read_if_finished(job: ExtractionJob) -> tuple[Statuses, Contents] | None:
    """Statuses and contents of the job's cache; None, with a note on stderr, if it cannot be kept."""
    path = job.path
    if not path.exists():
        return None
    try:
        with open_cache(path) as file:
            key = first_difference(read_identity(file), job.identity)
            statuses: Statuses = file["status"][...]
            if key is None and read_row_span(file) == job.span and not (statuses == PENDING).any():
                verify_checksums(file)
                return statuses, file[CONTENTS][...]
        why = f"{path} was made with another {key or 'set of rows'}"
    except DuplexError as error:
        why = str(error).partition(";")[0]
    print(f"{why}; extracting again", file=sys.stderr)
    return None


def _open_or_create(job: ExtractionJob) -> PartialCache:
    partial = partial_path(job.path)
    if not job.fresh and partial.exists():
        try:
            cache = PartialCache(job.path)
        except DamagedCache as error:
            print(f"{partial} cannot be continued ({error}); extracting again", file=sys.stderr)
        else:
            key = first_difference(cache.identity, job.identity)
            if key is None and cache.span == job.span:
                return cache
            cache.close()
            print(f"{partial} was begun with another {key or 'set of rows'}; extracting again", file=sys.stderr)
    shapes = job.settings.outputs.row_shapes(job.encoder)
    negatives = _negatives(job)
    constants: dict[str, NDArray[Any]] = {NEGATIVES: negatives, NEGATIVE_CHECKSUMS: row_checksums(negatives)}
    return PartialCache.create(job.path, job.identity, job.span, job.encoder.dim, shapes, constants)


def _negatives(job: ExtractionJob) -> NDArray[np.float16]:
    wanted = {key: value for key, value in job.identity.items() if key not in OWN}
    for source in () if job.fresh else (job.path, *job.reuse):
        with suppress(DuplexError), open_cache(source) as file:
            if has_outputs_of(read_identity(file), wanted) and (stored := read_negatives(file)) is not None:
                return stored
    batch_size = job.settings.batch_size
    with encode.explain_memory_errors(batch_size):
        return encode.encode_negatives(job.encoder, batch_size)


def _find_encoded(cache: PartialCache, job: ExtractionJob, contents: Contents | None) -> None:
    sources = [path for path in (job.path, *job.reuse) if path.exists()]
    if not sources and not cache.done:
        return
    if contents is None:
        contents = image_contents(job.rows.root, job.rows.images)
    cache.statuses[(cache.contents != contents).any(axis=1)] = PENDING
    copy_equal_rows(cache, contents, sources)


def _encode_pending(cache: PartialCache, job: ExtractionJob) -> None:
    # Batches always hold the same images, so encoded images in a batch with a pending image are
    # encoded again. Copied rows are in no batch: a few new images among many are encoded alone.
    not_copied = np.flatnonzero(cache.statuses != COPIED).tolist()
    batches = encode.split_rows(not_copied, job.settings.batch_size)
    pending = [rows for rows in batches if (cache.statuses[rows] == PENDING).any()]
    workers = min(decoding_workers(job.settings.num_workers), len(pending))
    pinned = job.encoder.device.type == "cuda"
    decoded = decode_batches(job.rows, pending, workers, pinned=pinned)
    encoded = encode_batches(job.encoder, decoded, job.settings.outputs)
    bar = ProgressBar("images", sum(map(len, pending)))
    began = committed = time.monotonic()
    count = 0
    with encode.explain_memory_errors(job.settings.batch_size), bar:
        try:
            for rows, (_, statuses, values) in zip(pending, encoded, strict=True):
                cache.write(rows, statuses, **values)
                count += len(statuses)
                now = time.monotonic()
                bar.show(count, {"per second": count / (now - began)})
                if now - committed >= COMMIT_SECONDS:
                    cache.commit()
                    committed = now
                    _checked_bad_images(cache.statuses, job)
        finally:
            cache.commit()


def check_share_of_bad(bad: Sequence[BadImage], total: int, max_bad: float) -> None:
    """Raise `DuplexError` if `bad` images are more than the share `max_bad` of `total` images."""
    if len(bad) <= max_bad * total:
        return
    listed = ", ".join(f"{image.image} ({image.reason})" for image in bad[:LISTED_BAD])
    raise DuplexError(
        f"{len(bad)} of {total} images cannot be read, a larger share than max_bad = {max_bad:g}: {listed}"
        f"{', …' if len(bad) > LISTED_BAD else ''}; repair or remove these images, or raise max_bad (in a project: "
        "extraction.max_bad in params.yaml)"
    )


def bad_images(statuses: Statuses, images: Sequence[str], start: int = 0) -> list[BadImage]:
    """The images without features, according to `statuses`; `start`: the first image's row."""
    rows = np.flatnonzero((statuses >= FIRST_BAD) & (statuses != COPIED)).tolist()
    return [BadImage(start + row, images[row], status_reason(statuses[row])) for row in rows]


def _checked_bad_images(statuses: Statuses, job: ExtractionJob) -> list[BadImage]:
    bad = bad_images(statuses, job.rows.images, job.span.start)
    check_share_of_bad(bad, job.span.rows, job.settings.max_bad)
    return bad


def image_contents(root: Path, images: Sequence[str]) -> Contents:
    """Raw sha256 of each image file below `root` [N, 32]; zeros for a missing or unreadable file."""
    digests = [bytes.fromhex(digest) or bytes(SHA256) for digest in file_digests(root, images)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, SHA256)


def has_outputs_of(identity: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a cache with settings `identity` has the encoder and all outputs of settings `wanted`."""
    shared = {*identity, *wanted} - set(OWN)
    same_encoder = all(identity.get(key) == wanted.get(key) for key in shared)
    needed = [key for key in ("tokens", "block_inputs", PIXELS) if key in wanted]
    return same_encoder and all(identity.get(key) == wanted[key] for key in needed)


def rows_by_content(path: Path, wanted: Mapping[str, str], *, bad: bool = False) -> dict[bytes, int]:
    """Each image file's sha256 -> its row, if the cache fits the settings `wanted`; `bad`: all rows."""
    try:
        with open_cache(path) as file:
            if not has_outputs_of(read_identity(file), wanted):
                return {}
            contents = file[CONTENTS][...]
            statuses = file["status"][...]
            encoded = (statuses != PENDING) & (statuses != COPIED) if bad else statuses == ENCODED
    except DuplexError:  # reported where the cache itself is used
        return {}
    rows = np.flatnonzero(encoded & contents.any(axis=1)).tolist()
    return {contents[row].tobytes(): row for row in rows}


def copy_equal_rows(cache: PartialCache, contents: Contents, sources: Iterable[Path]) -> None:
    """Fill pending rows from other caches; `contents`: sha256 of each image's file [N, 32]."""
    keys = [content.tobytes() for content in contents]
    for source in sources:
        known = rows_by_content(source, cache.identity)
        pending = np.flatnonzero(cache.statuses == PENDING).tolist()
        places = [row for row in pending if keys[row] in known]
        if not places:
            continue
        try:
            _copy(cache, contents, places, source, [known[keys[row]] for row in places])
        except DuplexError as error:
            problem = str(error).partition(";")[0]
            print(f"{problem}; images not yet copied from this file are encoded", file=sys.stderr)
        cache.commit()


def _copy(cache: PartialCache, contents: Contents, places: list[int], source: Path, rows: list[int]) -> None:
    size = sum(row_bytes(name, cache.shapes[name]) for name in cache.names)
    step = min(LARGEST_CHOICE, max(1, BLOCK // size))
    with open_cache(source) as file:
        for start in range(0, len(places), step):
            some = np.array(places[start : start + step])
            chosen, back = np.unique(rows[start : start + step], return_inverse=True)
            values = {name: read_rows(file, name, chosen)[back] for name in cache.names}
            statuses = np.full(len(some), COPIED, np.uint8)
            cache.write(some, statuses, contents=contents[some], **values)
