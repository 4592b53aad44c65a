"""Feasibility against literal loops; thresholds from one pass against a pass for each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError
from duplex.evaluation.evidence import Evidence
from duplex.evaluation.feasibility import buckets, choose_threshold, feasibility, thresholds
from duplex.evaluation.metrics import measure
from duplex.labels import LabelSpace


def space(rng: np.random.Generator, states: int, objects: int, seen: float) -> LabelSpace:
    train = np.flatnonzero(rng.random(states * objects) < seen)
    return LabelSpace(tuple(f"s{i}" for i in range(states)), tuple(f"o{i}" for i in range(objects)), {"train": train})


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths else 0.0


def literal(states: np.ndarray, objects: np.ndarray, labels: LabelSpace) -> np.ndarray:
    seen = {(int(c) // len(objects), int(c) % len(objects)) for c in labels.pairs["train"]}
    found = np.empty((len(states), len(objects)))
    for m in range(len(states)):
        for n in range(len(objects)):
            by_object = [cosine(objects[n], objects[o]) for o in range(len(objects)) if o != n and (m, o) in seen]
            by_state = [cosine(states[m], states[s]) for s in range(len(states)) if s != m and (s, n) in seen]
            found[m, n] = (max(by_object, default=-1.0) + max(by_state, default=-1.0)) / 2
            if (m, n) in seen:
                found[m, n] = np.inf
    return found.ravel()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), seen=st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_equals_a_literal_loop(seed: int, seen: float) -> None:
    rng = np.random.default_rng(seed)
    labels = space(rng, int(rng.integers(1, 7)), int(rng.integers(1, 8)), seen)
    states, objects = rng.standard_normal((len(labels.states), 4)), rng.standard_normal((len(labels.objects), 5))
    states[0] = 0
    np.testing.assert_allclose(feasibility(states, objects, labels), literal(states, objects, labels), atol=1e-12)


def test_the_size_of_the_largest_data_set() -> None:
    rng = np.random.default_rng(0)
    labels = space(rng, 413, 674, 0.02)
    found = feasibility(rng.standard_normal((413, 300)), rng.standard_normal((674, 300)), labels)
    assert found.shape == (413 * 674,) and np.isinf(found).sum() == labels.pairs["train"].size


def test_vectors_that_do_not_fit_are_refused() -> None:
    labels = space(np.random.default_rng(0), 3, 4, 0.5)
    with pytest.raises(DuplexError, match="3 states need"):
        feasibility(np.ones((2, 5)), np.ones((4, 5)), labels)
    with pytest.raises(DuplexError, match="4 objects need"):
        feasibility(np.ones((3, 5)), np.full((4, 5), np.nan), labels)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 2))
def test_all_thresholds_from_one_pass(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    labels = space(rng, 5, 6, 0.4)
    found = feasibility(rng.standard_normal((5, 3)), rng.standard_normal((6, 3)), labels)
    seen, target = labels.seen, rng.integers(0, 30, 40)
    if not seen[target].any() or seen[target].all():
        return
    scores = rng.standard_normal((40, 30)).astype(np.float32)
    scores[np.arange(40), target] += 1
    steps = thresholds(found, seen, 50)
    assert steps.size == 50 and steps[0] == found[~seen].min() and steps[-1] == found[~seen].max()
    chosen = choose_threshold(Evidence(target, seen, bucket=buckets(found, steps), k=k).add(scores), steps, k)
    for step, auc in zip(steps, chosen.auc, strict=True):
        masked = np.where(found >= step, scores, -np.inf)
        assert auc == pytest.approx(measure(Evidence(target, seen, k=k).add(masked).rivals(), k, rounds=0).auc)
    assert chosen.value == steps[np.argmax(chosen.auc)]


def test_the_smallest_threshold_keeps_everything_and_equals_go_to_it() -> None:
    rng = np.random.default_rng(0)
    labels = space(rng, 4, 4, 0.5)
    seen = labels.seen
    found = np.where(seen, np.inf, 0.25)
    steps = thresholds(found, seen)
    assert (buckets(found, steps)[~seen] == 0).all()
    target = np.arange(16)
    chosen = choose_threshold(
        Evidence(target, seen, bucket=buckets(found, steps)).add(rng.standard_normal((16, 16))), steps
    )
    assert chosen.value == 0.25 and np.ptp(chosen.auc) == 0


def test_what_cannot_be_chosen_is_said() -> None:
    labels = space(np.random.default_rng(0), 3, 3, 1.0)
    with pytest.raises(DuplexError, match="no composition is unseen"):
        thresholds(np.full(9, np.inf), labels.seen)
    seen = np.arange(9) < 5
    found = np.linspace(0, 1, 9)
    steps = thresholds(found, seen)
    evidence = Evidence([0, 1], seen, bucket=buckets(found, steps)).add(np.eye(9)[:2])
    with pytest.raises(DuplexError, match="both seen and unseen validation images"):
        choose_threshold(evidence, steps)


def test_a_composition_as_feasible_as_the_threshold_passes_it() -> None:
    """`f >= T`, not `f > T`: the largest threshold leaves the most feasible composition in."""
    steps = np.array([-0.5, 0.0, 0.25, 0.5])
    feasible = np.array([-0.5, 0.25, 0.2, 0.5, 0.6, -0.6])
    bucket = buckets(feasible, steps)
    for place, step in enumerate(steps):
        passing = steps.size - place  # buckets 0 .. that pass it
        assert ((bucket < passing) == (feasible >= step)).all()
