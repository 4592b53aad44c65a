"""Requests that arrive together are encoded together: one worker thread, fed with what has gathered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from duplex.recognition.answers import Answer
from duplex.recognition.panel import Panel
from duplex.recognition.recognizer import Recognizer


@dataclass
class Waiting:
    """One picture on its way."""

    pixels: Tensor
    top: int
    done: asyncio.Future[tuple[Answer, Any]]


class Batcher:
    """`await batcher.ask(pixels, top)` gives the answer and the feature. At most `size` pictures are encoded at once;
    the first of them waits for others that are being decoded, for `wait` seconds at most."""

    def __init__(
        self, recognizer: Recognizer, panel: Panel, size: int = 32, wait: float = 0.01, room: int = 512
    ) -> None:
        self._recognizer, self._panel, self._size, self._wait = recognizer, panel, size, wait
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(room)
        self._worker = ThreadPoolExecutor(1, "encoder")
        self._task: asyncio.Task[None] | None = None
        self.batches = self.pictures = self.coming = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def stop(self) -> None:
        """What has been asked is answered first."""
        await self._queue.join()
        if self._task is not None:
            self._task.cancel()
        self._worker.shutdown()

    @property
    def full(self) -> bool:
        return self._queue.full()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Around the work before `ask`: a batch is worth waiting for what is on its way."""
        self.coming += 1
        try:
            yield
        finally:
            self.coming -= 1

    async def ask(self, pixels: Tensor, top: int) -> tuple[Answer, Any]:
        waiting = Waiting(pixels, top, asyncio.get_running_loop().create_future())
        await self._queue.put(waiting)
        return await waiting.done

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gathered(loop)
            try:
                found = await loop.run_in_executor(self._worker, self._answer, batch)
                for one, answer in zip(batch, found, strict=True):
                    if not one.done.done():  # whoever asked may have gone
                        one.done.set_result(answer)
            except Exception as error:  # told to those who asked; the next batch is served
                for one in batch:
                    if not one.done.done():
                        one.done.set_exception(error)
            finally:
                for _ in batch:
                    self._queue.task_done()

    async def _gathered(self, loop: asyncio.AbstractEventLoop) -> list[Waiting]:
        batch = [await self._queue.get()]
        end = loop.time() + self._wait
        while len(batch) < self._size and (self.coming or not self._queue.empty()):
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), max(0.0, end - loop.time())))
            except asyncio.TimeoutError:
                break
        return batch

    def _answer(self, batch: Sequence[Waiting]) -> list[tuple[Answer, Any]]:
        inputs = self._recognizer.encode([one.pixels for one in batch])
        top = max(one.top for one in batch)
        answers = self._panel.answers(inputs, top)
        features = inputs["cls"].cpu().numpy()
        self.batches, self.pictures = self.batches + 1, self.pictures + len(batch)
        return [
            (Answer(answer.top[: one.top], answer.states, answer.objects), feature)
            for one, answer, feature in zip(batch, answers, features, strict=True)
        ]
