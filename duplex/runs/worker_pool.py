"""Warm processes on this machine that make cells. One that dies costs the cell in its hands, no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from duplex.runs.run_tasks import Made, Maker, Task
from duplex.system.allocator import keep_freed_memory

SPAWN = multiprocessing.get_context("spawn")  # a forked process would inherit torch's threads, and no GPU


class Worker:
    """A process with a maker in it."""

    def __init__(self, maker: Maker, environment: dict[str, str]) -> None:
        self._maker, self._environment = maker, environment
        self._start()

    def _start(self) -> None:
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, self._maker), daemon=True)
        with _environment(self._environment), _deaf():
            self.process.start()
        theirs.close()  # so that its death shows as an end of file

    def give(self, task: Task) -> None:
        if not self.process.is_alive():
            self._start()
        self.task = task
        self.connection.send(task)

    def result(self) -> Made:
        """What it sent, or that it died over it."""
        try:
            found: Made = self.connection.recv()
            return found
        except (EOFError, OSError):
            self.process.join()
            number = self.process.exitcode or 0
            how = f"was killed by signal {-number}" if number < 0 else f"ended with code {number}"
            return Made(self.task, 0.0, failed=f"its process {how}, perhaps for want of memory; fewer --jobs need less")

    def stop(self) -> None:
        """Files are written whole or not at all: a process may be ended at any moment."""
        self.process.kill()
        self.process.join()


def on_processes(tasks: Sequence[Task], maker: Maker, jobs: int, gpus: Sequence[str]) -> Iterator[Made]:
    """Make the cells with `jobs` processes, GPUs in turn; each is handed out as soon as it is made."""
    waiting, busy = deque(tasks), dict[Connection, Worker]()
    workers = [Worker(maker, surroundings(n, gpus)) for n in range(min(jobs, len(tasks)))]
    idle = list(workers)
    try:
        while waiting or busy:
            while waiting and idle:
                worker = idle.pop()
                worker.give(waiting.popleft())
                busy[worker.connection] = worker
            for ready in wait(list(busy)):
                worker = busy.pop(ready)  # type: ignore[call-overload]
                yield worker.result()
                idle.append(worker)
    finally:
        for worker in workers:
            worker.stop()


def surroundings(n: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of the n-th process: its GPU; threads that wait sleep, for others may have work."""
    gpu = {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if gpus else {}
    return {"OMP_WAIT_POLICY": "passive", **gpu}


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _deaf() -> Iterator[None]:
    """A process that starts here ignores Ctrl-C from its first moment: it reaches the whole group, and only the one
    that was asked answers it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(connection: Any, maker: Maker) -> None:
    """A worker's life."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    keep_freed_memory()
    while True:
        connection.send(maker.make(connection.recv()))


def _die_with_parent() -> None:
    """Whoever starts the sweep again must find nobody writing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
