"""Pictures through a frozen encoder into a cache: the one function behind `duplex extract`, `dvc repro` and shards.

Rows are encoded in blocks that always hold the same rows, so a feature never depends on where an earlier run stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from duplex.encoders.image_blocks import entering_shape
from duplex.errors import DuplexError, UsageError, require
from duplex.features.augmentation import Augmentation
from duplex.features.decoding import Pictures, decoded_blocks, decoding_workers, row_blocks, worker_deaths
from duplex.features.encoding import Kept, Values, encoded_blocks, memory_shortage
from duplex.features.identity import Identity, cache_identity, difference
from duplex.features.interrupts import say, stop_requests
from duplex.features.layout import (
    CODES,
    DEEP,
    ENCODED,
    FIRST_BAD,
    NOT_FINITE,
    PENDING,
    STEPS,
    Bools,
    Marks,
    Span,
    check_values,
    mark_of,
    open_file,
    partial_path,
    places,
    read_identity,
    read_span,
    reason,
    refuse_foreign,
)
from duplex.features.shards import extent
from duplex.features.store import EXTRACTION, PartialCache, unfinish
from duplex.system.hdf5 import Unfit
from duplex.system.lock import sole_writer
from duplex.system.progress import Bar

if TYPE_CHECKING:
    from duplex.encoders import Encoder

TOKENS, BITS = ("none", "patch"), ("8", "16")
COMMIT_SECONDS = 1.0  # a commit waits for the disk; a killed run repeats at most this long


@dataclass(frozen=True)
class Job:
    """The rows of one file, and how they are to be encoded."""

    images: Sequence[str]
    first: int  # the first of them among all rows
    held: Bools | None  # of which of them what enters the last blocks is kept; None: of all
    augmentation: Augmentation | None
    root: Path
    encoder: Encoder
    kept: Kept
    batch_size: int
    num_workers: int
    max_bad: float
    fresh: bool
    progress: bool
    commit_seconds: float

    @property
    def pictures(self) -> Pictures:
        return Pictures(self.images, self.root, self.encoder.image_transform, self.augmentation, self.first)


@dataclass(frozen=True)
class BadImage:
    """A manifest row without a feature."""

    row: int
    image: str
    reason: str


@dataclass(frozen=True)
class ExtractionReport:
    """What an extraction did. `rows` is what the file holds, `resumed` what it already held."""

    path: Path
    rows: int
    resumed: int
    seconds: float
    bad: list[BadImage] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Pictures a second of this run."""
        return (self.rows - self.resumed) / self.seconds if self.seconds > 0 else 0.0

    def lines(self) -> list[str]:
        """What happened, bad pictures listed."""
        resumed = f", {self.resumed} of them before" if self.resumed else ""
        rate = f" at {self.rate:.1f} pictures a second" if self.rate else ""
        listed = [f"  bad: row {bad.row}, {bad.image}: {bad.reason}" for bad in self.bad]
        return [f"{self.path}: {self.rows} rows{resumed}{rate}, {len(self.bad)} bad", *listed]

    def to_dict(self) -> dict[str, object]:
        bad = [{"row": b.row, "image": b.image, "reason": b.reason} for b in self.bad]
        return {"rows": self.rows, "resumed": self.resumed, "seconds": round(self.seconds, 3), "bad": bad}


def extract(
    images: Sequence[str],
    root: Path,
    out: Path,
    encoder: Encoder,
    *,
    manifest_sha256: str,
    batch_size: int = 64,
    num_workers: int | Literal["auto"] = "auto",
    tokens: str = "none",
    depth: int = 0,
    bits: int = 16,
    deep_rows: Bools | None = None,
    augmentation: Augmentation | None = None,
    shard: tuple[int, int] | None = None,
    max_bad: float = 0.01,
    fresh: bool = False,
    limit: int | None = None,
    progress: bool = True,
    commit_seconds: float = COMMIT_SECONDS,
) -> ExtractionReport:
    """Encode `images` (paths relative to `root`), or the views of each, into the cache `out`, or one shard of it. What
    enters the last `depth` blocks is kept of all of them, or of those that `deep_rows` names.

    A finished cache of the same identity is left as it is; an unfinished one is resumed. Pictures that cannot be read
    keep their row, marked; more than `max_bad` of them is an error, and the unfinished cache stays for the next try.
    """
    require(tokens, TOKENS, "tokens")
    require(str(bits), BITS, "bits")
    if not root.is_dir():
        raise UsageError(f"the pictures' folder {root} does not exist; set the data set's root in params.yaml")
    if out.is_dir():
        raise UsageError(f"{out} is a folder; --out names the cache's file")
    images = images if augmentation is None else augmentation.rows(images)
    total = len(images) if limit is None else min(limit, len(images))
    span, path = extent(total, batch_size, shard, out)
    first = total if total < len(images) else None
    held = None if deep_rows is None or not depth else deep_rows[:total]
    if held is not None and not held.any():
        raise UsageError(f"what enters the last blocks is kept of none of {total} pictures; ask for more, or no depth")
    wanted = cache_identity(encoder.identity, manifest_sha256, tokens, first, depth, bits, held)
    wanted |= {} if augmentation is None else augmentation.identity
    rows = images[span.start : span.stop]
    workers = decoding_workers(num_workers)
    which = rows, span.start, None if held is None else held[span.start : span.stop], augmentation
    kept = Kept(tokens == "patch", depth, bits)
    job = Job(*which, root, encoder, kept, batch_size, workers, max_bad, fresh, progress, commit_seconds)
    return _extracted(path, wanted, span, job)


def _extracted(path: Path, wanted: Identity, span: Span, job: Job) -> ExtractionReport:
    """The file of a job's rows: as it was finished before, or gone on with, or begun."""
    began = time.monotonic()
    refuse_foreign(path)
    with sole_writer(path, *EXTRACTION):
        marks = None if job.fresh else finished_marks(path, wanted, span)
        if marks is not None and not _mended(path, marks, job):
            _check_share(marks, job)
            return ExtractionReport(path, span.rows, span.rows, 0.0, _bad_images(marks, span, job.images))
        if marks is not None:
            unfinish(path)
        cache = _open_or_create(path, wanted, span, job)
        try:
            _reconsider(cache, job)
            resumed = cache.done
            _encode_pending(cache, job)
            cache.finish()
        finally:
            cache.close()
    bad = _bad_images(cache.marks, span, job.images)
    return ExtractionReport(path, span.rows, resumed, time.monotonic() - began, bad)


def finished_marks(path: Path, wanted: Identity, span: Span) -> Marks | None:
    """The marks of a finished cache of just this identity that holds what it should, or None."""
    if not path.exists():
        return None
    try:
        with open_file(path) as file:
            other = difference(read_identity(file), wanted)
            marks: Marks = file["mark"][...]
            if other is None and read_span(file) == span and not (marks == PENDING).any():
                check_values(file, path)
                return marks
        why = f"{path} was made with another {other or 'set of rows'}"
    except DuplexError as error:
        why = str(error).partition(";")[0]
    say(f"{why}; extracting afresh")
    return None


def _open_or_create(path: Path, wanted: Identity, span: Span, job: Job) -> PartialCache:
    if not job.fresh and partial_path(path).exists():
        try:
            cache = PartialCache(path)
        except OSError as error:
            raise DuplexError(f"{partial_path(path)} cannot be opened: {error}") from error
        except Unfit as error:
            say(f"{partial_path(path)} is damaged; extracting afresh: {error}")
        else:
            other = difference(cache.identity, wanted) or (None if cache.span == span else "set of rows")
            if other is None:
                return cache
            cache.close()
            say(f"{partial_path(path)} was begun with another {other}; extracting afresh")
    return PartialCache.create(path, wanted, span, job.encoder.dim, _beside(job), job.held)


def _beside(job: Job) -> dict[str, tuple[int, ...]]:
    """Shapes of what is kept of one picture beside its CLS feature."""
    found: dict[str, tuple[int, ...]] = {}
    if job.kept.patches:
        found["patch"] = job.encoder.patches
    if job.kept.depth:
        row = entering_shape(job.encoder, job.kept.depth)
        found |= {"deep": row} if job.kept.bits == 16 else {CODES: row, STEPS: places(row)}
    return found


def _reconsider(cache: PartialCache, job: Job) -> None:
    """A picture that was bad before and can be read today is encoded after all."""
    for row in _readable(cache.marks, job):
        cache.marks[row] = PENDING


def _mended(path: Path, marks: Marks, job: Job) -> bool:
    """Whether a finished cache is to be taken up again. A view of shards is not: they are."""
    if next(_readable(marks, job), None) is None:
        return False
    with open_file(path) as file:
        return not file["mark"].is_virtual


def _readable(marks: Marks, job: Job) -> Iterator[int]:
    """Rows that were bad for their picture's sake, which can be had today."""
    bad = (marks >= FIRST_BAD) & (marks != mark_of(NOT_FINITE))
    pictures = job.pictures
    yield from (row for row in np.flatnonzero(bad).tolist() if pictures[row][1] == ENCODED)


def _encode_pending(cache: PartialCache, job: Job) -> None:
    """Encode every block that has a pending row, whole."""
    rows = len(job.images)
    pending = [block for block in row_blocks(rows, job.batch_size) if (cache.marks[slice(*block)] == PENDING).any()]
    workers, pinned = min(job.num_workers, len(pending)), job.encoder.device.type == "cuda"
    decoded = decoded_blocks(job.pictures, pending, workers, pinned=pinned)
    stream = encoded_blocks(job.encoder, decoded, job.kept)
    bar = Bar("pictures", sum(stop - start for start, stop in pending) if job.progress else 0)
    began = committed = time.monotonic()
    encoded = 0
    with memory_shortage(job.batch_size), worker_deaths(), stop_requests() as stop, bar:
        for start, marks, values in stream:
            cache.write(start, marks, **_kept(job, start, values))
            encoded += len(marks)
            moment = time.monotonic()
            bar.show(encoded, {"a second": encoded / (moment - began)})
            if stop.is_set() or moment - committed >= job.commit_seconds:
                cache.commit()
                committed = moment
                _check_share(cache.marks, job)
            if stop.is_set():
                raise DuplexError(
                    f"stopped with {cache.done} of {rows} rows encoded; run the same command again to go on"
                )
    cache.commit()
    _check_share(cache.marks, job)


def _kept(job: Job, start: int, values: Values) -> Values:
    """Of a block what the cache keeps."""
    if job.held is None:
        return values
    return {
        name: value[job.held[start : start + len(value)]] if name in DEEP else value for name, value in values.items()
    }


def _check_share(marks: Marks, job: Job) -> None:
    """Stop as soon as the share of bad pictures cannot come right any more."""
    bad = np.flatnonzero(marks >= FIRST_BAD).tolist()
    if len(bad) <= job.max_bad * len(job.images):
        return
    shown = "; ".join(f"{job.images[row]} ({reason(marks[row])})" for row in bad[:5])
    raise DuplexError(
        f"{len(bad)} of {len(job.images)} pictures cannot be read, more than max_bad = {job.max_bad:g} allows: {shown}"
        f"{'; …' if len(bad) > 5 else ''}; mend them, or raise extraction.max_bad in params.yaml"
    )


def _bad_images(marks: Marks, span: Span, images: Sequence[str]) -> list[BadImage]:
    rows = np.flatnonzero(marks >= FIRST_BAD).tolist()
    return [BadImage(span.start + row, images[row], reason(marks[row])) for row in rows]
