"""Start Python processes with the package under test, from any folder.

A fresh interpreter takes seconds to import torch. `Forked` starts a process by forking one that has only imported the
modules of all commands (tests/warm.py): for tests of what a command does, not of how it starts.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
WARM = get_context("forkserver")
WARM.set_forkserver_preload(["tests.warm"])


class Forked:
    """`work(*words)` in a forked process, with the interface of `subprocess.Popen`: pipes, signals, exit code.

    `given` is its stdin.
    """

    def __init__(
        self,
        work: Callable[..., object],
        *words: Any,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        given: str | None = None,
    ) -> None:
        pipes = [WARM.Pipe(duplex=False) for _ in range(3)]
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = pipes
        settings = (str(cwd or Path.cwd()), dict(os.environ if env is None else env), get_start_method())
        theirs = (their_in, their_out, their_err)
        self._process = WARM.Process(target=_work, args=(theirs, settings, work, words))
        _ensure_running()
        self._process.start()
        for end in theirs:
            end.close()
        self.stdout, self.stderr = _text(our_out, "r"), _text(our_err, "r")
        with _text(our_in, "w") as stdin:
            stdin.write(given or "")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        output = ["", ""]

        def read(index: int, stream: io.TextIOWrapper) -> None:
            with stream:
                output[index] = stream.read()

        streams = enumerate((self.stdout, self.stderr))
        readers = [threading.Thread(target=read, args=arguments, daemon=True) for arguments in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return output[0], output[1]


def duplex(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process; `env` is added to the environment, `given` is its stdin."""
    process = Forked(_duplex, *map(str, words), cwd=cwd, env={**os.environ, **(env or {})}, given=given)
    out, err = process.communicate()
    return subprocess.CompletedProcess(["duplex", *map(str, words)], process.wait(), out, err)


def start_duplex(*words: object, cwd: Path | None = None) -> Forked:
    return Forked(_duplex, *map(str, words), cwd=cwd)


def _duplex(*words: str) -> None:
    from duplex.cli import main

    sys.argv = ["duplex", *words]
    main()


def _ensure_running() -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


def _text(end: Connection, mode: str) -> io.TextIOWrapper:
    stream = os.fdopen(os.dup(end.fileno()), mode, encoding="utf-8")
    end.close()
    return stream  # type: ignore[return-value]


def _work(
    ends: tuple[Connection, ...], settings: tuple[str, dict[str, str], str], work: Callable[..., object], words: Any
) -> None:
    folder, environment, method = settings
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    set_start_method(method, force=True)  # for its children; otherwise they would use the way it was started itself
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if tests run in the background
    work(*words)
