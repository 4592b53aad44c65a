"""Errors of commands are one line and an exit code; scripts accept only the arguments of their usage line."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from duplex.cli import main
from duplex.errors import DuplexError, UsageError
from duplex.system.entry import Terminated, run_command
from tests.subprocesses import ENVIRONMENT, Forked, duplex


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(DuplexError("it is broken;\nfix it"), 1, "it is broken; fix it"), (UsageError("no such name"), 2, "no such name"),
     (KeyboardInterrupt(), 130, "stopped"), (Terminated(), 143, "stopped"),
     (OSError(errno.ENOSPC, "No space left on device", "out/file"), 1, "No space left on device: 'out/file'")],
)  # fmt: skip
def test_each_error_is_one_line(error, code, message, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(raising(error))
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (code, "")
    assert err.startswith("duplex: ") and message in err and err.count("\n") == 1


def test_success_prints_nothing_and_errors_of_the_program_keep_their_traceback(capsys) -> None:
    run_command(lambda: None)
    with pytest.raises(ZeroDivisionError):
        run_command(raising(ZeroDivisionError()))
    assert capsys.readouterr() == ("", "")


BEFORE_TORCH = """
import os, sys
import duplex.cli
duplex.cli.run_command(lambda: print("torch" in sys.modules, os.environ["OMP_WAIT_POLICY"]))
"""


@pytest.mark.parametrize(("setting", "found"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_threads_that_wait_sleep_unless_the_user_has_chosen(setting: dict[str, str], found: str) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_WAIT_POLICY"} | setting
    printed = subprocess.check_output([sys.executable, "-c", BEFORE_TORCH], env=environment, text=True)
    assert printed == f"False {found}\n"


@pytest.mark.parametrize(("words", "setting"), [(["--debug"], {}), ([], {"DUPLEX_DEBUG": "1"})])
def test_debug_adds_the_traceback_with_its_cause(tmp_path: Path, words: list[str], setting: dict[str, str]) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK no archive")
    plain = duplex("score", tmp_path / "bad.npz")
    debugged = duplex(*words, "score", tmp_path / "bad.npz", env=setting)
    assert plain.returncode == debugged.returncode == 2
    assert plain.stderr.count("\n") == 1 and debugged.stderr.endswith(plain.stderr)
    assert "Traceback" in debugged.stderr and "direct cause" in debugged.stderr


def test_a_closed_pipe_is_not_an_error() -> None:
    """`duplex encoders | head -1`: a hundred lines into a closed pipe."""
    process = Forked(_encoders_into_a_closed_pipe)
    _, err = process.communicate()
    assert (process.returncode, err) == (141, "")


def _encoders_into_a_closed_pipe() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    os.dup2(theirs, 1)
    sys.argv = ["duplex", "encoders"]
    main()


WAITING = """
import signal, time
from duplex.system.entry import run_command
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if tests run in the background
def work():
    print("begun", flush=True)
    time.sleep(60)
run_command(work)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_script_with_one_line(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err == "duplex: stopped; the same command resumes the work\n"


@pytest.mark.parametrize("words", [["init", ""], ["predict", ""], ["extract", "-d", "shapes", "--out", ""]])
def test_an_empty_argument_is_refused(tmp_path, words):
    """`duplex init "$WHERE"` with nothing in it."""
    (tmp_path / "picture.png").write_bytes(b"mine")
    done = duplex(*words, cwd=tmp_path)
    assert done.returncode == 2 and f"after {words[-2]!r} is empty" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
