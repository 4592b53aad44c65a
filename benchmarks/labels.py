"""Measure labels at C-GQA's size, 413 x 674 = 278,362 compositions: building, look-up and candidate sets.

python -m benchmarks.labels [--json]
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from benchmarks.measure import alternate, emit, say
from duplex.labels import LabelSpace

STATES, OBJECTS = 413, 674
LISTED = {"train": 5592, "val": 2292, "test": 1811}  # pairs; C-GQA's counts


def made_up_lists(seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Return random lists of C-GQA's lengths that contain every state and object."""
    rng = np.random.default_rng(seed)
    every = [(f"state{m}", f"object{n}") for m in range(STATES) for n in range(OBJECTS)]
    cover = [(f"state{i % STATES}", f"object{i}") for i in range(OBJECTS)]
    lists = {split: [every[c] for c in rng.choice(len(every), count, replace=False)] for split, count in LISTED.items()}
    lists["train"][: len(cover)] = cover
    return lists


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    wanted = parser.parse_args()
    lists = made_up_lists()
    labels = LabelSpace.from_pairs(lists)
    grid = list(itertools.product(labels.states, labels.objects))
    states, objects = zip(*grid, strict=True)
    works = {
        "build_from_lists": lambda: LabelSpace.from_pairs(lists),
        "build_from_every_pair": lambda: LabelSpace.from_pairs({"train": grid}),
        "index_every_pair": lambda: labels.index(states, objects),
        "name_every_pair": lambda: labels.names(np.arange(labels.size)),
        "seen_mask": lambda: labels.seen,
        "closed_target": lambda: labels.candidates("closed", "test"),
    }
    record = {f"{name}_ms": 1e3 * seconds for name, seconds in alternate(works).items()}
    for name, value in record.items():
        say(f"{name:<28}{value:10.2f}")
    if wanted.json:
        emit({"compositions": labels.size, **record})


if __name__ == "__main__":
    main()
