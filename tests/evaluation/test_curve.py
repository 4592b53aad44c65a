"""The exact curve equals trying every bias, and does not depend on order or scale."""

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import UsageError
from duplex.evaluation.accumulate import ScoreAccumulator, TopCompetitors
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.metrics import Metrics, measure
from tests.evaluation.twins import Problem, is_right, naive, problem


def competitors_of(p: Problem, k: int = 1) -> TopCompetitors:
    return ScoreAccumulator(p.target, p.seen, feasible_mask=p.feasible, k=k).add(p.scores).competitors()


def metrics_of(p: Problem, k: int = 1) -> Metrics:
    return measure(competitors_of(p, k), k, rounds=0)


def assert_equals_naive(p: Problem, k: int = 1) -> None:
    found = metrics_of(p, k)
    for name, value in naive(p, k).items():
        assert getattr(found, name) == (None if value is None else pytest.approx(value, abs=1e-12)), name


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6), levels=st.sampled_from([0, 2, 3, 6]), k=st.integers(1, 4),
    feasible=st.sampled_from([1.0, 0.7]), infinite=st.booleans(),
)  # fmt: skip
def test_metrics_equal_trying_every_bias(seed: int, levels: int, k: int, feasible: float, infinite: bool) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, int(rng.integers(1, 14)), int(rng.integers(1, 9)), levels, feasible)
    if infinite:
        p.scores[rng.random(p.scores.shape) < 0.25] = -np.inf
        p.scores[rng.random(p.scores.shape) < 0.1] = np.inf
    assert_equals_naive(p, k)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([2.0**100, 2.0**-100, 2.0**-140]))
def test_huge_and_tiny_scores_give_the_same_metrics(seed: int, scale: float) -> None:
    p = problem(np.random.default_rng(seed), levels=5)
    scaled = Problem((p.scores * np.float32(scale)).astype(np.float32), p.target, p.seen, p.feasible)
    assert scaled.scores.any()
    plain, found = metrics_of(p), metrics_of(scaled)
    assert (found.seen, found.unseen, found.hm, found.auc) == (plain.seen, plain.unseen, plain.hm, plain.auc)


EXTREMES = {
    "constant": lambda p: Problem(np.ones_like(p.scores), p.target, p.seen, p.feasible),
    "all seen": lambda p: Problem(p.scores, p.target, p.seen | True, p.feasible),
    "all unseen": lambda p: Problem(p.scores, p.target, p.seen & False, p.feasible),
    "single image": lambda p: Problem(p.scores[:1], p.target[:1], p.seen, p.feasible),
    "single column": lambda p: Problem(p.scores[:, :1], 0 * p.target, np.array([True]), np.array([True])),
    "all -inf": lambda p: Problem(np.full_like(p.scores, -np.inf), p.target, p.seen, p.feasible),
}


@pytest.mark.parametrize("case", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("k", [1, 2])
def test_extreme_cases_equal_trying_every_bias(case: Any, k: int) -> None:
    assert_equals_naive(case(problem(np.random.default_rng(3), levels=4)), k)


def test_undefined_numbers_are_none() -> None:
    p = problem(np.random.default_rng(0))
    found = measure(ScoreAccumulator(p.target, np.ones_like(p.seen)).add(p.scores).competitors())
    assert found.seen is not None and found.seen_interval is not None
    assert (found.unseen, found.hm, found.auc, found.bias) == (None, None, None, None)
    assert (found.unseen_interval, found.hm_interval, found.auc_interval) == (None, None, None)
    assert found.to_dict()["hm"] is None


def test_scores_of_infeasible_columns_do_not_matter() -> None:
    p = problem(np.random.default_rng(2))
    p.feasible[4] = False
    expected = metrics_of(p)
    p.scores[:, 4] = np.nan
    assert metrics_of(p) == expected


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([0, 4]), k=st.integers(1, 3))
def test_order_of_columns_and_shifts_of_rows_do_not_matter(seed: int, levels: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, levels=levels)
    expected = metrics_of(p, k)
    order = rng.permutation(p.seen.size)
    moved = Problem(p.scores[:, order], np.argsort(order)[p.target], p.seen[order], p.feasible[order])
    assert metrics_of(moved, k) == expected
    exact = p.scores.astype(np.float64) + rng.integers(-8, 8, (p.target.size, 1))
    shifted = Problem(exact, p.target, p.seen, p.feasible)
    assert metrics_of(shifted, k).auc == (None if expected.auc is None else pytest.approx(expected.auc, abs=1e-12))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3))
def test_right_at_a_bias_equals_counting(seed: int, k: int) -> None:
    p = problem(np.random.default_rng(seed), levels=4, feasible=0.9)
    margins = Margins.of(competitors_of(p, k), k)
    for bias in (-2.5, 0.0, 1.0, 1.5):
        assert margins.right(bias).tolist() == [is_right(p, image, bias, k) for image in range(p.target.size)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_best_bias_reaches_the_best_harmonic_mean(seed: int) -> None:
    p = problem(np.random.default_rng(seed), images=30)
    margins, found = Margins.of(competitors_of(p)), metrics_of(p)
    if found.hm is None or found.bias is None:
        return
    right = margins.right(found.bias)
    s, u = right[margins.is_seen].mean(), right[~margins.is_seen].mean()
    assert (2 * s * u / (s + u) if s + u else 0) == pytest.approx(found.hm)


def test_every_point_of_the_table_is_reached_at_its_bias() -> None:
    margins = Margins.of(competitors_of(problem(np.random.default_rng(5), images=60, columns=12)))
    table = Curve.of(margins).table(limit=None)
    rows: Any = table.itertuples()
    for row in rows:
        right = margins.right(row.bias)
        assert (row.seen, row.unseen) == (right[margins.is_seen].mean(), right[~margins.is_seen].mean())


@pytest.mark.parametrize("missing", ["seen", "unseen"])
def test_a_group_without_images_is_nan_without_a_warning(missing: str) -> None:
    found = {"seen": np.array([0.3, 0.1]), "unseen": np.array([0.2]), missing: np.array([])}
    mask = np.repeat([True, False], [len(found["seen"]), len(found["unseen"])])
    curve = Curve.of(Margins(found["seen"], found["unseen"], mask))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        here, absent = curve.seen_accuracies, curve.unseen_accuracies
    here, absent = (absent, here) if missing == "seen" else (here, absent)
    assert np.isnan(absent).all() and not np.isnan(here).any()


def test_biases_are_midpoints_and_lie_beyond_the_ends() -> None:
    def turning(*turns: float) -> Curve:
        return Curve.of(Margins(np.array(turns), np.array([np.nan]), np.arange(len(turns) + 1) < len(turns)))

    def biases(*turns: float) -> list[float]:
        return [turning(*turns).bias(point) for point in range(turning(*turns).breakpoints.size + 1)]

    assert biases() == [0.0] == biases(np.inf, np.nan)
    assert biases(0.25, -0.5) == [-1.5, -0.125, 1.25]
    assert biases(3.0, 5.0, 9.0) == [0.0, 4.0, 7.0, 18.0]
    assert turning(1e308, 1.5e308).bias(1) == 1.25e308  # whose sum is infinite


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 10, 47, 48])
def test_a_table_keeps_to_its_limit_and_has_its_ends_and_best_point(limit: int) -> None:
    seen = np.array([*range(2, 40), 41.5, 42.5])  # the best harmonic mean is near the right end
    curve = Curve.of(Margins(seen, np.array([*range(-4, 2), 41.0]), np.arange(47) < 40))
    full, found = curve.table(limit=None), curve.table(limit)
    assert len(full) == 48 and len(found) <= max(limit, 3) and (limit < 48 or len(found) == 48)
    assert limit < 10 or len(found) > limit / 2
    for place in (0, int(full["hm"].argmax()), 47):
        assert full.iloc[place].tolist() in found.to_numpy().tolist()
    assert len(curve.table()) == 48
    one_sided = Curve.of(Margins(np.arange(900.0), np.array([]), np.ones(900, bool))).table()
    assert 480 < len(one_sided) <= 500 and one_sided["unseen"].isna().all() and one_sided["seen"].iloc[0] == 1.0


def test_a_label_with_k_equal_competitors_is_never_right() -> None:
    scores = np.array([[4.0, 4, 4, 1], [4, 4, 3, 1]])
    competitors = ScoreAccumulator([0, 0], [True, True, True, False], k=2).add(scores).competitors()
    assert np.isnan(Margins.of(competitors, 2).seen[0]) and Margins.of(competitors, 2).seen[1] == 3.0
    for k in (0, 3):
        with pytest.raises(UsageError, match=f"k is {k}, but the ScoreAccumulator was made with k=2"):
            Margins.of(competitors, k)
