"""Shared by the benchmarks: alternating timings, peak memory of a child process."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def alternate(works: Mapping[str, Callable[[], object]], rounds: int = 5, warm: int = 1) -> dict[str, float]:
    """Median seconds of each piece of work; the pieces take turns, so that a slow minute slows them all."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm + rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn >= warm:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def emit(record: Mapping[str, Any]) -> None:
    print(json.dumps(record, indent=2))
