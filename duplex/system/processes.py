"""Worker processes that each create a callable object and call it; progress bars on a terminal's stderr.

Each worker has its own `ProcessPoolExecutor`, since a pool of several processes breaks if one of them
dies. Workers ignore Ctrl-C and SIGTERM, which their parent handles, and exit when it exits.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from duplex.errors import DuplexError
from duplex.system.threads import keep_freed_memory

__all__ = ["BrokenProcessPool", "ProcessFailed", "WorkerProcess"]


class ProcessFailed(DuplexError):
    """Raised if a worker process died or could not create its object."""


class WorkerProcess:
    """A spawned process that makes a callable object by `create()` and calls it on request.

    `create` must be picklable; it runs at the first call, with the variables of `environment` set.
    """

    def __init__(self, create: Callable[[], Callable[..., Any]], environment: Mapping[str, str] | None = None) -> None:
        self._setup = dict(environment or {}), pickle.dumps(create)
        self.restarts = -1
        self._start()

    def _start(self) -> None:
        self.restarts += 1
        self._context = _RecordingContext()
        self._executor = ProcessPoolExecutor(1, self._context, _initialize, self._setup)

    @property
    def pid(self) -> int:
        process = self._context.process
        return 0 if process is None else process.pid or 0

    def submit(self, *args: Any) -> Future[Any]:
        """Schedule a call of the object, in a new process if it died; without `args`, its creation."""
        try:
            return self._executor.submit(_call, *args)
        except BrokenProcessPool:
            self._executor.shutdown()
            self._start()
            return self._executor.submit(_call, *args)

    def describe_end(self) -> str:
        """How the worker process ended, as text such as "was killed by signal 9"."""
        self._executor.shutdown()  # waits until the exit code is known
        code = 0 if self._context.process is None else self._context.process.exitcode or 0
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        process = self._context.process
        if process is not None and process.pid:
            process.kill()
        self._executor.shutdown()


class _Process(SpawnProcess):
    """A spawned process that ignores Ctrl-C even while it imports modules."""

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
            super().start()
            return
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            super().start()
        finally:
            signal.signal(signal.SIGINT, handler)


class _RecordingContext(SpawnContext):
    process: _Process | None = None  # kept, so that its exit code can be read later

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]
        self.process = process = _Process(*args, **options)
        return process


_create: bytes  # this and all below is used in the process
_object: Callable[..., Any] | None = None


def _initialize(environment: dict[str, str], create: bytes) -> None:
    global _create  # noqa: PLW0603
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.update(environment)
    keep_freed_memory()
    _create = create


def _call(*args: Any) -> Any:
    global _object  # noqa: PLW0603
    if _object is None:
        try:
            _object = pickle.loads(_create)()
        except Exception as error:
            kind = "" if isinstance(error, DuplexError) else f"{type(error).__name__}: "
            raise ProcessFailed(f"a worker process could not start: {kind}{error}") from None
    return _object(*args) if args else None


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


Item = TypeVar("Item")


class ProgressBar:
    """`with ProgressBar("epochs", 9) as bar: bar.show(3, {"loss": 0.2})`; a total of 0 hides it."""

    def __init__(self, label: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
        )
        hidden = not sys.stderr.isatty() or total == 0
        period = math.inf  # a step may outlast rich's default period
        self._progress = Progress(*columns, console=Console(stderr=True), disable=hidden, speed_estimate_period=period)
        self._task = self._progress.add_task(label, total=total, values="")

    def show(self, done: int, values: Mapping[str, float] | None = None) -> None:
        shown = [f"{name.removeprefix('loss_')} {value:.4g}" for name, value in (values or {}).items()]
        self._progress.update(self._task, completed=done, values="  ".join(shown))

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def track(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    with ProgressBar(label, total) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.show(done)
