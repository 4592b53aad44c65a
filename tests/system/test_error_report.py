"""Errors of commands are one line and an exit code."""

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
from duplex.system.error_report import Terminated, run_command
from tests.subprocesses import ENVIRONMENT, duplex


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DuplexError("it is broken;\nfix it"), 1, "it is broken; fix it"),
        (UsageError("no such name"), 2, "no such name"),
        (KeyboardInterrupt(), 130, "stopped"),
        (Terminated(), 143, "stopped"),
        (Terminated(signal.SIGHUP), 129, "stopped"),
        (MemoryError(), 1, "not enough memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 1, "not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), 1, "the GPU's memory is full"),
        (RecursionError(), 1, "nested too deeply"),
        (OSError(errno.ENOSPC, "No space left on device", "out/file"), 1, "out/file: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 1, "out: permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "too many open files"),
    ],
)
def test_each_error_is_one_line(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(raising(error))
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (code, "")
    assert err.startswith("duplex: ") and message in err and err.count("\n") == 1


def test_success_prints_nothing_and_errors_of_the_program_keep_their_traceback(capsys) -> None:
    run_command(lambda: None)
    with pytest.raises(ZeroDivisionError):
        run_command(raising(ZeroDivisionError()))
    with pytest.raises(ImportError):
        run_command(raising(ImportError("cannot import name 'x'")))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("words", "setting"), [(["--debug"], {}), ([], {"DUPLEX_DEBUG": "1"})])
def test_debug_adds_the_traceback_with_its_cause(tmp_path: Path, words: list[str], setting: dict[str, str]) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK no archive")
    plain = duplex("score", tmp_path / "bad.npz")
    debugged = duplex(*words, "score", tmp_path / "bad.npz", env=setting)
    assert plain.returncode == debugged.returncode == 2
    assert plain.stderr.count("\n") == 1 and debugged.stderr.endswith(plain.stderr)
    assert "Traceback" in debugged.stderr and "direct cause" in debugged.stderr


def test_the_version_is_printed() -> None:
    done = duplex("--version")
    assert (done.returncode, done.stdout) == (0, f"duplex {__version__}\n")


@pytest.mark.parametrize("words", [["encoders"], ["extract", "--help"]])
def test_a_closed_pipe_is_not_an_error(words: list[str]) -> None:
    """`duplex encoders | head -1`: a hundred lines into a closed pipe."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-c", "from duplex.cli import main; main()", *words]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


WAITING = """
import signal, time
from duplex.system.error_report import run_command
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if tests run in the background
def work():
    print("begun", flush=True)
    time.sleep(60)
run_command(work)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_a_script_with_one_line(number: signal.Signals, code: int) -> None:
    listening = WAITING.replace("def work", "signal.signal(signal.SIGHUP, signal.SIG_DFL)\ndef work")  # unlike nohup
    process = subprocess.Popen(
        [sys.executable, "-c", listening], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err == "duplex: stopped; the same command resumes the work\n"


def test_nohup_keeps_its_effect() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING.replace("60", "1")],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),  # noqa: PLW1509
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0


CLOSED = """
import os, sys
from duplex.system.error_report import run_command
def work():
    with open(sys.argv[1], "w") as file:
        os.write(2, b"a message of a C library")
        file.write("content")
    sys.stderr.write("progress")
    sys.stdin.read()
    if len(sys.argv) > 2:
        print("results")
run_command(work)
"""


def test_closed_streams_are_neither_files_nor_a_traceback(tmp_path: Path) -> None:
    """A daemon closes all three: the first file that is opened would be stderr."""
    command = f'exec "{sys.executable}" -c "$0" "$1" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, CLOSED, tmp_path / "file"], env=ENVIRONMENT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "content"


def test_output_to_a_closed_stdout_is_an_error_of_one_line(tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -c "$0" "$1" "$1" </dev/null >&-'
    done = subprocess.run(
        ["sh", "-c", command, CLOSED, tmp_path / "file"], env=ENVIRONMENT, stderr=subprocess.PIPE, check=False
    )
    assert done.returncode == 1
    assert done.stderr.decode().removeprefix("a message of a C libraryprogress") == (
        "duplex: stdout is closed, so the output is lost; run the command again with stdout open\n"
    )


def test_a_deleted_current_folder_is_refused(tmp_path: Path) -> None:
    """MKL would end the program with a message about one of its own files."""
    (tmp_path / "gone").mkdir()
    program = (
        "import os, sys; from duplex.cli import main; os.rmdir(os.getcwd()); sys.argv = ['duplex', 'methods']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, cwd=tmp_path / "gone", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"duplex: the current folder has been deleted; change to another one\n"


@pytest.mark.parametrize(
    "words", [["init", ""], ["predict", ""], ["data", "add", "own", ""], ["extract", "-d", "shapes", "--out", ""]]
)
def test_an_empty_argument_is_refused(tmp_path, words):
    """`duplex init "$WHERE"` with nothing in it."""
    (tmp_path / "picture.png").write_bytes(b"mine")
    done = duplex(*words, cwd=tmp_path)
    assert done.returncode == 2 and "an argument is empty" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


LAST = """
import atexit, gc
from duplex.system.error_report import run_command
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # called after the functions that are registered later
run_command(lambda: None)
"""


def test_the_last_collection_of_a_command_visits_no_object() -> None:
    done = subprocess.run([sys.executable, "-c", LAST], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
