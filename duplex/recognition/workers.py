"""Processes that look at pictures: each has a recogniser of its own and answers one batch after the other.

One interpreter runs one piece of Python at a time, and what a small encoder's picture costs is half Python; so the
server keeps to HTTP. A file that kills its decoder kills a worker, which is started again, and not the server.
"""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.image_files import BadPicture, decode_picture
from duplex.labels import World
from duplex.recognition.recognizer import Recognizer
from duplex.system.allocator import keep_freed_memory

SPAWN = get_context("spawn")  # a fork would copy locks that torch's threads hold
LEAVE = 10.0  # seconds that a process has to end by itself

Told = tuple[dict[str, Any], NDArray[Any] | None]  # a picture's record, and its feature where it was asked for
Failed = str  # why a picture was not looked at, through no fault of its own


class Gone(DuplexError):
    """A worker ended before it had answered."""


@dataclass(frozen=True)
class Asked:
    """A file's bytes, how many compositions are wanted, and whether the feature is."""

    data: bytes
    top: int
    feature: bool = False


@dataclass(frozen=True)
class Job:
    """What a worker is made of; it is pickled."""

    load: Callable[[], Recognizer]
    world: World | None
    pixels: int  # of a picture, at most
    threads: int  # of torch


class Worker:
    """One process, seen from the server: `ready`, then `answer` from one thread at a time."""

    def __init__(self, job: Job) -> None:
        self._job, self._stopped, self.restarts = job, False, 0
        self._start()

    def _start(self) -> None:
        self._line, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=work, args=(theirs, self._job))
        self._process.start()
        theirs.close()  # or its end would not be noticed here

    def ready(self) -> None:
        """Wait until it has loaded its model."""
        found = self._received()
        if found is not None:
            raise DuplexError(found)

    @property
    def pid(self) -> int:
        return cast(int, self._process.pid)

    def answer(self, batch: Sequence[Asked]) -> list[Told | Failed]:
        """One for each picture. Where the process has died, another one is asked; where that dies too, `Gone`."""
        try:
            return self._answered(batch)
        except Gone:
            if self._stopped:
                raise
        self._restart()
        return self._answered(batch)

    def dismiss(self) -> None:
        """Nothing more is asked of it; a batch that is under way is finished."""
        self._stopped = True
        self._line.close()

    def stop(self) -> None:
        """Wait for its end, for so long."""
        self._process.join(LEAVE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answered(self, batch: Sequence[Asked]) -> list[Told | Failed]:
        try:
            self._line.send(batch)
        except OSError as error:
            raise self._gone() from error
        return cast("list[Told | Failed]", self._received())

    def _received(self) -> Any:
        try:
            return self._line.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _gone(self) -> Gone:
        self._process.join(1)
        code = self._process.exitcode
        return Gone(f"a worker ended (exit code {code}), perhaps for want of memory; try fewer --workers")

    def _restart(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.join()
        self.restarts += 1
        self._start()
        try:
            self.ready()
        except DuplexError as error:
            raise Gone(str(error)) from error


@contextmanager
def staff(job: Job, count: int) -> Iterator[list[Worker]]:
    """So many workers, ready; they end with the block."""
    hands: list[Worker] = []
    try:
        for _ in range(count):
            hands.append(Worker(job))
        for worker in hands:
            worker.ready()
        yield hands
    finally:
        for worker in hands:
            worker.dismiss()
        for worker in hands:
            worker.stop()


def work(line: Connection, job: Job) -> None:
    """What the process does. It ends when nobody holds the other end of its line, however that came about."""
    for number in (signal.SIGINT, signal.SIGTERM):  # these reach the whole group; the server says when it is over
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    with suppress(EOFError, OSError):
        try:
            look = Look(job)
        except DuplexError as error:
            line.send(f"a worker cannot begin: {error}")
            return
        except Exception as error:
            line.send(f"a worker cannot begin: {type(error).__name__}: {error}; try fewer --workers")
            return
        line.send(None)
        while True:
            line.send(_looked(look, line.recv()))


def _looked(look: Look, batch: Sequence[Asked]) -> list[Told | Failed]:
    """What breaks over one picture is told to who sent it; the others are looked at alone."""
    try:
        return [*look(batch)]
    except Exception as error:
        if len(batch) == 1:
            return [f"{type(error).__name__}: {error}"]
    return [_looked(look, [one])[0] for one in batch]


class Look:
    """Files' bytes to what is told of them."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._recognizer, self._pixels = job.load(), job.pixels
        self._panel = self._recognizer.panel(job.world)
        self._transform = self._recognizer.encoder.image_transform

    def __call__(self, batch: Sequence[Asked]) -> list[Told]:
        seen = [self._seen(one.data) for one in batch]
        told: list[Told] = [({"error": one}, None) if isinstance(one, str) else ({}, None) for one in seen]
        good = [place for place, one in enumerate(seen) if not isinstance(one, str)]
        if not good:
            return told
        inputs = self._recognizer.encode([cast(Tensor, seen[place]) for place in good])
        answers = self._panel.answers(inputs, max(batch[place].top for place in good))
        for place, answer, feature in zip(good, answers, inputs["cls"], strict=True):
            one = batch[place]
            record = answer.to_dict(one.top)
            told[place] = {**record, "top": record["top"][: one.top]}, feature.cpu().numpy() if one.feature else None
        return told

    def _seen(self, data: bytes) -> Tensor | str:
        """[3, R, R] uint8, or why there is no picture."""
        if not data:
            return "empty"
        try:
            return cast(Tensor, self._transform(decode_picture(io.BytesIO(data), self._pixels)))
        except BadPicture as error:
            return error.reason
        except (ValueError, ZeroDivisionError, MemoryError):
            return "cannot be resized"
