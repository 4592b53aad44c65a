"""Numbers of retrieval, of swapped factors and of clusters equal loops over images and pairs."""

from itertools import product
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.vectors import silhouette
from duplex.features.tokens import Examples
from duplex.methods.base import Inspectable
from duplex.report.retrieval import Retrieval, retrieval_numbers, swaps_of
from tests.methods.world import features, small_labels

LABELS = small_labels()
OWN = np.repeat(LABELS.candidates("closed", "test"), 3)  # three images a pair
TEXTS, VISUAL = features(LABELS.size, 3).float(), features(LABELS.size, 4).float()
SIGN = torch.tensor([1.0, -1.0]).repeat(TEXTS.shape[1])[: TEXTS.shape[1]]


def retrieval_of(z: torch.Tensor) -> Retrieval:
    test = Examples(np.arange(len(OWN)), {"cls": z}, torch.from_numpy(OWN))
    method = Inspectable(
        features=lambda inputs: 2 * inputs["cls"],
        semantic=lambda compositions: TEXTS[compositions],
        visual=lambda compositions: VISUAL[compositions],
        factors=lambda inputs: (inputs["cls"] + 1, inputs["cls"] * SIGN),
        text_space_features=lambda inputs: inputs["cls"].flip(1),
    )
    return Retrieval(method, LABELS, test)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@given(st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_precision_and_centres_equal_loops(seed: int):
    noisy = VISUAL[OWN] + 0.3 * features(len(OWN), seed).float()
    found = retrieval_numbers(retrieval_of(noisy))
    spaces = {"visual": (noisy, VISUAL), "semantic": (noisy.flip(1), TEXTS)}
    for kind, space in spaces.items():
        images, prototypes = (part.double().numpy() for part in space)
        hits, centres = [], []
        for pair in np.unique(OWN).tolist():
            order = sorted(range(len(OWN)), key=lambda row: -cosine(images[row], prototypes[pair]))
            hits.append(fmean(OWN[row] == pair for row in order[:4]))
            centres.append(cosine(unit(images[pair == OWN]).mean(0), prototypes[pair]))
        assert found[f"precision_{kind}"] == pytest.approx(100 * fmean(hits))
        assert found[f"centre_{kind}"] == pytest.approx(100 * fmean(centres), abs=1e-3)
    assert found["precision_visual"] > found["precision_semantic"]
    assert found["separation"] == pytest.approx(found["separation_frozen"], abs=1e-3)  # features differ by a factor


def test_swaps_leave_their_sources_out_and_count_words_at_lower_ranks():
    z = features(len(OWN), 9).float()
    retrieval = retrieval_of(z)
    swaps = swaps_of(retrieval)
    joined = np.concatenate([(z + 1).numpy(), (z * SIGN).numpy()], axis=1)
    states, objects = LABELS.state_of(OWN), LABELS.object_of(OWN)
    found, first, at_state, at_object = [], [], [], []
    for pair in np.unique(OWN).tolist():
        m, n = divmod(pair, len(LABELS.objects))
        a = [row for row in range(len(OWN)) if states[row] == m and objects[row] != n]
        b = [row for row in range(len(OWN)) if objects[row] == n and states[row] != m]
        if a and b:
            query = np.concatenate([(z + 1).numpy()[a[0]], (z * SIGN).numpy()[b[0]]])
            order = sorted(range(len(OWN)), key=lambda row: -cosine(query, joined[row]))
            others = [row for row in order if row not in (a[0], b[0])][:5]
            found.append(others)
            first.append(OWN[others[0]] == pair)
            at_state += [states[row] == m for row in others[2:]]
            at_object += [objects[row] == n for row in others[2:]]
    assert len(found) > 1 and swaps.rows.tolist() == found
    numbers = retrieval_numbers(retrieval)
    means = {"swap_first": first, "swap_state": at_state, "swap_object": at_object}
    for name, hits in means.items():
        assert numbers[name] == pytest.approx(100 * fmean(hits))


@given(st.integers(0, 2**16), st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_the_silhouette_equals_loops_over_all_distances(seed: int, groups: int):
    group = np.resize(np.arange(groups), 4 * groups)
    z = features(len(group), seed).double().numpy()
    scores = []
    for i in range(len(z)):
        mean = {}
        for other in range(groups):
            rows = [j for j in range(len(z)) if group[j] == other and j != i]
            mean[other] = fmean(1 - cosine(z[i], z[j]) for j in rows)
        a = mean.pop(int(group[i]))
        b = min(mean.values())
        scores.append((b - a) / max(a, b))
    assert silhouette(3 * z, group) == pytest.approx(fmean(scores), abs=1e-9)


@pytest.mark.parametrize(("semantic", "visual"), list(product([True, False], repeat=2))[1:])
def test_methods_without_both_kinds_of_prototypes_have_no_numbers(semantic: bool, visual: bool):
    prototypes = TEXTS.__getitem__
    method = Inspectable(lambda inputs: inputs["cls"], prototypes if semantic else None, prototypes if visual else None)
    test = Examples(np.arange(len(OWN)), {"cls": TEXTS[OWN]}, torch.from_numpy(OWN))
    assert retrieval_numbers(Retrieval(method, LABELS, test)) == {}
