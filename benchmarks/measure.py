"""What the benchmarks share: options, alternating timings, memory as Linux counts it, parts in processes, files."""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def all_rounds(works: Mapping[str, Callable[[], object]], rounds: int, warm: int) -> dict[str, list[float]]:
    """Seconds of each piece of work in each round; they alternate, so that a slow minute affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm + rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn >= warm:
                times[name].append(time.perf_counter() - start)
    return times


def alternate(works: Mapping[str, Callable[[], object]], rounds: int = 5, warm: int = 1) -> dict[str, float]:
    """Median seconds of each piece of work over alternating rounds."""
    return {name: statistics.median(values) for name, values in all_rounds(works, rounds, warm).items()}


def finished(work: Callable[[], object], device: Any) -> Callable[[], None]:
    """`work`, followed by waiting for the GPU."""

    def call() -> None:
        work()
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    return call


def memory(name: str, path: str = "/proc/self/status") -> int:
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def emit(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    print(json.dumps(record, indent=2))


def write_csv(table: Any, path: Path | None) -> None:
    """Write a data frame, or a list of rows, to the file `path` if that is given."""
    import pandas as pd

    if path is not None and len(table):
        pd.DataFrame(table).to_csv(path, index=False, lineterminator="\n")
