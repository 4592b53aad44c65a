"""Tools shared by the benchmarks: alternating timings, and memory as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STATUS = "/proc/self/status"


def alternate(works: Mapping[str, Callable[[], object]], rounds: int = 5, warm: int = 1) -> dict[str, float]:
    """Return the median seconds of each piece of work; they alternate, so that a slow minute affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm + rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn >= warm:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def finished(work: Callable[[], object], device: Any) -> Callable[[], None]:
    """Return `work` followed by waiting for the GPU."""

    def call() -> None:
        work()
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    return call


def memory(name: str, path: str = STATUS) -> int:
    """Return the bytes of a `Name:  123 kB` line of this process: VmRSS is its memory, VmHWM the peak.

    `ru_maxrss` of a child starts at its parent's, so it cannot be used.
    """
    found = re.search(rf"{name}:\s+(\d+) kB", Path(path).read_text(encoding="ascii"))
    assert found, f"{path} has no {name}"
    return int(found[1]) * 1024


def begin_peak() -> int:
    """Reset the high-water mark; return the present memory in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed must not hide what this work takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory("VmRSS")


class FamilyMemory:
    """Measures the peak memory of this process and its children every tenth of a second; shared pages count once."""

    def __init__(self, every: float = 0.1) -> None:
        self.peak = 0
        self._every = every
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> FamilyMemory:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._done.wait(self._every):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
            held = 0
            for pid in ("self", *children):
                with contextlib.suppress(OSError):  # a child may just have ended
                    held += memory("Pss", f"/proc/{pid}/smaps_rollup")
            self.peak = max(self.peak, held)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def emit(record: Mapping[str, Any]) -> None:
    print(json.dumps(record, indent=2))
