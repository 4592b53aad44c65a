import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.labels import LabelSpace
from duplex.methods.word_feasibility import feasibility


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
def test_feasibility_equals_a_literal_loop(seed: int, seen: float) -> None:
    rng = np.random.default_rng(seed)
    labels = space(rng, int(rng.integers(1, 7)), int(rng.integers(1, 8)), seen)
    states, objects = rng.standard_normal((len(labels.states), 4)), rng.standard_normal((len(labels.objects), 5))
    states[0] = 0
    np.testing.assert_allclose(feasibility(states, objects, labels), literal(states, objects, labels), atol=1e-12)
