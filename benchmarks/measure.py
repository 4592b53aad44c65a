"""What the benchmarks share: options, alternating timings, memory as Linux counts it, parts in processes, images."""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STATUS = "/proc/self/status"


def alternate(works: Mapping[str, Callable[[], object]], rounds: int = 5, warm: int = 1) -> dict[str, float]:
    """Median seconds of each piece of work; they alternate, so that a slow minute affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm + rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn >= warm:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def finished(work: Callable[[], object], device: Any) -> Callable[[], None]:
    """`work`, followed by waiting for the GPU."""

    def call() -> None:
        work()
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    return call


def memory(name: str, path: str = STATUS) -> int:
    """The bytes of a `Name:  123 kB` line of this process: VmRSS is its memory, VmHWM the peak.

    `ru_maxrss` of a child starts at its parent's, so it cannot be used.
    """
    found = re.search(rf"{name}:\s+(\d+) kB", Path(path).read_text(encoding="ascii"))
    assert found, f"{path} has no {name}"
    return int(found[1]) * 1024


def begin_peak() -> int:
    """Reset the high-water mark; the result is the present memory in bytes."""
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


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the option `--json` and a benchmark's docstring as its help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def apart(module: str, part: str) -> Any:
    """The JSON that `python -m MODULE --part PART` prints, in a process whose peak memory can be read."""
    say(f"{part} ...")
    done = subprocess.run([sys.executable, "-m", module, "--part", part], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def write_pictures(folder: Path, count: int, size: tuple[int, int], coarse: int) -> list[Path]:
    """Write JPEG files that are as smooth as photographs: random colours every `coarse` pixels."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    paths = [folder / f"{index:05d}.jpg" for index in range(count)]
    for path in paths:
        colours = random.integers(0, 256, (size[1] // coarse, size[0] // coarse, 3), dtype=np.uint8)
        Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios: a busy moment affects both sides."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def emit(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    print(json.dumps(record, indent=2))


def write_table(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Write rows with equal keys to a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
