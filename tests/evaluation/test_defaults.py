"""What a caller of the evaluation who says nothing gets: the first guess, no bias, the seed nought. Published numbers
were made so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from duplex.evaluation import accumulator, curve, feasibility, metrics, sampled, seeds, splits, uncertainty

SAID: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (curve.Margins.of, {"k": 1}),
    (curve.Margins.right, {"bias": 0.0}),
    (curve.Curve.table, {"limit": 500}),
    (accumulator.Evidence.__init__, {"k": 1, "live": None}),
    (accumulator.Evidence.add, {"rows": None, "first_column": 0}),
    (accumulator.Rivals.prediction, {"bias": 0.0}),
    (feasibility.thresholds, {"count": 50}),
    (feasibility.choose_threshold, {"k": 1}),
    (metrics.measure, {"k": 1, "rounds": 1000, "seed": 0}),
    (sampled.sampled, {"k": 1, "live": None}),
    (seeds.compare_seeds, {"rounds": 1000, "seed": 0}),
    (splits.compare_splits, {"rounds": 1000, "seed": 0}),
    (uncertainty.bootstrap, {"rounds": 1000, "seed": 0}),
    (uncertainty.compare, {"rounds": 1000, "seed": 0}),
]


@pytest.mark.parametrize(("function", "said"), SAID, ids=[function.__qualname__ for function, _ in SAID])
def test_who_says_nothing_gets(function, said):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in said} == said
