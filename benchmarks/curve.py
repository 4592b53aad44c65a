"""The exact curve against the sampled sweep, at the size of C-GQA's test split: time and peak memory.

    python -m benchmarks.curve --json

Closed world: 5,098 images by 6,515 columns. Open world: by 278,362, whose 5.3 GiB of scores are made block by block and
never held. Each part runs in a process of its own, so that its peak memory is its own; times leave out the making of
scores. The sampled sweep is run as the field's evaluators go about it (whole matrices, tests/evaluation/twins.py): on
all rows in the closed world; in the open world on as many as fit into 3 GiB, scaled to 5,098 rows. Times of the sweep
are scaled to the 21 biases that so many images lead to.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.measure import memory

if TYPE_CHECKING:
    import numpy as np

IMAGES, STATES, OBJECTS, SEEN, CLOSED = 5098, 413, 674, 5592, 6515
OPEN = STATES * OBJECTS
WIDTH = 32  # of the factors whose product the scores are
COLUMNS = 4096  # of an open-world block
BIASES = 21
SWEEP_MEMORY = 3 * 2**30
SWEEP_RATIO = 11  # the sweep's peak memory over that of its scores: decides how many rows fit


class Scores:
    """Scores of `images` by `columns` as a product of small factors: any block can be made, none need be kept."""

    def __init__(self, columns: int, images: int = IMAGES) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        seen = rng.permutation(columns) < SEEN
        listed = np.r_[rng.choice(np.flatnonzero(seen), 888), rng.choice(np.flatnonzero(~seen), 923)]
        self.target = rng.choice(listed, images)
        self.seen = seen
        self.feasible = np.where(seen, np.inf, rng.standard_normal(columns))
        self._text = rng.standard_normal((WIDTH, columns), dtype=np.float32)
        noise = rng.standard_normal((images, WIDTH), dtype=np.float32)
        self._images = self._text[:, self.target].T + 0.75 * noise
        self.seconds = 0.0  # spent making scores

    def listed(self, order: np.ndarray) -> Scores:
        """The same with the columns in another order."""
        import numpy as np

        self.target = np.argsort(order)[self.target]
        self.seen, self.feasible = self.seen[order], self.feasible[order]
        self._text = np.ascontiguousarray(self._text[:, order])
        return self

    def block(self, start: int, stop: int) -> np.ndarray:
        began = time.perf_counter()
        made: np.ndarray = self._images @ self._text[:, start:stop]
        self.seconds += time.perf_counter() - began
        return made

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        for start in range(0, self.seen.size, COLUMNS):
            yield start, self.block(start, min(start + COLUMNS, self.seen.size))


def timed(scores: Scores, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the work without those spent making scores, and its result."""
    made, began = scores.seconds, time.perf_counter()
    result = work()
    return time.perf_counter() - began - (scores.seconds - made), result


def exact(columns: int) -> dict[str, Any]:
    """All metrics with intervals, from column blocks."""
    from duplex.evaluation.accumulator import Evidence
    from duplex.evaluation.metrics import measure

    scores = Scores(columns)

    def work() -> dict[str, Any]:
        evidence = Evidence(scores.target, scores.seen)
        for start, block in scores.blocks():
            evidence.add(block, first_column=start)
        return measure(evidence.rivals()).to_dict()

    seconds, metrics = timed(scores, work)
    return {"seconds": seconds, "making_seconds": scores.seconds, "auc": metrics["auc"], "hm": metrics["hm"]}


def sampled(columns: int) -> dict[str, Any]:
    """The sweep over as many rows as fit."""
    import torch

    from tests.evaluation.twins import published_sweep

    free = min(SWEEP_MEMORY, memory("MemAvailable", "/proc/meminfo") / 2)
    rows = min(IMAGES, int(free / (SWEEP_RATIO * 4 * columns)))
    scores = Scores(columns, rows)
    tensors = [torch.from_numpy(a) for a in (scores.block(0, columns), scores.target, scores.seen)]
    began = time.perf_counter()
    found = published_sweep(*tensors, torch.ones(columns, dtype=torch.bool))
    seconds = time.perf_counter() - began
    whole = IMAGES / rows * (BIASES / found["biases"])
    return {
        "rows": rows,
        "biases": found["biases"],
        "seconds_measured": seconds,
        "seconds": seconds * whole,
        "auc": 100 * found["auc"],
        "hm": 100 * found["hm"],
    }


def thresholds(rounds: int = 3) -> dict[str, Any]:
    """50 feasibility thresholds against one that keeps every column: one pass each, alternating."""
    import numpy as np

    from duplex.evaluation import feasibility as f
    from duplex.evaluation.accumulator import Evidence

    scores = Scores(OPEN)
    steps = {count: f.thresholds(scores.feasible, scores.seen, count) for count in (1, 50)}
    scores = scores.listed(Evidence.order(scores.seen, f.buckets(scores.feasible, steps[50])))

    def work(count: int) -> float:
        bucket = f.buckets(scores.feasible, steps[count])
        evidence = Evidence(scores.target, scores.seen, bucket=bucket)
        for start, block in scores.blocks():
            evidence.add(block, first_column=start)
        return float(np.max(f.choose_threshold(evidence, steps[count]).auc))

    seconds: dict[int, list[float]] = {1: [], 50: []}
    for _ in range(rounds):
        for count, found in seconds.items():
            found.append(timed(scores, lambda count=count: work(count))[0])
    one, many = median(seconds[1]), median(seconds[50])
    return {"seconds_1": one, "seconds_50": many, "ratio": many / one}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "exact_closed": lambda: exact(CLOSED),
    "exact_open": lambda: exact(OPEN),
    "thresholds": thresholds,
    "sampled_closed": lambda: sampled(CLOSED),
    "sampled_open": lambda: sampled(OPEN),
}


def run_part(name: str) -> dict[str, Any]:
    """One part in a process of its own."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.curve", "--part", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    print(f"  {result}", file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--part", choices=PARTS, help="run this part here and print its numbers")
    options = parser.parse_args()
    if options.part:
        result = PARTS[options.part]()
        print(json.dumps({**result, "peak_gib": memory("VmHWM") / 2**30}))
        return
    parts = {name: run_part(name) for name in PARTS}
    report = {
        "peak_gib_open": parts["exact_open"]["peak_gib"],
        "speedup_open": parts["sampled_open"]["seconds"] / parts["exact_open"]["seconds"],
        "speedup_closed": parts["sampled_closed"]["seconds"] / parts["exact_closed"]["seconds"],
        "thresholds_ratio": parts["thresholds"]["ratio"],
        **parts,
    }
    for name in ("peak_gib_open", "speedup_open", "speedup_closed", "thresholds_ratio"):
        print(f"{name:<18}{report[name]:8.2f}", file=sys.stderr)
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
