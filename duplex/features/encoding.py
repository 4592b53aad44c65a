"""Blocks of pixels through an encoder, one block deep: while the device works on one, the one before is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.encoders.image_blocks import entering
from duplex.errors import DuplexError
from duplex.features.eight_bits import coded
from duplex.features.layout import CODES, ENCODED, FIRST_BAD, NOT_FINITE, STEPS, Marks, mark_of

if TYPE_CHECKING:
    from duplex.encoders import Encoder

Values = dict[str, NDArray[Any]]  # by the names of `features.layout`
Given = TypeVar("Given")
Started = TypeVar("Started")
STEP = 16  # blocks are filled up to a multiple: the last rows of a smaller matrix product are summed in another order,
# and a feature that lies between two float16 would be rounded otherwise than in the cache
MEND = "finished rows are kept: run the same command again with a smaller --batch-size"
SHORTAGES = ("out of memory", "can't allocate memory", "not enough memory")  # as devices and the CPU say it


@dataclass(frozen=True)
class Kept:
    """What is kept of a picture beside its CLS feature: patch tokens, and with a depth what enters the tower's last
    blocks, in so many bits a number."""

    patches: bool = False
    depth: int = 0
    bits: int = 16


@dataclass(frozen=True)
class Launched:
    """A block on its way: what the device computes, and the copies that it has been asked for."""

    start: int
    decoded: Tensor  # [B] marks, on the CPU
    finite: Tensor  # [B] whether a row's features fit float16, on the CPU once `done` has happened
    values: dict[str, Tensor]  # [B, ...] as `finite`; a row without a picture or not finite is zero
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, encoder: Encoder, start: int, pixels: Tensor, decoded: Tensor, kept: Kept) -> Launched:
        """Only a GPU of CUDA is left to work by itself; elsewhere the copies wait."""
        device, apart = encoder.device, encoder.device.type == "cuda"
        pixels, readable = (x.to(device, non_blocking=apart) for x in (pixels, decoded < FIRST_BAD))
        with entering(encoder, kept.depth) as seen:
            outputs = encoder.encode_patches(pixels) if kept.patches else (encoder.encode_images(pixels),)
        names = ("cls", *(["patch"] if kept.patches else []), *(["deep"] if kept.depth else []))
        halves = [output.half() for output in (*outputs, *seen)]
        finite = torch.stack([half.isfinite().flatten(1).all(1) for half in halves]).all(0)
        useless = ~(finite & readable)
        halves = [half.masked_fill(useless.view(-1, *[1] * (half.dim() - 1)), 0) for half in halves]
        if kept.depth and kept.bits == 8:
            names, halves = (*names[:-1], CODES, STEPS), [*halves[:-1], *coded(halves[-1])]
        finite, *halves = (x.to("cpu", non_blocking=apart) for x in (finite, *halves))
        done = torch.cuda.Event() if apart else None
        if done is not None:
            done.record(torch.cuda.current_stream(device))
        return cls(start, decoded, finite, dict(zip(names, halves, strict=True)), done)

    def result(self) -> tuple[int, Marks, Values]:
        """First row, marks and values, when they are there."""
        if self.done is not None:
            self.done.synchronize()
        marks: Marks = self.decoded.numpy().copy()
        marks[(marks < FIRST_BAD) & ~self.finite.numpy()] = mark_of(NOT_FINITE)
        return self.start, marks, {name: value.numpy() for name, value in self.values.items()}


def filled(stream: Iterable[tuple[int, Tensor, Tensor]], step: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Blocks with black pictures behind them, so that their length is a multiple of `step`."""
    for start, pixels, marks in stream:
        missing = -len(pixels) % step
        yield (
            start,
            torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])]) if missing else pixels,
            torch.cat([marks, marks.new_full((missing,), ENCODED)]) if missing else marks,
        )


def encoded_blocks(
    encoder: Encoder, stream: Iterable[tuple[int, Tensor, Tensor]], kept: Kept
) -> Iterator[tuple[int, Marks, Values]]:
    """First row, marks [B] and values [B, ...] of each block of `stream`, in order: features, and what is `kept`."""
    behind = int(encoder.device.type == "cuda")
    launched = one_behind(lambda block: Launched.of(encoder, *block, kept), stream, behind)
    return (block.result() for block in launched)


def one_behind(start: Callable[[Given], Started], given: Iterable[Given], depth: int = 1) -> Iterator[Started]:
    """`start` each of `given`, and hand it over when `depth` later ones have been started."""
    waiting: list[Started] = []
    for one in given:
        waiting.append(start(one))
        if len(waiting) > depth:
            yield waiting.pop(0)
    yield from waiting


@contextmanager
def memory_shortage(batch_size: int, mend: str = MEND) -> Iterator[None]:
    """A device without room for a block is told of in one sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in SHORTAGES):
            raise
        raise DuplexError(f"there is not enough memory to encode {batch_size} pictures at once; {mend}") from None
