"""Encode batches of pixels; on a GPU, the next batch is encoded while the caller writes the current one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from duplex.encoders.image_blocks import capture_block_input
from duplex.errors import DuplexError
from duplex.features.layout import ALL_ZERO, CODES, ENCODED, FIRST_BAD, NOT_FINITE, SCALES, Statuses, scale_shape
from duplex.features.tokens import quantize

if TYPE_CHECKING:
    from duplex.encoders import Encoder

Values = dict[str, NDArray[Any]]  # rows by data set (`features.layout`)
PixelBatch = tuple[int, Tensor, Tensor]  # first row, pixels [B, 3, R, R], statuses [B]
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
    """A batch of images that the device is encoding; copies of its outputs to the CPU are queued."""

    start: int
    statuses: Tensor  # [B] encoded, or why not; on the CPU once `done` has happened
    values: dict[str, Tensor]  # [B, ...], likewise; the row of a bad image is zero
    done: torch.cuda.Event | None

    @classmethod
    def launch(cls, encoder: Encoder, start: int, pixels: Tensor, decoded: Tensor, outputs: OutputSpec) -> PendingBatch:
        """Start encoding a batch of pixels, which on a CPU is finished at once.

        Args:
            encoder: the frozen encoder.
            start: row of the batch's first image.
            pixels: preprocessed images [B, 3, R, R] uint8.
            decoded: a status per image [B], which says whether the image could be read.
            outputs: what to return besides `cls`.
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
        return cls(start, statuses, values, done)

    def result(self) -> tuple[int, Statuses, Values]:
        """Wait for the device: row of the first image, statuses [B], and outputs [B, ...] by data set."""
        if self.done is not None:
            self.done.synchronize()
        return self.start, self.statuses.numpy(), {name: value.numpy() for name, value in self.values.items()}


def encode_outputs(encoder: Encoder, pixels: Tensor, outputs: OutputSpec) -> dict[str, Tensor]:
    """Encode B images and return a dictionary of the encoder's outputs, tensors [B, ...].

    `cls` has one feature per image. If chosen, `patch` has one per image patch, and `block_inputs` the activations that
    enter the image tower's last blocks.

    pixels: preprocessed images [B, 3, R, R] uint8.
    outputs: which outputs to return besides `cls`.
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
    for start, pixels, statuses in batches:
        missing = -len(pixels) % multiple
        yield (
            start,
            torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])]) if missing else pixels,
            torch.cat([statuses, statuses.new_full((missing,), ENCODED)]) if missing else statuses,
        )


def encode_batches(
    encoder: Encoder, batches: Iterable[PixelBatch], outputs: OutputSpec
) -> Iterator[tuple[int, Statuses, Values]]:
    """Encode batches of pixels in order; yield the `result` of each.

    On CUDA, the next batch is started before the result of the current one is awaited.
    """
    in_flight = int(encoder.device.type == "cuda")
    pending: list[PendingBatch] = []
    for batch in batches:
        pending.append(PendingBatch.launch(encoder, *batch, outputs))
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
