"""Counted in page faults: memory that is freed and taken again is not cleared again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from duplex.system.allocator import OWN, keep_freed_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone gives memory back so")
FAULTS = """
import resource, torch
from duplex.cli import guarded
def layers():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(8 << 20)  # 32 MiB, freed at once
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
torch.ones(1)
layers()
guarded(layers)
"""


@glibc
def test_a_commands_process_keeps_what_it_freed() -> None:
    given = {key: value for key, value in os.environ.items() if key not in OWN}
    done = subprocess.run([sys.executable, "-c", FAULTS], stdout=subprocess.PIPE, text=True, check=True, env=given)
    plain, kept = map(int, done.stdout.split())
    assert kept * 4 < plain


@glibc
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", lambda *_: pytest.fail("looked for mallopt"))
    assert not keep_freed_memory()
