"""Worker processes that each create one callable object and call it.

Each is a `ProcessPoolExecutor` of its own: a pool of several processes is lost when one of them dies. The children
ignore Ctrl-C and SIGTERM, which their parent handles, and exit when it exits.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from duplex.errors import DuplexError
from duplex.system.allocator import keep_freed_memory

__all__ = ["BrokenProcessPool", "ProcessFailed", "WorkerProcess"]


class ProcessFailed(DuplexError):
    """A worker process died or could not create its object."""


class WorkerProcess:
    """One spawned process that creates a callable object with `create()`, and calls it as often as requested.

    `create` is pickled; it runs in the process at the first call. `environment` (variables) is set there before
    anything else is imported. Processes are spawned: a forked one would inherit torch's threads and locks, and could
    not use a GPU.
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
        """The worker's process id; 0 before the first call."""
        process = self._context.process
        return 0 if process is None else process.pid or 0

    def submit(self, *args: Any) -> Future[Any]:
        """Schedule a call of the worker's object with `args`; without arguments, the object is only created.

        The future raises `BrokenProcessPool` if the process dies during the call (see `describe_end`), and
        `ProcessFailed` if the object could not be created. A process that has died before is replaced first.
        """
        try:
            return self._executor.submit(_call, *args)
        except BrokenProcessPool:
            self._executor.shutdown()
            self._start()
            return self._executor.submit(_call, *args)

    def describe_end(self) -> str:
        """How the worker process ended, such as "was killed by signal 9"."""
        self._executor.shutdown()  # waits until the exit code is known
        code = 0 if self._context.process is None else self._context.process.exitcode or 0
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kill the worker process, whatever it is doing."""
        process = self._context.process
        if process is not None and process.pid:
            process.kill()
        self._executor.shutdown()


class _Process(SpawnProcess):
    """A spawned process that ignores Ctrl-C even while it imports modules, if the main thread starts it."""

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            super().start()
            return
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            super().start()
        finally:
            signal.signal(signal.SIGINT, handler)


class _RecordingContext(SpawnContext):
    """A context that keeps the process it started, whose exit code is wanted later."""

    process: _Process | None = None

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
            reason = str(error) if isinstance(error, DuplexError) else f"{type(error).__name__}: {error}"
            raise ProcessFailed(f"a worker process could not start: {reason}") from None
    return _object(*args) if args else None


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
