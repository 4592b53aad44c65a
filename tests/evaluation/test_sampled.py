"""The sampled protocol equals an independent sweep on whole matrices."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.curve import Margins
from duplex.evaluation.metrics import BlockSource, Metrics, measure, sampled_bias_metrics, sampled_from_margins
from duplex.system.threads import threads
from tests.evaluation.twins import Problem, problem, published_sweep


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, which is faster for small blocks."""
    with threads(1):
        yield


def blocks(scores: np.ndarray, step: int) -> BlockSource:
    def each() -> Iterator[tuple[slice, np.ndarray]]:
        for start in range(0, len(scores), step):
            yield slice(start, start + step), scores[start : start + step]

    return each


def metrics(scores: np.ndarray, target: list[int], seen: int) -> Metrics:
    """Metrics of scores whose first `seen` columns are seen, image by image."""
    return sampled_bias_metrics(blocks(scores, 1), np.array(target), np.arange(scores.shape[1]) < seen)


def run(p: Problem, k: int = 1, step: int = 37) -> Metrics:
    return sampled_bias_metrics(blocks(p.scores, step), p.target, p.seen, p.feasible, k)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), kind=st.sampled_from(["plain", "half", "tied", "probabilities"]),
    k=st.sampled_from([1, 1, 3]), columns=st.sampled_from([30, 90])
)  # fmt: skip
def test_equals_the_published_sweep(seed: int, kind: str, k: int, columns: int) -> None:
    p = problem(np.random.default_rng(seed), 150, columns, levels=6 if kind == "tied" else 0, feasible=0.9)
    p.feasible[p.seen] = True
    scores = p.scores.copy()
    scores[np.arange(150), p.target] += 2
    if kind == "half":
        scores = scores.astype(np.float16)
    if kind == "probabilities":
        scores = np.exp(3 * scores) / np.exp(3 * scores).sum(1, keepdims=True)
    image_seen = p.seen[p.target]
    if not image_seen.any() or image_seen.all():
        return
    found = run(Problem(scores, p.target, p.seen, p.feasible), k)
    tensors = [torch.from_numpy(x) for x in (scores.astype(np.float32), p.target, p.seen, p.feasible)]
    expected = published_sweep(tensors[0], tensors[1], tensors[2], tensors[3], k)
    for name in ("seen", "unseen", "hm", "auc"):
        assert getattr(found, name) == pytest.approx(expected[name], abs=1e-6), name


@pytest.mark.parametrize("columns", [10, 90])
def test_margins_of_the_exact_curve_give_the_same_sweep(columns: int) -> None:
    for seed in range(6):
        p = problem(np.random.default_rng(seed), 400, columns, feasible=0.9)
        p.feasible[p.seen] = True
        p.feasible[p.target] = True
        p.scores[np.arange(400), p.target] += 2
        accumulator = ScoreAccumulator(p.target, p.seen, feasible_mask=p.feasible).add(p.scores)
        found, expected = sampled_from_margins(Margins.of(accumulator.competitors())), run(p, step=100)
        for name in ("seen", "unseen", "hm", "auc", "bias"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-6), name


def test_the_sweep_is_close_to_the_exact_curve_and_mostly_below() -> None:
    gaps = []
    for seed in range(6):
        p = problem(np.random.default_rng(seed), 1000, 60)
        p.scores[np.arange(1000), p.target] += 2
        exact = measure(ScoreAccumulator(p.target, p.seen).add(p.scores).competitors(), rounds=0)
        found = run(p, step=500)
        gaps.append((exact.auc - found.auc, exact.hm - found.hm))
    assert np.abs(gaps).max() < 0.02 and np.mean(gaps, axis=0)[1] > 0


def test_metrics_of_a_missing_group_are_none() -> None:
    p = problem(np.random.default_rng(0), 20, 10)
    found = sampled_bias_metrics(blocks(p.scores, 7), p.target, np.ones(10, bool))
    assert found.seen is not None and (found.unseen, found.hm, found.auc) == (None, None, None)
    unseen = sampled_bias_metrics(blocks(p.scores[:3], 7), np.array([1, 2, 3]), np.arange(10) == 0)
    assert unseen.unseen is not None and (unseen.seen, unseen.hm, unseen.auc, unseen.bias) == (None,) * 4
    never = np.full((2, 10), 1.0, np.float32)
    never[:, :3] = 0
    poor = sampled_bias_metrics(blocks(never, 1), np.array([0, 9]), np.arange(10) >= 5)
    assert (poor.unseen, poor.auc) == (0, 0)


def test_float64_scores_keep_their_precision() -> None:
    close = np.array([[1.0, 1.0 + 1e-12, 0.0], [0.0, 1.0, 1.0 + 1e-12]])
    found = metrics(close, [1, 2], 2)
    assert (found.seen, found.unseen) == (1.0, 1.0)
    whole = np.array([[16_777_217, 16_777_216, 0]])  # equal in single precision, and the first of equals is taken
    assert metrics(whole, [1], 2).seen in (0.0, 1.0)
    assert metrics(whole, [1], 2) == metrics(whole.astype(np.float32), [1], 2)


def test_the_bias_maximises_the_harmonic_mean_up_to_1000() -> None:
    scores = np.array([[5000.0, 0.0, 0.0], [0.0, 0.0, 0.5]])
    found = metrics(scores, [0, 2], 2)
    assert (found.seen, found.unseen, found.hm, found.k) == (1.0, 1.0, 1.0, 1)
    assert found.bias == 1000.0
    earlier = np.array([[500.0, 0.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 2.0]])
    found = metrics(earlier, [0, 2, 2], 2)
    assert (found.hm, found.bias) == (pytest.approx(2 / 3), pytest.approx(-0.5001))
    tied = np.array([[5000.0, 0.0, 0.0], [2000.0, 0.0, 0.5]])
    assert metrics(tied, [0, 2], 2).unseen == 0.0
    lone = metrics(np.array([[9.0, 0.0], [3.0, 0.0]]), [0, 1], 1)
    assert lone.images_seen == lone.images_unseen == 1


def test_too_few_seen_columns_are_refused() -> None:
    p, seen = problem(np.random.default_rng(0), 20, 10), np.arange(10) < 3
    assert sampled_bias_metrics(blocks(p.scores, 7), p.target, seen, k=3).k == 3
    with pytest.raises(UsageError, match="needs at least 4 seen columns, but there are 3"):
        sampled_bias_metrics(blocks(p.scores, 7), p.target, seen, k=4)


@pytest.mark.parametrize("step", [2, 4, 6])
def test_nan_is_reported_with_the_number_of_the_image(step: int) -> None:
    p = problem(np.random.default_rng(0), 6, 10)
    p.scores[3, 3] = p.scores[5, 0] = np.nan
    with pytest.raises(DuplexError, match=r"image 3 .* contain NaN"):
        run(p, step=step)
    with pytest.raises(DuplexError, match=r"image 3 .* contain NaN"):
        sampled_bias_metrics(lambda: [(slice(None), p.scores)], p.target, p.seen)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_tensor_gives_the_metrics_of_an_array(kind: torch.dtype) -> None:
    p = problem(np.random.default_rng(2), 40, 8, levels=9)
    tensor = torch.from_numpy(p.scores).to(kind).requires_grad_()
    assert sampled_bias_metrics(lambda: [(slice(0, 40), tensor)], p.target, p.seen) == sampled_bias_metrics(
        lambda: [(slice(0, 40), p.scores)], p.target, p.seen
    )
