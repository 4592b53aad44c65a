"""Worker processes of the HTTP server: each has its own recognizer and answers one batch of image files after another.

Python runs one thread at a time, and with a small encoder half the time per image is spent in Python code; so the
server process handles HTTP only. A file that crashes its decoder kills a worker, which is replaced, not the server.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.data.image_files import BadImageFile, decode_image
from duplex.labels import World
from duplex.recognition.recognizer import Recognizer
from duplex.system.process_pool import BrokenProcessPool, ProcessFailed, WorkerProcess

Reply = tuple[dict[str, Any], NDArray[Any] | None]  # an image's record, and its feature where it was requested
Failure = str  # the error that an image caused in the worker


@dataclass(frozen=True)
class ImageRequest:
    """An image to recognise: file bytes, the number of compositions to return, and whether to return its feature."""

    data: bytes
    top: int
    feature: bool = False


@contextmanager
def image_workers(
    load: Callable[[], Recognizer], count: int, *, world: World | None, max_pixels: int, threads: int
) -> Iterator[list[WorkerProcess]]:
    """Start worker processes that recognise images; they are yielded once each has loaded its model, and killed at the
    end of the block.

    load: function that returns the recognizer; it is pickled and called in each worker.
    count: number of workers.
    threads: number of torch threads per worker.
    """
    workers: list[WorkerProcess] = []
    try:
        for _ in range(count):
            workers.append(WorkerProcess(partial(BatchRecognizer, load, world, max_pixels, threads)))
        loading = [worker.submit() for worker in workers]
        for worker, future in zip(workers, loading, strict=True):
            try:
                future.result()
            except BrokenProcessPool as error:
                raise worker_died(worker) from error
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def worker_died(worker: WorkerProcess) -> ProcessFailed:
    return ProcessFailed(f"a worker process {worker.describe_end()}, perhaps out of memory; try fewer --workers")


class BatchRecognizer:
    """Callable that recognises the images of a batch of requests; created in the worker process."""

    def __init__(self, load: Callable[[], Recognizer], world: World | None, max_pixels: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._recognizer = load()
        self._max_pixels = max_pixels
        self._candidates = self._recognizer.candidates(world)
        self._transform = self._recognizer.encoder.image_transform

    def __call__(self, batch: Sequence[ImageRequest]) -> list[Reply | Failure]:
        """One reply per image, in order, or an error message. A batch that fails is recognised image by image."""
        try:
            return [*self._answer(batch)]
        except Exception as error:
            if len(batch) == 1:
                return [f"{type(error).__name__}: {error}"]
        return [self([request])[0] for request in batch]

    def _answer(self, batch: Sequence[ImageRequest]) -> list[Reply]:
        pixels = [self._decode(request.data) for request in batch]
        replies: list[Reply] = [({"error": image}, None) if isinstance(image, str) else ({}, None) for image in pixels]
        good = [place for place, image in enumerate(pixels) if not isinstance(image, str)]
        if not good:
            return replies
        inputs = self._recognizer.encode([cast(Tensor, pixels[place]) for place in good])
        answers = self._candidates.answers(inputs, max(batch[place].top for place in good))
        for place, answer, feature in zip(good, answers, inputs["cls"], strict=True):
            request = batch[place]
            record = answer.to_dict(request.top)
            record["top"] = record["top"][: request.top]
            replies[place] = record, feature.cpu().numpy() if request.feature else None
        return replies

    def _decode(self, data: bytes) -> Tensor | str:
        """Preprocessed pixels, uint8 [3, R, R], or the reason why the file cannot be read."""
        if not data:
            return "empty"
        try:
            return cast(Tensor, self._transform(decode_image(io.BytesIO(data), self._max_pixels)))
        except BadImageFile as error:
            return error.reason
        except (ValueError, ZeroDivisionError, MemoryError):
            return "cannot be resized"
