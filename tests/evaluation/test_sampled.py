"""The sampled protocol against an independent whole-matrix sweep."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.evidence import Evidence
from duplex.evaluation.metrics import Metrics, measure
from duplex.evaluation.sampled import ScorePass, sampled
from tests.evaluation.twins import Problem, problem, published_sweep


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Blocks this small are slower on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks(scores: np.ndarray, step: int) -> ScorePass:
    def each() -> Iterator[tuple[slice, np.ndarray]]:
        for start in range(0, len(scores), step):
            yield slice(start, start + step), scores[start : start + step]

    return each


def run(p: Problem, k: int = 1, step: int = 37) -> Metrics:
    return sampled(blocks(p.scores, step), p.target, p.seen, p.live, k)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["plain", "half", "tied", "probabilities"]),
    k=st.sampled_from([1, 1, 3]),
    columns=st.sampled_from([30, 90]),
)
def test_equals_the_published_sweep(seed: int, kind: str, k: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, 150, columns, levels=6 if kind == "tied" else 0, live=0.9)
    p.live[p.seen] = True
    scores = p.scores.copy()
    scores[np.arange(150), p.target] += 2
    if kind == "half":
        scores = scores.astype(np.float16)
    if kind == "probabilities":
        scores = np.exp(3 * scores) / np.exp(3 * scores).sum(1, keepdims=True)
    image_seen = p.seen[p.target]
    if not image_seen.any() or image_seen.all():
        return
    found = run(Problem(scores, p.target, p.seen, p.live), k)
    tensors = [torch.from_numpy(x) for x in (scores.astype(np.float32), p.target, p.seen, p.live)]
    expected = published_sweep(tensors[0], tensors[1], tensors[2], tensors[3], k)
    for name in ("seen", "unseen", "hm", "auc"):
        assert getattr(found, name) == pytest.approx(expected[name], abs=1e-6), name


def test_close_to_the_exact_curve_and_mostly_below() -> None:
    gaps = []
    for seed in range(6):
        p = problem(np.random.default_rng(seed), 1000, 60)
        p.scores[np.arange(1000), p.target] += 2
        exact = measure(Evidence(p.target, p.seen).add(p.scores).rivals(), rounds=0)
        found = run(p, step=500)
        gaps.append((exact.auc - found.auc, exact.hm - found.hm))
    assert np.abs(gaps).max() < 0.02 and np.mean(gaps, axis=0)[1] > 0


def test_missing_groups() -> None:
    p = problem(np.random.default_rng(0), 20, 10)
    found = sampled(blocks(p.scores, 7), p.target, np.ones(10, bool))
    assert found.seen is not None and (found.unseen, found.hm, found.auc) == (None, None, None)
    never = np.full((2, 10), 1.0, np.float32)
    never[:, :3] = 0
    poor = sampled(blocks(never, 1), np.array([0, 9]), np.arange(10) >= 5)
    assert (poor.unseen, poor.auc) == (0, 0)


def test_nan_and_too_few_columns_are_refused() -> None:
    p = problem(np.random.default_rng(0), 20, 10)
    with pytest.raises(UsageError, match="at least 9 seen columns"):
        run(p, k=9)
    p.scores[9, 3] = np.nan
    with pytest.raises(DuplexError, match="image 9 contain NaN"):
        run(p, step=4)
