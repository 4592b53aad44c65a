"""Decode image files in worker processes, a few batches ahead, and encode them in batches."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from duplex.data.images import BadImageFile, MachineFault, decode_image, machine_fault, read_image_bytes
from duplex.data.negatives import draw_negatives
from duplex.encoders.base import family_modules
from duplex.encoders.image_blocks import capture_block_input
from duplex.errors import DuplexError
from duplex.features import file as cache_file
from duplex.features.file import ALL_ZERO, CONTENTS, ENCODED, FIRST_BAD, NOT_FINITE, PIXELS, SHA256, Statuses
from duplex.system.code import code_hash
from duplex.system.threads import cpu_cores

if TYPE_CHECKING:
    from duplex.encoders.base import Encoder

Row = TypeVar("Row")
Values = dict[str, NDArray[Any]]  # rows by data set (`features.file.DATASETS`)
# first row, pixels [B, 3, R, R], statuses [B], contents [B, 32]
PixelBatch = tuple[int, Tensor, Tensor, Tensor]
# Batches are padded to a multiple: the last rows of a smaller matrix product are summed in another
# order, and a feature between two float16 would be rounded otherwise than in the cache.
BATCH_MULTIPLE = 16
MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")  # any device's


def encoding_code(encoder: str) -> str:
    """Hash of the code that reads, prepares and encodes images for an encoder."""
    return code_hash(__name__, *family_modules(encoder))


@dataclass(frozen=True)
class WantedOutputs:
    """Which encoder outputs are stored for each image, besides its CLS feature."""

    patches: bool = False  # patch tokens
    block_inputs: int = 0  # the input of this many last blocks of the image tower; 0: none
    pixels: bool = False  # the images as they enter the encoder

    @classmethod
    def of_record(cls, record: Mapping[str, str], patches: bool, finetuned: bool) -> WantedOutputs:
        """What a model needs: `patches`; if `finetuned`, pixels or block inputs, as in `record`."""
        pixels = finetuned and PIXELS in record
        blocks = int(record["block_inputs"]) if finetuned and not pixels else 0
        return cls(patches, blocks, pixels)

    def row_shapes(self, encoder: Encoder) -> dict[str, tuple[int, ...]]:
        """Shape of one image's values, by HDF5 data set; found by encoding a blank image."""
        if not (self.patches or self.block_inputs or self.pixels):
            return {}
        blank = encoder.image_transform(Image.new("RGB", (8, 8)))[None].to(encoder.device)
        values = encode_outputs(encoder, blank, self)
        shapes = {name: tuple(value.shape[1:]) for name, value in values.items() if name != "cls"}
        if self.pixels:
            shapes[PIXELS] = tuple(blank.shape[1:])
        return shapes


@dataclass(frozen=True)
class LaunchedBatch:
    """A batch of images, from row `start` on, being encoded; the CUDA event `done` marks the end."""

    start: int
    statuses: Tensor  # [B] encoded, or why not; on the CPU once `done` has happened
    values: dict[str, Tensor]  # [B, ...], likewise; the row of a bad image is zero
    done: torch.cuda.Event | None

    @classmethod
    def launch(
        cls, encoder: Encoder, outputs: WantedOutputs, start: int, pixels: Tensor, decoded: Tensor, contents: Tensor
    ) -> LaunchedBatch:
        """Start encoding B images, the first of which has the row `start`; a CPU finishes at once.

        decoded: each file's status after decoding [B]; contents: the files' sha256 [B, 32].
        """
        device = encoder.device
        asynchronous = device.type == "cuda"
        kept = {PIXELS: pixels} if outputs.pixels else {}  # black for an image that cannot be read
        pixels = pixels.to(device, non_blocking=asynchronous)
        decoded = decoded.to(device, non_blocking=asynchronous)
        encoded = encode_outputs(encoder, pixels, outputs)
        halves = {name: value.half() for name, value in encoded.items()}
        finite = torch.stack([half.isfinite().flatten(1).all(1) for half in halves.values()]).all(0)
        readable = decoded < FIRST_BAD
        statuses = decoded.masked_fill(readable & ~halves["cls"].any(1), ALL_ZERO)
        statuses = statuses.masked_fill(readable & ~finite, NOT_FINITE)
        bad = statuses >= FIRST_BAD
        statuses = statuses.to("cpu", non_blocking=asynchronous)
        values = {}
        for name, half in halves.items():
            masked = half.masked_fill(bad.view(-1, *[1] * (half.dim() - 1)), 0)
            values[name] = masked.to("cpu", non_blocking=asynchronous)
        done = torch.cuda.Event() if asynchronous else None
        if done is not None:
            done.record(torch.cuda.current_stream(device))
        return cls(start, statuses, {**values, **kept, CONTENTS: contents}, done)

    def result(self) -> tuple[int, Statuses, Values]:
        """Wait for the device; returns the first image's row, statuses [B], name -> outputs [B, ...]."""
        if self.done is not None:
            self.done.synchronize()
        values = {name: value.numpy() for name, value in self.values.items()}
        return self.start, self.statuses.numpy(), values


def encode_outputs(encoder: Encoder, pixels: Tensor, outputs: WantedOutputs) -> dict[str, Tensor]:
    """Encode pixels [B, 3, R, R] uint8; returns the chosen `outputs` as name -> values [B, ...]."""
    with capture_block_input(encoder, outputs.block_inputs) as inputs:
        if outputs.patches:
            cls, patch = encoder.encode_patches(pixels)
            values = {"cls": cls, "patch": patch}
        else:
            values = {"cls": encoder.encode_images(pixels)}
    if outputs.block_inputs:
        [values["block_inputs"]] = inputs  # the image tower runs once
    return {name: value.detach() for name, value in values.items()}


def encode_negatives(encoder: Encoder, batch_size: int) -> NDArray[np.float16]:
    """Encoder outputs [K, d] for drawn images of no pair."""
    images = [encoder.image_transform(image) for image in draw_negatives()]
    parts = [encoder.encode_images(torch.stack([*batch])).detach() for batch in split_rows(images, batch_size)]
    features: NDArray[np.float16] = torch.cat(parts).half().nan_to_num().cpu().numpy()
    return features


def pad_batches(batches: Iterable[PixelBatch], multiple: int) -> Iterator[PixelBatch]:
    """Pad each batch with black images to a multiple of `multiple`, so that its size has no effect."""
    for start, pixels, statuses, contents in batches:
        missing = -len(pixels) % multiple
        yield (
            start,
            torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])]) if missing else pixels,
            torch.cat([statuses, statuses.new_full((missing,), ENCODED)]) if missing else statuses,
            torch.cat([contents, contents.new_zeros(missing, SHA256)]) if missing else contents,
        )


def encode_batches(
    encoder: Encoder, batches: Iterable[PixelBatch], outputs: WantedOutputs
) -> Iterator[tuple[int, Statuses, Values]]:
    """Yield the first row, statuses and outputs of each batch, in order; a GPU runs one ahead."""
    in_flight = int(encoder.device.type == "cuda")
    pending: list[LaunchedBatch] = []
    for batch in batches:
        pending.append(LaunchedBatch.launch(encoder, outputs, *batch))
        if len(pending) > in_flight:
            yield pending.pop(0).result()
    for last in pending:
        yield last.result()


RETRY = 255  # status of an image to be read again; never written
UNREAD = torch.zeros(SHA256, dtype=torch.uint8)  # content of a file that was not read
AHEAD = 2  # batches that a worker may be ahead


@dataclass(eq=False)
class ImageRows(Dataset[tuple[Tensor, int, Tensor]]):
    """Torch data set of image files: pixels [3, R, R] uint8, status and content (sha256) of each.

    An image that cannot be decoded is black, with the reason as its status; `RETRY` marks one that
    is to be read again, as the machine failed.
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
        except MachineFault:  # `decode_batches` raises it: from a worker, it would change its type
            return self.black, RETRY, UNREAD

    def read(self, row: int) -> tuple[Tensor, int, Tensor]:
        """Pixels, status and sha256 of one image; raises `MachineFault` if memory or disk fails."""
        path = self.root / self.images[row]
        content = UNREAD
        try:
            data = read_image_bytes(path)
            content = torch.frombuffer(bytearray.fromhex(data.digest), dtype=torch.uint8)
            image = decode_image(data)
            try:
                return self.transform(image), ENCODED, content
            except (ValueError, ZeroDivisionError, MemoryError) as error:
                raise machine_fault(data, error) or BadImageFile("cannot be resized") from error
        except BadImageFile as bad:
            return self.black, cache_file.status_of_reason(bad.reason), content


def decoding_workers(wanted: int | Literal["auto"]) -> int:
    """The number of processes that decode images; "auto" leaves a core to the encoder."""
    if wanted != "auto":
        return wanted
    return max(0, cpu_cores() - 1)


def split_rows(rows: Sequence[Row], size: int) -> list[Sequence[Row]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def decode_batches(
    images: ImageRows, batches: Sequence[Sequence[int]], num_workers: int, *, pinned: bool
) -> Iterator[PixelBatch]:
    """Decode images in `num_workers` processes (0: in this one); yields a `PixelBatch` per batch.

    Without a GPU (`pinned`), workers have a lower priority, since a preempted encoder thread
    delays a whole matrix product.
    """
    loader: DataLoader[tuple[Tensor, int, Tensor]] = DataLoader(
        images,
        batch_sampler=[list(rows) for rows in batches],
        num_workers=num_workers,
        prefetch_factor=AHEAD if num_workers else None,
        pin_memory=pinned,
        worker_init_fn=partial(_start_worker, 0 if pinned else 10),
    )
    for rows, (pixels, statuses, contents) in zip(batches, loader, strict=True):
        # in this process, so that a lasting fault is raised
        for place in (statuses == RETRY).nonzero().flatten().tolist():
            pixels[place], statuses[place], contents[place] = images.read(rows[place])
        yield rows[0], pixels, statuses.to(torch.uint8), contents


@contextmanager
def explain_memory_errors(batch_size: int, kept: str = "finished rows are kept: ") -> Iterator[None]:
    """Context manager: `DuplexError` if memory for encoding runs out or a decoding process dies."""
    again = f"{kept}run the same command again with a smaller"
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if re.search(r"DataLoader worker .*(killed by signal|exited unexpectedly)", text):
            cause = f"a decoding worker died, most likely out of memory; {again} batch or fewer workers"
        elif isinstance(error, MemoryError) or any(words in text for words in MEMORY_MESSAGES):
            cause = f"there is not enough memory to encode {batch_size} images at once; {again} batch"
        else:
            raise
        raise DuplexError(cause) from error


def _start_worker(niceness: int, _: int) -> None:
    # Ctrl-C reaches the whole process group; the parent handles it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(niceness)
