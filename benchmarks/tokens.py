"""Compare an epoch over patch tokens from disk with the same from memory: seconds, ratio, and peak memory.

python -m benchmarks.tokens [--json] [--images 1200] [--patches 64] [--width 512] [--rounds 9] [--folder FOLDER]

Both sides take the same optimiser steps of `dfsp` over the same rows in the same order; `load` repeats each step's
arithmetic until it takes at least as long as reading its rows. The system's page cache is dropped before every epoch
from disk if the system allows it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import begin_peak, emit, memory, say
from duplex.features.layout import ENCODED, Span
from duplex.features.store import PartialCache
from duplex.features.tokens import DiskTokens
from duplex.methods.base import Batch, MethodContext
from duplex.methods.dfsp import Dfsp, DfspOptions
from duplex.options import TrainingOptions
from duplex.testing import small_context, small_labels
from duplex.training.epoch import optimiser_step, prefetch
from duplex.training.optimiser import make_optimiser

BATCH = 32
IDENTITY = {key: key for key in ("encoder", "weights", "precision", "preprocessing", "manifest")}


def write(path: Path, rows: int, shape: tuple[int, ...], dim: int, name: str = "patch") -> None:
    """Write a cache of random tokens, in chunks."""
    random = np.random.default_rng(0)
    cache = PartialCache.create(path, {**IDENTITY, "dim": str(dim)}, Span(0, rows, rows), dim, {name: shape})
    for start in range(0, rows, 64):
        count = min(64, rows - start)
        block = random.standard_normal((count, *shape), dtype=np.float32).astype(np.float16)
        values = {"cls": np.ones((count, dim), np.float16), name: block}
        cache.write(start, np.full(count, ENCODED, np.uint8), **values)
    cache.finish()


def drop_pages(path: Path) -> None:
    """Drop a file from the system's page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class Runner:
    """A method with tokens in memory and on disk."""

    def __init__(self, path: Path, rows: int, shape: tuple[int, int]) -> None:
        plain = small_context()
        context = MethodContext(plain.labels, {"cls": (plain.dim,), "patch": shape}, plain.text)
        torch.manual_seed(0)
        self.path, self.method = path, Dfsp(context, DfspOptions()).train()
        self.settings = TrainingOptions(learning_rate=1e-4, batch_size=BATCH, epochs=1)
        self.optimiser = make_optimiser(self.method, self.settings)
        seen = torch.as_tensor(small_labels().pairs["train"])
        self.own = seen[torch.arange(rows) % len(seen)]
        self.cls = torch.nn.functional.normalize(torch.randn(rows, context.dim), dim=-1)
        self.load = 1

    def epoch(self, tokens: Any) -> float:
        """Return the seconds of a pass over the tokens, in memory or on disk."""
        images = Batch({"cls": self.cls, "patch": tokens}, self.own)
        order = DiskTokens.open(self.path).shuffled_rows(torch.Generator().manual_seed(1)).split(BATCH)
        start = time.perf_counter()
        for held, chosen in prefetch(images, order):
            for _ in range(self.load):
                optimiser_step(self.method, held, chosen, self.settings, self.optimiser)
        return time.perf_counter() - start

    def reading(self) -> float:
        """Return the seconds of reading the same rows without any step."""
        drop_pages(self.path)
        streamed, start = DiskTokens.open(self.path), time.perf_counter()
        for chosen in streamed.shuffled_rows(torch.Generator().manual_seed(1)).split(BATCH):
            streamed[chosen]
        return time.perf_counter() - start


def measure(path: Path, rows: int, shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    runner = Runner(path, rows, shape)
    streamed, reading = DiskTokens.open(path), runner.reading()
    runner.epoch(streamed)  # warm
    begin = begin_peak()
    runner.epoch(streamed)
    grown = memory("VmHWM") - begin
    held: Tensor = streamed[slice(None)]
    alone = runner.epoch(held)
    runner.load = max(1, int(np.ceil(1.2 * reading / alone)))
    times: dict[str, list[float]] = {"disk": [], "memory": []}
    for _ in range(rounds):
        drop_pages(path)
        times["disk"].append(runner.epoch(streamed))
        times["memory"].append(runner.epoch(held))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return {
        "file_bytes": path.stat().st_size,
        "seconds_reading": reading,
        "seconds_from_memory": seconds["memory"],
        "seconds_from_disk": seconds["disk"],
        "share_of_memory": seconds["memory"] / seconds["disk"],
        "peak_bytes_beyond_start": grown,
        "step_repeats": runner.load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--patches", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="folder of the cache; default: a temporary one")
    wanted = parser.parse_args()
    shape = (wanted.patches, wanted.width)
    with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
        path = Path(folder) / "features.h5"
        write(path, wanted.images, shape, small_context().dim)
        record = measure(path, wanted.images, shape, wanted.rounds)
    say("  ".join(f"{key} {value:.4g}" for key, value in record.items()))
    if wanted.json:
        emit(record)


if __name__ == "__main__":
    main()
