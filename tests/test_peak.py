"""Peak memory of a run, from the operating system."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from duplex.training import loop


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system reports no peak")
def test_the_peak_is_the_systems_number_in_bytes():
    def reported() -> int:
        return 2**10 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])

    before = reported()
    assert before <= loop._peak_resident() <= reported()


@pytest.mark.parametrize(("system", "factor"), [("darwin", 1), ("freebsd14", 1024)])
def test_without_proc_the_peak_comes_from_getrusage(system, factor, monkeypatch):
    monkeypatch.setattr(loop, "Path", lambda _: SimpleNamespace(read_text=lambda **_: "VmPeak: 9 kB"))
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    monkeypatch.setattr(sys, "platform", system)
    assert loop._peak_resident() == 7 * factor
