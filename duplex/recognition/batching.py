"""Pictures that are asked about together are encoded together: whatever worker is free takes its share of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from duplex.errors import DuplexError
from duplex.recognition.workers import Asked, Told, Worker

HEAVY = 16 * 2**20  # bytes of files after which a batch takes no further one


@dataclass
class Waiting:
    """One picture on its way."""

    asked: Asked
    done: asyncio.Future[Told]


class Batcher:
    """`await batcher.ask(asked)` gives the picture's record and feature. At most `size` pictures are encoded at once.

    The pictures under way are shared out evenly: a free worker waits until its share has come, for `wait` seconds at
    most. Who was answered together asks again together, so clients that take turns fill batches; whoever asks alone
    is a whole share and does not wait.
    """

    def __init__(self, workers: Sequence[Worker], size: int = 32, wait: float = 0.01, room: int = 512) -> None:
        self._workers, self._size, self._wait, self._room = workers, size, wait, room
        self._queue: deque[Waiting] = deque()
        self._under_way: set[asyncio.Future[Told]] = set()
        self._most = 0  # pictures that were lately under way at once
        self._some, self._enough, self._turn = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._threads = ThreadPoolExecutor(len(workers), "worker")
        self._tasks: list[asyncio.Task[None]] = []
        self.batches = self.pictures = 0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._serve(worker)) for worker in self._workers]

    async def stop(self) -> None:
        """What has been asked is answered first."""
        if self._under_way:
            await asyncio.wait(self._under_way)
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False)  # a worker that never answers is ended by whoever started it

    @property
    def full(self) -> bool:
        return len(self._queue) >= self._room

    async def ask(self, asked: Asked) -> Told:
        done: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._under_way.add(done)
        self._most = max(self._most, len(self._under_way))
        self._queue.append(Waiting(asked, done))
        self._some.set()
        if len(self._queue) >= self._share:
            self._enough.set()
        try:
            return await done
        finally:
            self._under_way.discard(done)

    @property
    def _share(self) -> int:
        """ceil(pictures / workers), within what is encoded at once; 1 where those that are left have gone."""
        return max(1, min(self._size, -(-self._most // len(self._workers))))

    async def _serve(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._turn:  # one fills its batch, then the next
                batch = await self._gathered(loop)
            try:
                found = await loop.run_in_executor(self._threads, worker.answer, [one.asked for one in batch])
                self.batches, self.pictures = self.batches + 1, self.pictures + len(batch)
                for one, told in zip(batch, found, strict=True):
                    if one.done.done():  # whoever asked may have gone
                        continue
                    if isinstance(told, str):
                        one.done.set_exception(DuplexError(told))
                    else:
                        one.done.set_result(told)
            except Exception as error:  # told to those who asked; the next batch is served
                for one in batch:
                    if not one.done.done():
                        one.done.set_exception(error)

    async def _gathered(self, loop: asyncio.AbstractEventLoop) -> list[Waiting]:
        batch: list[Waiting] = []
        while not batch:
            self._some.clear()
            if not self._queue:
                await self._some.wait()
            if len(self._queue) < self._share:
                await self._patience(loop)
            batch = self._taken()
        return batch

    async def _patience(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the whole share; when it does not come, fewer ask than did before."""
        self._enough.clear()
        timer = loop.call_later(self._wait, self._enough.set)
        await self._enough.wait()
        timer.cancel()
        if len(self._queue) < self._share:
            self._most = len(self._under_way)

    def _taken(self) -> list[Waiting]:
        batch: list[Waiting] = []
        share, weight = self._share, 0
        while self._queue and len(batch) < share and weight < HEAVY:
            one = self._queue.popleft()
            if not one.done.done():
                batch.append(one)
                weight += len(one.asked.data)
        return batch
