"""Measure `training.threads: auto`: python -m benchmarks.threads [--json]

`threads_auto_over_best`: seconds of training with `auto`, timing included, per second of the faster of one thread and
all threads; alone, and beside a process that keeps one core busy. All three alternate, but a number of threads that
takes more than twice as long as the other is run only once. It trains `cso` on the drawn shapes for six epochs, in a
project whose features are cached (`make repro`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import torch

import duplex
from benchmarks.measure import alternate, emit, say

EPOCHS, ROUNDS = 6, 3
SLOW = 2.0  # a number of threads that takes this many times the other's seconds is not the best one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    data = duplex.load_dataset("shapes")
    every = torch.get_num_threads()

    def train(threads: int | Literal["auto"]) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            duplex.fit(data, "cso", epochs=EPOCHS, threads=threads)

    works = {"one": lambda: train(1), "all": lambda: train(every), "auto": lambda: train("auto")}
    record = {}
    for name, neighbour in (("alone", contextlib.nullcontext()), ("beside a busy core", busy_core())):
        with neighbour:
            once = {key: alternate({key: works[key]}, rounds=1, warm=0)[key] for key in ("one", "all")}
            slow = {key: value for key, value in once.items() if value > SLOW * min(once.values())}
            seconds = slow | alternate({key: work for key, work in works.items() if key not in slow}, ROUNDS)
        record[name] = {key: round(value, 2) for key, value in seconds.items()}
        record[name]["threads_auto_over_best"] = round(seconds["auto"] / min(seconds["one"], seconds["all"]), 3)
    emit(record) if arguments.json else say(str(record))


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Run a process that computes without end beside the `with` block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
