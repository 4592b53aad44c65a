"""Logical rules between primitives, as tables of weights.

A rule is a line such as `state: ripe excludes unripe` or `object: cat implies animal`. Where nobody wrote any,
`observed` makes exclusions of what the training labels say: two states seen with one object are told apart by it, so
an image of it cannot be in both; and so with objects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duplex.errors import UsageError, require
from duplex.labels import LabelSpace

LINE = re.compile(r"(state|object):\s*(.+?)\s+(excludes|implies)\s+(.+?)\s*")
FORM = "write `state: A excludes B`, `state: A implies B`, or the same with `object:`"


class Rules(NamedTuple):
    """`excludes[a, b]` and `implies[a, b]` of one kind of primitive, 0 or 1 [M, M]."""

    excludes: Tensor
    implies: Tensor


def well_formed(line: str) -> bool:
    return LINE.fullmatch(line) is not None


def read(lines: Sequence[str], labels: LabelSpace) -> tuple[Rules, Rules]:
    """Rules of states and of objects."""
    names = {"state": labels.states, "object": labels.objects}
    found = {kind: Rules(*(torch.zeros(len(of), len(of)) for _ in range(2))) for kind, of in names.items()}
    for line in lines:
        match = LINE.fullmatch(line)
        if match is None:
            raise UsageError(f"rule {line!r} is none; {FORM}")
        kind, a, verb, b = match.groups()
        i, j = (names[kind].index(require(name, names[kind], f"{kind} of rule {line!r}")) for name in (a, b))
        if i == j:
            raise UsageError(f"rule {line!r} is about one {kind} alone; {FORM}")
        getattr(found[kind], verb)[i, j] = 1.0
        if verb == "excludes":
            found[kind].excludes[j, i] = 1.0
    return found["state"], found["object"]


def observed(labels: LabelSpace) -> tuple[Rules, Rules]:
    """Exclusions between primitives that were seen with a common partner."""
    seen = torch.as_tensor(labels.seen).reshape(len(labels.states), len(labels.objects)).float()
    found = []
    for table in (seen, seen.T):
        common = ((table @ table.T) > 0).float()
        common.fill_diagonal_(0)
        found.append(Rules(common, torch.zeros_like(common)))
    return found[0], found[1]
