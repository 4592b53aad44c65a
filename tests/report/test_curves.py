"""The mean curve equals the mean of its seeds' curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.uncertainty import Components
from duplex.report.curves import margins_of, mean_curve, unseen_at
from duplex.report.results import read_table


def some_margins(seed: int, seen: int = 40, unseen: int = 30) -> Margins:
    rng = np.random.default_rng(seed)
    d, u = rng.normal(0.5, 1, seen), rng.normal(-0.2, 1, unseen)
    d[rng.random(seen) < 0.3], u[rng.random(unseen) < 0.3] = np.nan, np.nan
    return Margins(d, u, np.r_[np.ones(seen, bool), np.zeros(unseen, bool)])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_unseen_at_is_the_best_at_each_seen_accuracy(seed):
    curve = Curve.of(some_margins(seed, 8, 6))
    grid = np.linspace(0, 1, 11)
    found = unseen_at(curve.seen_accuracy, curve.unseen_accuracy, grid)
    for g, value in zip(grid, found, strict=True):
        enough = curve.unseen_accuracy[curve.seen_accuracy >= g - 1e-12]
        assert value == (enough.max() if enough.size else 0.0)


def test_the_curve_of_one_seed_lies_within_its_interval():
    margins = some_margins(1)
    found = mean_curve([margins], points=801, rounds=50)
    curve = Curve.of(margins)
    assert found.seen[-1] == pytest.approx(100 * curve.seen_accuracy[0])
    assert found.unseen[0] == pytest.approx(100 * curve.unseen_accuracy[-1])
    assert (np.diff(found.unseen) <= 1e-9).all()
    area = np.trapezoid(found.unseen, found.seen) / 100
    assert area == pytest.approx(100 * Components.of(margins).auc, abs=0.5)
    assert ((found.low <= found.unseen + 1e-9) & (found.unseen <= found.high + 1e-9)).mean() > 0.9


def test_seeds_are_averaged_and_different_test_sets_have_no_interval():
    pair = [some_margins(1), some_margins(2)]
    both = mean_curve(pair, rounds=5)
    grid = both.seen / 100
    apart = [unseen_at(Curve.of(m).seen_accuracy, Curve.of(m).unseen_accuracy, grid) for m in pair]
    assert both.unseen == pytest.approx(100 * np.mean(apart, axis=0))
    odd = mean_curve([some_margins(1), some_margins(2, seen=10)], rounds=5)
    assert (odd.low == odd.unseen).all() and (odd.high == odd.unseen).all()


def test_margins_are_read_back_from_predictions(project):
    import json

    files = project.paths.run("own", "duplex", 0)
    table = read_table(files.predictions)
    assert table is not None
    margins = margins_of(table, "closed")
    assert margins is not None
    metrics = json.loads(files.metrics.read_text())["closed"]
    assert 100 * Components.of(margins).auc == pytest.approx(metrics["auc"], abs=0.05)
