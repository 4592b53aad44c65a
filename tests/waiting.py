"""Waiting for other processes in tests."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"the condition was still false after {seconds:g} s"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    """Whether a process has exited, perhaps as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
