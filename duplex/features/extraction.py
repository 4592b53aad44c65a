"""Encode images with a frozen encoder and write their features to a feature cache (an HDF5 file).

Images are always grouped into the same batches, on which the last bits of features depend: an extraction that was
interrupted and resumed gives the same features.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from duplex.errors import DuplexError, UsageError, require
from duplex.features.checks import open_cache, read_identity, read_row_span
from duplex.features.checksums import check_values
from duplex.features.decoding import ImageRows, decode_batches, decoding_workers, report_worker_deaths, split_rows
from duplex.features.encoding import OutputSpec, encode_batches, report_memory_shortage
from duplex.features.identity import Identity, cache_identity, first_difference
from duplex.features.layout import (
    BAD_FEATURES,
    ENCODED,
    FIRST_BAD,
    PENDING,
    DamagedCache,
    Span,
    Statuses,
    partial_path,
    status_reason,
)
from duplex.features.shards import plan_shard
from duplex.features.store import PartialCache, claim_cache
from duplex.system.files import replace_file
from duplex.system.progress import ProgressBar

if TYPE_CHECKING:
    from duplex.encoders import Encoder

TOKENS = ("none", "patch")
BITS = ("8", "16")
COMMIT_SECONDS = 1.0  # between commits, which wait for the disk; a killed run repeats at most this long
LISTED_BAD = 5  # bad images that an error lists


@dataclass(frozen=True)
class ExtractionJob:
    """What is needed to encode the images of one cache file."""

    path: Path
    identity: Identity
    span: Span
    rows: ImageRows
    encoder: Encoder
    outputs: OutputSpec
    batch_size: int
    num_workers: int
    max_bad: float
    fresh: bool
    progress: bool


@dataclass(frozen=True)
class BadImage:
    """An image that has no features because it could not be read or encoded: its row, its path and the reason."""

    row: int
    image: str
    reason: str


@dataclass(frozen=True)
class ExtractionReport:
    """Result of an extraction: the number of `rows` in the cache file, of which earlier attempts encoded `resumed`."""

    path: Path
    rows: int
    resumed: int
    seconds: float
    bad: list[BadImage] = field(default_factory=list)

    def lines(self) -> list[str]:
        """A summary line, then one line per image without features."""
        resumed = f", {self.resumed} of them from an earlier run" if self.resumed else ""
        encoded = self.rows - self.resumed
        rate = f", {encoded / self.seconds:.1f} images per second" if encoded and self.seconds else ""
        listed = [f"  bad: row {bad.row}, {bad.image}: {bad.reason}" for bad in self.bad]
        return [f"{self.path}: {self.rows} rows{resumed}{rate}, {len(self.bad)} bad", *listed]

    def to_dict(self) -> dict[str, object]:
        record = {"rows": self.rows, "resumed": self.resumed, "seconds": round(self.seconds, 3)}
        return {**record, "bad": [asdict(image) for image in self.bad]}


def extract(
    images: Sequence[str],
    root: Path,
    out: Path,
    encoder: Encoder,
    *,
    manifest_sha256: str,
    batch_size: int = 64,
    num_workers: int | Literal["auto"] = "auto",
    recorded_root: str | None = None,
    tokens: str = "none",
    block_inputs: int = 0,
    bits: int = 16,
    shard: tuple[int, int] | None = None,
    max_bad: float = 0.01,
    fresh: bool = False,
    limit: int | None = None,
    progress: bool = True,
) -> ExtractionReport:
    """Encode images into the feature cache `out`.

    A finished cache that was made with the same settings is kept; only images that have become readable since are
    encoded. An unfinished one is resumed. Images that cannot be read keep their row, with the reason as its status.

    Args:
        images: paths relative to `root`, in the order of the manifest.
        root: folder of the images.
        out: the cache's file.
        encoder: the frozen encoder.
        manifest_sha256: sha256 of the manifest file.
        batch_size: number of images that are encoded at once.
        num_workers: number of decoding processes; auto: one per core, less one; 0: decode in this process.
        recorded_root: name of the images' folder that the cache records, such as `root` in params.yaml; a cache that
            records another name is not kept or resumed. None: no name is recorded or compared.
        tokens: "patch" also stores patch tokens; "none" does not.
        block_inputs: also store what enters the last `block_inputs` blocks of the image tower, so that these can be
            trained.
        bits: 16 or 8 bits per number of the block inputs.
        shard: (k, n) encodes only the k-th of n shards, counted from 0, into a file beside `out`.
        max_bad: share of unreadable images above which `DuplexError` is raised; the unfinished cache stays.
        fresh: start again instead of resuming.
        limit: encode only the first `limit` images.
        progress: show a progress bar on a terminal.
    """
    require(tokens, TOKENS, "tokens")
    require(str(bits), BITS, "bits")
    if not root.is_dir():
        raise UsageError(f"the images' folder {root} does not exist; set the data set's root in params.yaml")
    if out.is_dir():
        raise UsageError(f"{out} is a folder; --out names the cache's file")
    total = len(images) if limit is None else min(limit, len(images))
    span, path = plan_shard(total, batch_size, shard, out)
    limited = total if total < len(images) else None
    identity = cache_identity(
        encoder.identity.to_dict(), manifest_sha256, tokens, limited, block_inputs, bits, recorded_root
    )
    job = ExtractionJob(
        path=path,
        identity=identity,
        span=span,
        rows=ImageRows(images[span.start : span.stop], root, encoder.image_transform),
        encoder=encoder,
        outputs=OutputSpec(tokens == "patch", block_inputs, bits),
        batch_size=batch_size,
        num_workers=decoding_workers(num_workers),
        max_bad=max_bad,
        fresh=fresh,
        progress=progress,
    )
    return _extract_file(job)


def _extract_file(job: ExtractionJob) -> ExtractionReport:
    began = time.monotonic()
    path = job.path
    rows = job.span.rows
    with claim_cache(path):
        statuses = None if job.fresh else statuses_if_finished(path, job.identity, job.span)
        if statuses is not None and next(_newly_readable(statuses, job), None) is None:
            _check_share_of_bad(statuses, job)
            return ExtractionReport(path, rows, rows, 0.0, _bad_images(statuses, job))
        if statuses is not None:
            with replace_file(partial_path(path)) as scratch:  # the cache itself stays as it is
                shutil.copyfile(path, scratch)
        with closing(_open_or_create(job)) as cache:
            for row in _newly_readable(cache.statuses, job):
                cache.statuses[row] = PENDING
            resumed = cache.done
            _encode_pending(cache, job)
            cache.finish()
    return ExtractionReport(path, rows, resumed, time.monotonic() - began, _bad_images(cache.statuses, job))


def statuses_if_finished(path: Path, identity: Identity, span: Span) -> Statuses | None:
    """The status of each row of a cache if it is finished, sound, and made with this `identity` for these rows.

    Otherwise None; if there is a file, the reason is printed on stderr.
    """
    if not path.exists():
        return None
    try:
        with open_cache(path) as file:
            key = first_difference(read_identity(file), identity)
            statuses: Statuses = file["status"][...]
            if key is None and read_row_span(file) == span and not (statuses == PENDING).any():
                check_values(file)
                return statuses
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
        except OSError as error:
            raise DuplexError(f"{partial} cannot be opened: {error}") from error
        except DamagedCache as error:
            print(f"{partial} is damaged; extracting again: {error}", file=sys.stderr)
        else:
            key = first_difference(cache.identity, job.identity) or (None if cache.span == job.span else "set of rows")
            if key is None:
                return cache
            cache.close()
            print(f"{partial} was begun with another {key}; extracting again", file=sys.stderr)
    return PartialCache.create(job.path, job.identity, job.span, job.encoder.dim, job.outputs.row_shapes(job.encoder))


def _newly_readable(statuses: Statuses, job: ExtractionJob) -> Iterator[int]:
    """Yield the rows whose images were unreadable, by their stored statuses, and can be read now."""
    unread = (statuses >= FIRST_BAD) & ~np.isin(statuses, BAD_FEATURES)
    yield from (row for row in np.flatnonzero(unread).tolist() if job.rows[row][1] == ENCODED)


def _encode_pending(cache: PartialCache, job: ExtractionJob) -> None:
    # batches always hold the same images, so encoded images in a batch with a pending image are encoded again
    total = len(job.rows.images)
    pending = [rows for rows in split_rows(total, job.batch_size) if (cache.statuses[slice(*rows)] == PENDING).any()]
    workers, pinned = min(job.num_workers, len(pending)), job.encoder.device.type == "cuda"
    decoded = decode_batches(job.rows, pending, workers, pinned=pinned)
    batches = encode_batches(job.encoder, decoded, job.outputs)
    bar = ProgressBar("images", sum(stop - start for start, stop in pending) if job.progress else 0)
    began = committed = time.monotonic()
    encoded = 0
    with report_memory_shortage(job.batch_size), report_worker_deaths(), stop_requests() as stop, bar:
        for start, statuses, values in batches:
            cache.write(start, statuses, **values)
            encoded += len(statuses)
            now = time.monotonic()
            bar.show(encoded, {"per second": encoded / (now - began)})
            if stop.is_set() or now - committed >= COMMIT_SECONDS:
                cache.commit()
                committed = now
                _check_share_of_bad(cache.statuses, job)
            if stop.is_set():
                raise DuplexError(
                    f"stopped with {cache.done} of {total} rows encoded; run the same command again to continue"
                )
    cache.commit()
    _check_share_of_bad(cache.statuses, job)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Yield a `threading.Event` that the first Ctrl-C, or a scheduler's SIGTERM, sets; a second signal acts as usual.

    Outside the main thread, which alone receives signals, the event is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(_number: int, _frame: object) -> None:
        stop.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        print("stopping after this batch", file=sys.stderr)

    for number in handlers:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _check_share_of_bad(statuses: Statuses, job: ExtractionJob) -> None:
    bad = _bad_images(statuses, job)
    total = len(statuses)
    if len(bad) <= job.max_bad * total:
        return
    listed = "; ".join(f"{image.image} ({image.reason})" for image in bad[:LISTED_BAD])
    raise DuplexError(
        f"{len(bad)} of {total} images cannot be read, more than max_bad = {job.max_bad:g} allows: {listed}"
        f"{'; …' if len(bad) > LISTED_BAD else ''}; fix or remove them; a project can raise extraction.max_bad in "
        "params.yaml"
    )


def _bad_images(statuses: Statuses, job: ExtractionJob) -> list[BadImage]:
    rows = np.flatnonzero(statuses >= FIRST_BAD).tolist()
    return [BadImage(job.span.start + row, job.rows.images[row], status_reason(statuses[row])) for row in rows]
