"""Collect the images of concurrent requests into batches for the worker processes of the server."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from duplex.errors import DuplexError
from duplex.recognition.workers import Failure, ImageRequest, Reply, worker_died
from duplex.system.process_pool import BrokenProcessPool, WorkerProcess

MAX_BATCH_BYTES = 16 * 2**20  # a batch that exceeds this gets no further file
WaitingImage = tuple[ImageRequest, asyncio.Future[Reply]]


class Batcher:
    """Queue that collects images into batches and sends each batch to a free worker process of the server.

    `await batcher.answer(request)` returns the reply to one image. A batch is an even share: the number of images in
    progress divided by the number of workers. A free worker waits until its share has arrived. Clients that get their
    answers together send their next images together, so batches fill; a single image is a whole share and is not
    delayed.

    size: largest number of images in a batch.
    wait: largest number of seconds that a worker waits for its share.
    room: number of waiting images at which `full` becomes true, so that further requests are refused.
    """

    def __init__(self, workers: Sequence[WorkerProcess], size: int = 32, wait: float = 0.01, room: int = 512) -> None:
        self._workers = workers
        self._size = size
        self._wait = wait
        self._room = room
        self._queue: deque[WaitingImage] = deque()
        self._in_progress: set[asyncio.Future[Reply]] = set()
        self._peak = 0  # the most images that were lately in progress at once
        self._arrived = asyncio.Event()
        self._turn = asyncio.Lock()
        self.batches = 0
        self.images = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send batches to the workers; at the end of the block, wait for all images in progress."""
        tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]
        yield
        if self._in_progress:
            await asyncio.wait(self._in_progress)
        for task in tasks:
            task.cancel()

    @property
    def full(self) -> bool:
        """Whether further requests should be refused, as too many images are waiting."""
        return len(self._queue) >= self._room

    async def answer(self, request: ImageRequest) -> Reply:
        """The reply to one image. Raises `DuplexError` if answering fails or the worker dies."""
        done: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._in_progress.add(done)
        self._peak = max(self._peak, len(self._in_progress))
        self._queue.append((request, done))
        self._arrived.set()
        try:
            return await done
        finally:
            self._in_progress.discard(done)

    @property
    def _share(self) -> int:
        """Number of images that a free worker waits for."""
        return max(1, min(self._size, math.ceil(self._peak / len(self._workers))))

    async def _serve(self, worker: WorkerProcess) -> None:
        while True:
            async with self._turn:  # workers fill their batches one after another
                batch = await self._next_batch()
            replies: Sequence[Reply | Failure | Exception]
            try:
                replies = await _ask(worker, [request for request, _ in batch])
                self.batches += 1
                self.images += len(batch)
            except Exception as error:
                replies = [error] * len(batch)
            for (_, done), reply in zip(batch, replies, strict=True):
                if done.done():  # its client has left
                    continue
                if isinstance(reply, tuple):
                    done.set_result(reply)
                else:
                    done.set_exception(DuplexError(reply) if isinstance(reply, str) else reply)

    async def _next_batch(self) -> list[WaitingImage]:
        batch: list[WaitingImage] = []
        while not batch:
            await self._wait_for(lambda: 1)
            try:
                await asyncio.wait_for(self._wait_for(lambda: self._share), self._wait)
            except asyncio.TimeoutError:  # fewer clients than before
                self._peak = len(self._in_progress)
            share = self._share
            size = 0
            while self._queue and len(batch) < share and size < MAX_BATCH_BYTES:
                request, done = self._queue.popleft()
                if not done.done():
                    batch.append((request, done))
                    size += len(request.data)
        return batch

    async def _wait_for(self, count: Callable[[], int]) -> None:
        while len(self._queue) < count():
            self._arrived.clear()
            await self._arrived.wait()


async def _ask(worker: WorkerProcess, batch: Sequence[ImageRequest]) -> list[Reply | Failure]:
    try:
        return await asyncio.wrap_future(worker.submit(batch))
    except BrokenProcessPool:
        pass
    try:  # once more, by its replacement
        return await asyncio.wrap_future(worker.submit(batch))
    except BrokenProcessPool as error:
        raise worker_died(worker) from error
