"""Freed memory stays with the process, counted in page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from duplex.system.threads import USER_SETTINGS, keep_freed_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns memory like this")
FAULTS = """
import resource, torch
import duplex.cli
from duplex.system.entry import run_command
def layers():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(8 << 20)  # 32 MiB, freed at once
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
torch.ones(1)
layers()
run_command(layers)
"""


@glibc
def test_a_command_keeps_freed_memory() -> None:
    given = {key: value for key, value in os.environ.items() if key not in USER_SETTINGS}
    done = subprocess.run([sys.executable, "-c", FAULTS], stdout=subprocess.PIPE, text=True, check=True, env=given)
    plain, kept = map(int, done.stdout.split())
    assert kept * 4 < plain


def test_nothing_is_done_with_another_c_library_or_thresholds_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda *_: pytest.fail("looked for mallopt"))
    with monkeypatch.context() as patched:
        patched.setattr(platform, "libc_ver", lambda: ("", ""))
        assert not keep_freed_memory()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
