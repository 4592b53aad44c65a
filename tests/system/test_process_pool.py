"""Worker processes: results, deaths, replacements, and the end of their parent."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from duplex.system.processes import BrokenProcessPool, WorkerProcess
from tests.subprocesses import ENVIRONMENT
from tests.waiting import has_ended, wait_until


def pid_or_die(code: int | None = None, text: str = "") -> str:
    if code is not None:
        os._exit(code)
    if text == "error":
        raise ValueError("wrong text")
    return str(os.getpid()) if text == "pid" else os.environ.get(text, "unset")


CREATE = partial(partial, pid_or_die)


@pytest.fixture
def worker():
    process = WorkerProcess(CREATE, {"PROCESS_POOL_TEST": "one"})
    yield process
    process.kill()


def call(worker: WorkerProcess, *args: object) -> str:
    return worker.submit(*args).result(60)


def test_a_process_returns_results_and_errors_and_has_its_environment(worker):
    assert call(worker, None, "PROCESS_POOL_TEST") == "one" and "PROCESS_POOL_TEST" not in os.environ
    with pytest.raises(ValueError, match="wrong text"):
        call(worker, None, "error")
    assert call(worker, None, "pid") == str(worker.pid) and worker.restarts == 0


def test_a_process_that_dies_is_replaced_at_the_next_call(worker):
    first = call(worker, None, "pid")
    with pytest.raises(BrokenProcessPool):
        call(worker, 7)
    assert worker.describe_end() == "ended with exit code 7"
    second = call(worker, None, "pid")
    assert second not in (first, str(os.getpid())) and worker.restarts == 1
    os.kill(int(second), signal.SIGKILL)
    wait_until(lambda: has_ended(int(second)))
    while True:  # the executor notices an idle process's death a moment later
        try:
            assert call(worker, None, "pid") != second
            break
        except BrokenProcessPool:
            assert worker.describe_end() == "was killed by signal 9"
    assert call(worker, None, "PROCESS_POOL_TEST") == "one"


def test_interrupts_do_not_reach_a_process(worker):
    first = call(worker, None, "pid")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(int(first), number)
    time.sleep(0.2)
    assert call(worker, None, "pid") == first


def test_a_busy_process_is_killed():
    worker = WorkerProcess(partial(partial, time.sleep))
    running = worker.submit(600)
    wait_until(lambda: worker.pid > 0)
    worker.kill()
    assert has_ended(worker.pid) and running.exception(10) is not None


PARENT = """
import sys, time
from tests.system.test_process_pool import CREATE, WorkerProcess
if __name__ == "__main__":
    worker = WorkerProcess(CREATE)
    print(worker.submit(None, "pid").result(), flush=True)
    time.sleep(600)
"""


def test_a_killed_parent_leaves_no_process(tmp_path: Path):
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not has_ended(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: has_ended(child))
