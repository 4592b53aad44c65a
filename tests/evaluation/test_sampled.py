"""The sampled protocol against an independent whole-matrix sweep."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError, UsageError
from duplex.evaluation import sampled as module
from duplex.evaluation.accumulator import Evidence
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
    unseen = sampled(blocks(p.scores[:3], 7), np.array([1, 2, 3]), np.arange(10) == 0)
    assert unseen.unseen is not None and (unseen.seen, unseen.hm, unseen.auc, unseen.bias) == (None,) * 4
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


def test_doubles_stay_doubles_and_whole_numbers_need_not() -> None:
    """A label ahead by less than single precision can tell."""
    close = np.array([[1.0, 1.0 + 1e-12, 0.0], [0.0, 1.0, 1.0 + 1e-12]])
    found = sampled(blocks(close, 1), np.array([1, 2]), np.array([True, True, False]))
    assert (found.seen, found.unseen) == (1.0, 1.0)
    whole = np.array([[16_777_217, 16_777_216, 0]])  # equal in single precision, and the first of equals is taken
    assert sampled(blocks(whole, 1), np.array([1]), np.array([True, True, False])).seen in (0.0, 1.0)
    assert sampled(blocks(whole, 1), np.array([1]), np.array([True, True, False])) == sampled(
        blocks(whole.astype(np.float32), 1), np.array([1]), np.array([True, True, False])
    )


def test_twenty_biases_and_the_far_end_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 unseen images every third margin is one; of 19 every one; the far end is 1000."""
    seen = np.array([True, False])
    for images, tried in ((60, 20), (61, 21), (39, 39), (19, 19), (1, 1)):
        scores = np.stack([np.linspace(0, 1, images), np.zeros(images)], axis=1)
        target = np.ones(images, dtype=np.int64)
        asked: list[float] = []
        right = module._Columns.right

        def noted(self, scores, rows, bias, right=right, asked=asked):
            asked.append(float(bias))
            return right(self, scores, rows, bias)

        with monkeypatch.context() as patch:
            patch.setattr(module._Columns, "right", noted)
            sampled(blocks(scores, images), target, seen)
        assert asked[0] == 1000.0 and len(asked) == 1 + tried
        step = max(images // 20, 1)
        assert asked[1:] == pytest.approx(np.linspace(0, 1, images)[::step] - 1e-4, abs=1e-6)


def test_the_bias_is_where_the_harmonic_mean_is_best_also_at_the_far_end() -> None:
    """An unseen image is right only beyond its own margin; a seen one is lost at 1000 unless it scores more."""
    scores = np.array([[5000.0, 0.0, 0.0], [0.0, 0.0, 0.5]])
    found = sampled(blocks(scores, 1), np.array([0, 2]), np.array([True, True, False]))
    assert (found.seen, found.unseen, found.hm, found.k) == (1.0, 1.0, 1.0, 1)
    assert found.bias == 1000.0
    earlier = np.array([[500.0, 0.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 2.0]])
    found = sampled(blocks(earlier, 1), np.array([0, 2, 2]), np.array([True, True, False]))
    assert (found.hm, found.bias) == (pytest.approx(2 / 3), pytest.approx(-0.5001))
    tied = np.array([[5000.0, 0.0, 0.0], [2000.0, 0.0, 0.5]])
    assert sampled(blocks(tied, 1), np.array([0, 2]), np.array([True, True, False])).unseen == 0.0
    lone = sampled(blocks(np.array([[9.0, 0.0], [3.0, 0.0]]), 1), np.array([0, 1]), np.array([True, False]))
    assert lone.images_seen == lone.images_unseen == 1


def test_the_image_that_holds_no_number_is_named_by_its_place_in_all() -> None:
    p = problem(np.random.default_rng(0), 6, 10)
    p.scores[3, 3] = p.scores[5, 0] = np.nan
    for step, place in ((6, 3), (2, 3), (4, 3)):
        with pytest.raises(DuplexError, match=f"image {place} contain NaN"):
            run(p, step=step)

    def whole() -> Iterator[tuple[slice, np.ndarray]]:
        yield slice(None), p.scores

    with pytest.raises(DuplexError, match="image 3 contain NaN"):
        sampled(whole, p.target, p.seen)


def test_as_many_seen_columns_as_k_are_enough() -> None:
    p = problem(np.random.default_rng(1), 20, 6)
    seen = np.arange(6) < 3
    assert sampled(blocks(p.scores, 7), p.target, seen, k=3).k == 3
    with pytest.raises(UsageError, match="needs at least 4 seen columns, not 3"):
        sampled(blocks(p.scores, 7), p.target, seen, k=4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_tensor_is_an_array(kind: torch.dtype) -> None:
    p = problem(np.random.default_rng(2), 40, 8, levels=9)
    tensor = torch.from_numpy(p.scores).to(kind).requires_grad_()
    assert sampled(lambda: [(slice(0, 40), tensor)], p.target, p.seen) == sampled(
        lambda: [(slice(0, 40), p.scores)], p.target, p.seen
    )
