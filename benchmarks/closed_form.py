"""Fit and score the closed form at C-GQA's size, in both worlds, from features in memory.

    python -m benchmarks.closed_form --json

26,920 generated features of 768 dimensions train 5,592 seen pairs of 413 states and 674 objects; 7,280 more are scored
against the validation split's pairs and against all 278,362. Pairs and embeddings of words are generated, too.
`seconds` covers statistics, fit, feasibility of every composition and both worlds, with the AUC of each; `peak_gib` is
the peak memory of the process.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import emit, memory, options, say
from benchmarks.text import made_up
from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.curve import AucComponents, Margins
from duplex.labels import Ints, LabelSpace
from duplex.methods.gaussian import ClassStatistics, ClosedForm, FitSettings

STATES, OBJECTS, SEEN, LISTED = 413, 674, 5592, 2292
TRAIN, VAL, DIM = 26_920, 7_280, 768
BLOCK_SCORES = 2**22


def labels() -> LabelSpace:
    """Labels of C-GQA's size, in which each state and object is seen and half of validation's pairs are not."""
    pairs = made_up(STATES, OBJECTS, SEEN + LISTED // 2)
    return LabelSpace.from_pairs({"train": pairs[:SEEN], "val": [*pairs[: LISTED - LISTED // 2], *pairs[SEEN:]]})


def images(space: LabelSpace, pairs: Ints, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit features around the directions of state and object; frequencies fall as a power of the rank."""
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    share = 1 / np.arange(1, len(pairs) + 1) ** 0.8
    drawn = rng.permutation(pairs)[rng.choice(len(pairs), count - len(pairs), p=share / share.sum())]
    own = torch.from_numpy(np.r_[pairs, drawn])  # every pair once, the rest by frequency
    looks = torch.Generator().manual_seed(0)
    a, b = (torch.randn(len(part), DIM, generator=looks) for part in (space.states, space.objects))
    n = len(space.objects)
    z = a[own // n].add_(b[own % n]).add_(torch.randn(count, DIM, generator=g), alpha=4)
    return torch.nn.functional.normalize(z, dim=-1), own


def auc(model: ClosedForm, z: Tensor, own: Tensor, space: LabelSpace, columns: Ints) -> float:
    scores = model.scorer(torch.from_numpy(columns))
    evidence = ScoreAccumulator(np.searchsorted(columns, own.numpy()), space.seen[columns])
    rows = max(1, BLOCK_SCORES // len(columns))
    for start in range(0, len(z), rows):
        block = slice(start, min(start + rows, len(z)))
        evidence.add(scores(z[block]).numpy(), block)
    return 100 * (AucComponents.of(Margins.of(evidence.competitors())).auc or 0.0)


def main() -> None:
    wanted = options(__doc__).parse_args()
    space = labels()
    z, own = images(space, space.pairs["train"], TRAIN, 1)
    z_val, own_val = images(space, space.pairs["val"], VAL, 2)

    times: dict[str, float] = {}
    began = time.perf_counter()

    def lap(name: str) -> None:
        times[name] = time.perf_counter() - began - sum(times.values())
        say(f"{name:<12}{times[name]:6.2f} s")

    statistics = ClassStatistics.of(z, own, len(space.states), len(space.objects))
    lap("statistics")
    g = torch.Generator().manual_seed(3)
    words = torch.randn(len(space.states), DIM, generator=g), torch.randn(len(space.objects), DIM, generator=g)
    fitted = ClosedForm.fit(statistics, FitSettings(), words)
    lap("fit")
    model = fitted.to(torch.float32)
    found = {}
    with torch.no_grad():
        for world in ("closed", "open"):
            found[f"auc_{world}"] = auc(model, z_val, own_val, space, space.candidates(world, "val"))
            lap(world)
    record: dict[str, Any] = {
        "seconds": sum(times.values()),
        "peak_gib": memory("VmHWM") / 2**30,
        **{f"{name}_seconds": value for name, value in times.items()},
        **found,
        "threads": torch.get_num_threads(),
    }
    emit(record) if wanted.json else say(str(record))


if __name__ == "__main__":
    main()
