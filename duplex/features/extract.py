"""Encode images with a frozen encoder and write their features to a feature cache.

Worker processes decode image files to batches of pixels, in order, a few batches ahead of the encoder. On a GPU, the
next batch is encoded while the current one is written. Images are always grouped into the same batches, on which the
last bits of features depend: a resumed extraction gives the same features.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from duplex.data.images import BadImageFile, ImageBytes, MachineFault, decode_image, machine_fault, read_image_bytes
from duplex.encoders.image_blocks import capture_block_input
from duplex.errors import DuplexError, UsageError, require
from duplex.features.copies import copy_equal_rows, image_contents, plan_shard
from duplex.features.file import (
    ALL_ZERO,
    CODES,
    CONTENTS,
    COPIED,
    ENCODED,
    FIRST_BAD,
    NOT_FINITE,
    PENDING,
    SCALES,
    SHA256,
    Contents,
    DamagedCache,
    Identity,
    PartialCache,
    Span,
    Statuses,
    cache_identity,
    check_values,
    claim_cache,
    first_difference,
    open_cache,
    partial_path,
    read_identity,
    read_row_span,
    scale_shape,
    status_of_reason,
    status_reason,
)
from duplex.features.tokens import quantize
from duplex.system.files import replace_file
from duplex.system.processes import ProgressBar

if TYPE_CHECKING:
    from duplex.encoders.base import Encoder


Values = dict[str, NDArray[Any]]  # rows by data set (`features.layout`)
PixelBatch = tuple[int, Tensor, Tensor, Tensor]  # first row, pixels [B, 3, R, R], statuses [B], contents [B, 32]
BATCH_MULTIPLE = 16  # batches are padded to a multiple: the last rows of a smaller matrix product are summed in another
# order, and a feature between two float16 would be rounded otherwise than in the cache
MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")  # of devices and of the CPU


@dataclass(frozen=True)
class OutputSpec:
    """The encoder outputs to store per image besides the CLS feature."""

    patches: bool = False  # patch tokens
    block_inputs: int = 0  # the input of this many last blocks of the image tower; 0: none
    bits: int = 16  # per number of the block inputs

    def row_shapes(self, encoder: Encoder) -> dict[str, tuple[int, ...]]:
        """The data sets in which a cache stores the outputs, each with its shape per image, found on a blank image."""
        if not self.patches and not self.block_inputs:
            return {}
        blank = encoder.image_transform(Image.new("RGB", (8, 8)))[None].to(encoder.device)
        values = encode_outputs(encoder, blank, self)
        shapes = {name: tuple(value.shape[1:]) for name, value in values.items() if name != "cls"}
        if self.block_inputs and self.bits == 8:
            shapes[CODES] = shapes.pop("block_inputs")
            shapes[SCALES] = scale_shape(shapes[CODES])
        return shapes


@dataclass(frozen=True)
class PendingBatch:
    """A batch of images that the device is encoding."""

    start: int
    statuses: Tensor  # [B] encoded, or why not; on the CPU once `done` has happened
    values: dict[str, Tensor]  # [B, ...], likewise; the row of a bad image is zero
    done: torch.cuda.Event | None

    @classmethod
    def launch(
        cls, encoder: Encoder, outputs: OutputSpec, start: int, pixels: Tensor, decoded: Tensor, contents: Tensor
    ) -> PendingBatch:
        """Start encoding pixels [B, 3, R, R] uint8, on a CPU at once; `start` is the first image's row.

        `decoded` says per image [B] whether it could be read, `contents` is the sha256 of each file [B, 32].
        """
        device = encoder.device
        asynchronous = device.type == "cuda"
        pixels = pixels.to(device, non_blocking=asynchronous)
        decoded = decoded.to(device, non_blocking=asynchronous)
        encoded = encode_outputs(encoder, pixels, outputs)
        halves = {name: value.half() for name, value in encoded.items()}
        finite = torch.stack([half.isfinite().flatten(1).all(1) for half in halves.values()]).all(0)
        readable = decoded < FIRST_BAD
        statuses = decoded.masked_fill(readable & ~halves["cls"].any(1), ALL_ZERO)
        statuses = statuses.masked_fill(readable & ~finite, NOT_FINITE)
        bad = statuses >= FIRST_BAD
        values = {name: half.masked_fill(bad.view(-1, *[1] * (half.dim() - 1)), 0) for name, half in halves.items()}
        if outputs.block_inputs and outputs.bits == 8:
            values[CODES], values[SCALES] = quantize(values.pop("block_inputs"))
        statuses = statuses.to("cpu", non_blocking=asynchronous)
        values = {name: value.to("cpu", non_blocking=asynchronous) for name, value in values.items()}
        done = torch.cuda.Event() if asynchronous else None
        if done is not None:
            done.record(torch.cuda.current_stream(device))
        return cls(start, statuses, {**values, CONTENTS: contents}, done)

    def result(self) -> tuple[int, Statuses, Values]:
        """Wait for the device: row of the first image, statuses [B], and outputs [B, ...] by data set."""
        if self.done is not None:
            self.done.synchronize()
        return self.start, self.statuses.numpy(), {name: value.numpy() for name, value in self.values.items()}


def encode_outputs(encoder: Encoder, pixels: Tensor, outputs: OutputSpec) -> dict[str, Tensor]:
    """The chosen outputs [B, ...] of preprocessed images, pixels [B, 3, R, R] uint8, by name.

    `cls` has one feature per image, `patch` one per image patch; `block_inputs` are the activations that enter the
    image tower's last blocks.
    """
    with capture_block_input(encoder, outputs.block_inputs) as inputs:
        if outputs.patches:
            cls, patch = encoder.encode_patches(pixels)
            values = {"cls": cls, "patch": patch}
        else:
            values = {"cls": encoder.encode_images(pixels)}
    if values["cls"].shape != (len(pixels), encoder.dim):
        raise DuplexError(
            f"encoder {encoder.name!r} returned features of shape {tuple(values['cls'].shape)}; expected "
            f"{(len(pixels), encoder.dim)}"
        )
    if outputs.block_inputs:
        if len(inputs) != 1:
            raise DuplexError(
                f"encoder {encoder.name!r} ran its image tower {len(inputs)} times to encode one batch; expected once, "
                "as block inputs are stored"
            )
        values["block_inputs"] = inputs[0]
    return {name: value.detach() for name, value in values.items()}


def pad_batches(batches: Iterable[PixelBatch], multiple: int) -> Iterator[PixelBatch]:
    """Append black images to each batch up to a multiple of `multiple`, so that batch size does not change features."""
    for start, pixels, statuses, contents in batches:
        missing = -len(pixels) % multiple
        yield (
            start,
            torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])]) if missing else pixels,
            torch.cat([statuses, statuses.new_full((missing,), ENCODED)]) if missing else statuses,
            torch.cat([contents, contents.new_zeros(missing, SHA256)]) if missing else contents,
        )


def encode_batches(
    encoder: Encoder, batches: Iterable[PixelBatch], outputs: OutputSpec
) -> Iterator[tuple[int, Statuses, Values]]:
    """Encode batches of pixels in order; yield the `result` of each, on CUDA when the next batch has been started."""
    in_flight = int(encoder.device.type == "cuda")
    pending: list[PendingBatch] = []
    for batch in batches:
        pending.append(PendingBatch.launch(encoder, outputs, *batch))
        if len(pending) > in_flight:
            yield pending.pop(0).result()
    for last in pending:
        yield last.result()


@contextmanager
def report_memory_shortage(
    batch_size: int, remedy: str = "finished rows are kept: run the same command again with a smaller --batch-size"
) -> Iterator[None]:
    """Raise `DuplexError`, ending with `remedy`, if memory for encoding runs out in the `with` block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in MEMORY_MESSAGES):
            raise
        raise DuplexError(f"there is not enough memory to encode {batch_size} images at once; {remedy}") from None


RETRY = 255  # status of an image to be read again; never written
UNREAD = torch.zeros(SHA256, dtype=torch.uint8)  # content of a file that was not read
AHEAD = 2  # batches that a worker may be ahead
OPEN_FILES = 64  # that the process needs at most,
OPEN_FILES_PER_WORKER = 8  # and for each worker


@dataclass(eq=False)
class ImageRows(Dataset[tuple[Tensor, int, Tensor]]):
    """Decodes image files: item i is the i-th image's pixels [3, R, R] uint8, status, and content.

    The content is the sha256 of the decoded bytes, [32] uint8; zero for a file without readable bytes. An unreadable
    image becomes black, with the reason as its status, so that batches keep their size. The status `RETRY` marks an
    image that could not be read because of the machine.
    """

    images: Sequence[str]
    root: Path
    transform: Callable[[Image.Image], Tensor]

    def __post_init__(self) -> None:
        self.black = torch.zeros_like(self.transform(Image.new("RGB", (8, 8))))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int, Tensor]:
        try:
            return self.read(row)
        except MachineFault:  # raised by `decode_batches`: an exception from a worker process changes its type
            return self.black, RETRY, UNREAD

    def read(self, row: int) -> tuple[Tensor, int, Tensor]:
        """An image's pixels, status (read, or why not) and content; raises `MachineFault` if memory or disk fails."""
        path = self.root / self.images[row]
        content = UNREAD
        try:
            data = read_image_bytes(path)
            content = torch.frombuffer(bytearray(hashlib.sha256(data.getbuffer()).digest()), dtype=torch.uint8)
            return self._pixels(data), ENCODED, content
        except BadImageFile as bad:
            return self.black, status_of_reason(bad.reason), content

    def _pixels(self, data: ImageBytes) -> Tensor:
        image = decode_image(data)
        try:
            return self.transform(image)
        except (ValueError, ZeroDivisionError, MemoryError) as error:
            raise machine_fault(data, error) or BadImageFile("cannot be resized") from error


def decoding_workers(wanted: int | Literal["auto"]) -> int:
    """Number of processes that decode images; "auto": one per available core, less one for the encoder."""
    if wanted != "auto":
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, cores - 1)


def split_rows(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split rows into groups of `size`, the last of which may be smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def decode_batches(
    images: ImageRows, batches: Sequence[Sequence[int]], num_workers: int, *, pinned: bool
) -> Iterator[PixelBatch]:
    """Decode images ahead in worker processes (0: in this one); yield a batch for each sequence of rows, in order.

    `pinned` memory is for a GPU. Without one, the workers run at a lower priority than the encoder on the same cores:
    one preempted thread of a matrix product delays all of them. At the lowest, other users' jobs would starve the
    workers.
    """
    if num_workers:
        allow_open_files(OPEN_FILES + OPEN_FILES_PER_WORKER * num_workers)
    loader: DataLoader[tuple[Tensor, int, Tensor]] = DataLoader(
        images,
        batch_sampler=[list(rows) for rows in batches],
        num_workers=num_workers,
        prefetch_factor=AHEAD if num_workers else None,
        pin_memory=pinned,
        worker_init_fn=partial(_start_worker, 0 if pinned else 10),
    )
    for rows, (pixels, statuses, contents) in zip(batches, loader, strict=True):
        for place in (statuses == RETRY).nonzero().flatten().tolist():  # in this process: a lasting fault is raised
            pixels[place], statuses[place], contents[place] = images.read(rows[place])
        yield rows[0], pixels, statuses.to(torch.uint8), contents


def allow_open_files(count: int) -> None:
    """Let this process open `count` files at once, without which decoding processes would fail or hang."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= count:
        return
    if highest != resource.RLIM_INFINITY and highest < count:
        raise DuplexError(
            f"a process may open {highest} files here, and decoding images in other processes needs {count}; raise the "
            f"limit with `ulimit -n {count}`, or decode in fewer processes (extraction.num_workers, --num-workers)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, highest))


@contextmanager
def report_worker_deaths(kept: str = "finished rows are kept: ") -> Iterator[None]:
    """Raise `DuplexError` if a process that decodes images dies during the `with` block; `kept` begins the advice.

    The block must hold all code that uses the batches: torch reports a death from a signal handler, wherever the main
    process is at that moment.
    """
    try:
        yield
    except RuntimeError as error:
        if not re.search(r"DataLoader worker .*(killed by signal|exited unexpectedly)", str(error)):
            raise
        raise DuplexError(
            f"a decoding worker died, most likely out of memory; {kept}run the same command again, "
            "with a smaller --num-workers or --batch-size"
        ) from error


def _start_worker(niceness: int, _: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    os.nice(niceness)


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
    reuse: tuple[Path, ...]
    fresh: bool
    progress: bool


@dataclass(frozen=True)
class BadImage:
    """An image without features, since it could not be read or encoded: its row, its path and the reason."""

    row: int
    image: str
    reason: str


@dataclass(frozen=True)
class ExtractionReport:
    """The number of `rows` in the cache file, of which `resumed` were encoded before."""

    path: Path
    rows: int
    resumed: int
    seconds: float
    bad: list[BadImage] = field(default_factory=list)

    def lines(self) -> list[str]:
        """A summary line, then one line per image without features."""
        resumed = f", {self.resumed} of them encoded before" if self.resumed else ""
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
    reuse: Sequence[Path] = (),
    fresh: bool = False,
    limit: int | None = None,
    progress: bool = True,
) -> ExtractionReport:
    """Encode images into the feature cache `out`.

    A finished cache of the same settings is kept, and an unfinished one resumed; of these, only images whose files have
    changed are encoded again. Rows of other caches of the same encoder with the same images are copied: of an earlier
    cache at `out`, and of those in `reuse`. Unreadable images keep their row, with the reason as its status.

    Args:
        images: paths relative to `root`, in the order of the manifest.
        manifest_sha256: sha256 of the manifest file.
        batch_size: number of images that are encoded at once.
        num_workers: number of decoding processes; auto: one per core, less one; 0: decode in this process.
        recorded_root: name of the images' folder that the cache records, such as `root` in params.yaml.
        tokens: "patch" also stores patch tokens; "none" does not.
        block_inputs: also store what enters the last `block_inputs` blocks of the image tower, to train these.
        bits: 16 or 8 bits per number of the block inputs.
        shard: (k, n) encodes only the k-th of n shards, counted from 0, into a file beside `out`.
        max_bad: share of unreadable images above which `DuplexError` is raised; the unfinished cache stays.
        fresh: encode all images, whatever was encoded before.
        limit: encode only the first `limit` images.
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
        reuse=tuple(reuse),
        fresh=fresh,
        progress=progress,
    )
    return _extract_file(job)


def _extract_file(job: ExtractionJob) -> ExtractionReport:
    began = time.monotonic()
    path = job.path
    rows = job.span.rows
    with claim_cache(path):
        contents = None
        if not job.fresh and (finished := _read_if_finished(path, job)):
            statuses, contents_then = finished
            contents = image_contents(job.rows.root, job.rows.images)
            if np.array_equal(contents, contents_then):
                check_share_of_bad(_bad_images(statuses, job), rows, job.max_bad)
                return ExtractionReport(path, rows, rows, 0.0, _bad_images(statuses, job))
            with replace_file(partial_path(path)) as scratch:  # the cache itself stays as it is
                shutil.copyfile(path, scratch)
        with closing(_open_or_create(job)) as cache:
            if not job.fresh:
                _find_encoded(cache, job, contents)
            resumed = cache.done
            _encode_pending(cache, job)
            cache.finish()
    return ExtractionReport(path, rows, resumed, time.monotonic() - began, _bad_images(cache.statuses, job))


def _read_if_finished(path: Path, job: ExtractionJob) -> tuple[Statuses, Contents] | None:
    """The statuses and contents of a finished, sound cache of the job; otherwise None, and why on stderr."""
    if not path.exists():
        return None
    try:
        with open_cache(path) as file:
            key = first_difference(read_identity(file), job.identity)
            statuses: Statuses = file["status"][...]
            if key is None and read_row_span(file) == job.span and not (statuses == PENDING).any():
                check_values(file)
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


def _find_encoded(cache: PartialCache, job: ExtractionJob, contents: Contents | None) -> None:
    """Mark the rows of changed images as pending, and copy rows that other caches have."""
    sources = [path for path in (job.path, *job.reuse) if path.exists()]
    if not sources and not cache.done:
        return
    if contents is None:
        contents = image_contents(job.rows.root, job.rows.images)
    cache.statuses[(cache.contents != contents).any(axis=1)] = PENDING
    copy_equal_rows(cache, contents, sources)


def _encode_pending(cache: PartialCache, job: ExtractionJob) -> None:
    # Batches always hold the same images, so encoded images in a batch with a pending image are encoded again. Rows
    # that were copied are in no batch: a few new images among many are encoded alone.
    total = len(job.rows.images)
    batches = split_rows(np.flatnonzero(cache.statuses != COPIED).tolist(), job.batch_size)
    pending = [rows for rows in batches if (cache.statuses[rows] == PENDING).any()]
    workers, pinned = min(job.num_workers, len(pending)), job.encoder.device.type == "cuda"
    decoded = decode_batches(job.rows, pending, workers, pinned=pinned)
    encoded = encode_batches(job.encoder, decoded, job.outputs)
    bar = ProgressBar("images", sum(map(len, pending)) if job.progress else 0)
    began = committed = time.monotonic()
    count = 0
    with report_memory_shortage(job.batch_size), report_worker_deaths(), stop_requests() as stop, bar:
        for rows, (_, statuses, values) in zip(pending, encoded, strict=True):
            cache.write(rows, statuses, **values)
            count += len(statuses)
            now = time.monotonic()
            bar.show(count, {"per second": count / (now - began)})
            if stop.is_set() or now - committed >= COMMIT_SECONDS:
                cache.commit()
                committed = now
                check_share_of_bad(_bad_images(cache.statuses, job), total, job.max_bad)
            if stop.is_set():
                raise DuplexError(
                    f"stopped with {cache.done} of {total} rows encoded; run the same command again to continue"
                )
    cache.commit()
    check_share_of_bad(_bad_images(cache.statuses, job), total, job.max_bad)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C, or a scheduler's SIGTERM, sets; a second signal acts as usual.

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


def check_share_of_bad(bad: Sequence[BadImage], total: int, max_bad: float) -> None:
    """Raise `DuplexError` if more than the share `max_bad` of `total` images have no features."""
    if len(bad) <= max_bad * total:
        return
    listed = "; ".join(f"{image.image} ({image.reason})" for image in bad[:LISTED_BAD])
    raise DuplexError(
        f"{len(bad)} of {total} images cannot be read, more than max_bad = {max_bad:g} allows: {listed}"
        f"{'; …' if len(bad) > LISTED_BAD else ''}; fix or remove them; a project can raise extraction.max_bad in "
        "params.yaml"
    )


def _bad_images(statuses: Statuses, job: ExtractionJob) -> list[BadImage]:
    rows = np.flatnonzero((statuses >= FIRST_BAD) & (statuses != COPIED)).tolist()
    return [BadImage(job.span.start + row, job.rows.images[row], status_reason(statuses[row])) for row in rows]
