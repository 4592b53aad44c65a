"""What stops a command is one sentence with an exit code, whatever it was."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from duplex import __version__
from duplex.errors import DuplexError, UsageError
from duplex.system.error_report import Terminated, guarded
from tests.subprocesses import ENVIRONMENT, ROOT, duplex

DUPLEX = [sys.executable, "-c", "from duplex.cli import main; main()"]


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (DuplexError("it is broken;\nmend it"), 1, "it is broken; mend it"),
        (UsageError("no such name"), 2, "no such name"),
        (KeyboardInterrupt(), 130, "stopped"),
        (Terminated(), 143, "stopped"),
        (MemoryError(), 1, "not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), 1, "the GPU's memory is full"),
        (RecursionError(), 1, "nested too deeply"),
        (OSError(errno.ENOSPC, "No space left on device", "out/file"), 1, "out/file: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 1, "out: permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "too many open files"),
    ],
)
def test_each_is_one_line(error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        guarded(raising(error))
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (code, "")
    assert err.startswith("duplex: ") and says in err and err.count("\n") == 1


def test_a_fault_of_the_program_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(raising(ZeroDivisionError()))


def test_work_that_is_done_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(lambda: None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("words", "setting"), [(["--debug"], {}), ([], {"DUPLEX_DEBUG": "1"})])
def test_debugging_shows_the_traceback_and_cause(tmp_path: Path, words: list[str], setting: dict[str, str]) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK no archive")
    command = [*DUPLEX, *words, "score", str(tmp_path / "bad.npz")]
    plain = subprocess.run(
        [*DUPLEX, "score", command[-1]], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    told = subprocess.run(command, env={**ENVIRONMENT, **setting}, capture_output=True, text=True, check=False)
    assert plain.returncode == told.returncode == 2
    assert plain.stderr.count("\n") == 1 and told.stderr.endswith(plain.stderr)
    assert "Traceback" in told.stderr and "direct cause" in told.stderr


def test_the_version_is_printed() -> None:
    done = subprocess.run([*DUPLEX, "--version"], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"duplex {__version__}\n")


def test_a_reader_that_leaves_is_not_an_error() -> None:
    """`duplex encoders | head -1`: a hundred lines into a pipe that nobody reads."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*DUPLEX, "encoders"], env=ENVIRONMENT, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


WAITING = """
import signal, time
from duplex.cli import guarded
signal.signal(signal.SIGINT, signal.default_int_handler)  # deaf where tests run in the background
def work():
    print("begun", flush=True)
    time.sleep(60)
guarded(work)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_script_with_one_line(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err == "duplex: stopped; the same command takes it up again\n"


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "pipeline").glob("*.py")))
def test_scripts_import_what_takes_time_only_under_the_guard(script: str) -> None:
    """So that Ctrl-C in the seconds that torch needs to load is a line too."""
    path = ROOT / "pipeline" / script
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "words", [["init", ""], ["predict", ""], ["data", "add", "own", ""], ["extract", "-d", "shapes", "--out", ""]]
)
def test_an_empty_word_is_not_the_current_folder(tmp_path, words):
    """`duplex init "$WHERE"` with nothing in it."""
    (tmp_path / "picture.png").write_bytes(b"mine")
    done = duplex(*words, cwd=tmp_path)
    assert done.returncode == 2 and "an argument is empty" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
