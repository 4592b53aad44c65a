"""The share of new pairs is estimated as by hand, from mixtures of known groups, and answers follow at any share."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duplex.evaluation.answered import SHARES, GroupAnswers
from duplex.evaluation.new_share import ENOUGH, LEAST, estimate_share
from duplex.evaluation.probabilities import Confidence, UnseenMass
from duplex.labels import LabelSpace

MASS = {"seen": 0.2, "unseen": 0.7, "seen_error": 0.01, "unseen_error": 0.02}
C = 12
SEEN = np.arange(C) < 8
LABELS = LabelSpace(
    tuple(f"state{m}" for m in range(3)), tuple(f"object{n}" for n in range(4)),
    {"train": np.flatnonzero(SEEN), "val": np.arange(8, 10), "test": np.arange(10, 12)},
)  # fmt: skip


DIGITS = 6e-5  # estimates are rounded to four


def by_hand(q: list[float], mass: dict[str, float], stored: float) -> tuple[float, float]:
    """Share and standard error, image by image."""
    n = len(q)
    mean = sum(q) / n
    variance = sum((value - mean) ** 2 for value in q) / (n - 1)
    gap = mass["unseen"] - mass["seen"]
    s = min(1.0, max(0.0, (mean - mass["seen"]) / gap))
    of_means = (1 - s) ** 2 * mass["seen_error"] ** 2 + s**2 * mass["unseen_error"] ** 2
    weight = 1.0 if n >= 50 else (n - 1) / 49
    share = weight * s + (1 - weight) * stored
    return min(0.99, max(0.01, share)), weight * (variance / n + of_means) ** 0.5 / gap


@given(st.lists(st.floats(0, 1), min_size=2, max_size=70), st.floats(0.02, 0.9))
def test_the_estimate_is_that_by_hand(q, stored):
    found = estimate_share(np.array(q), MASS, stored)
    assert (found.value, found.error) == pytest.approx(by_hand(q, MASS, stored), abs=DIGITS)


@given(st.integers(0, 60), st.integers(0, 60), st.randoms(use_true_random=False))
def test_a_mixture_of_two_known_groups_has_its_share_in_any_order(seen, unseen, random):
    """The images of each group have its mean, some above and some below."""
    if seen + unseen < ENOUGH // 2:
        return
    spread = np.array([0.1, -0.1])
    q = np.concatenate([np.tile(0.2 + spread, seen), np.tile(0.7 + spread, unseen)])
    found = estimate_share(q, MASS, 0.1)
    assert found.value == pytest.approx(np.clip(unseen / (seen + unseen), LEAST, 1 - LEAST), abs=DIGITS)
    shuffled = q.tolist()
    random.shuffle(shuffled)
    again = estimate_share(np.array(shuffled), MASS, 0.1)
    assert (again.value, again.error) == pytest.approx((found.value, found.error), abs=2 * DIGITS)


def test_one_image_gets_the_stored_share_and_few_images_a_part_of_the_estimate():
    assert estimate_share(np.array([0.9]), MASS, 0.25).value == 0.25
    values = [estimate_share(np.full(n, 0.7), MASS, 0.1).value for n in range(1, 61)]
    assert values == sorted(values)
    assert values[0] == 0.1
    assert values[ENOUGH - 1 :] == [1 - LEAST] * 11
    line = str(estimate_share(np.full(10, 0.7), MASS, 0.1))
    assert line.startswith("share of new pairs: 26.5 % ± ") and "10 images" in line and "the model's 10 %" in line


@pytest.mark.parametrize(
    ("mass", "reason"),
    [(None, "no means over validation images"), ({**MASS, "unseen": 0.24}, "cannot tell validation images")],
)
def test_without_means_that_differ_the_stored_share_is_used_and_said_why(mass, reason):
    found = estimate_share(np.linspace(0, 1, 100), mass, 0.1)
    assert (found.value, found.error) == (0.1, None)
    assert str(found).startswith("share of new pairs: 10 %, as stored") and reason in str(found)
    assert "\n" not in str(found)


def test_errors_of_the_means_are_those_over_pairs_if_these_are_larger():
    random = np.random.default_rng(0)
    pairs = np.repeat(np.arange(10), 20)
    own = random.uniform(0.2, 0.8, 10)[pairs]
    is_seen = pairs < 6
    found = UnseenMass.of(own, pairs, is_seen)
    assert found is not None
    means = [own[pairs == pair][0] for pair in range(6)]  # of pairs with equally many images
    assert found.seen == pytest.approx(np.mean(means), abs=1e-6)
    assert found.seen_error == pytest.approx(np.std(means, ddof=1) / np.sqrt(6), abs=1e-6)
    alone = random.random(200)
    other = UnseenMass.of(alone, np.arange(200), is_seen)
    assert other is not None
    assert other.unseen_error == pytest.approx(alone[~is_seen].std(ddof=1) / np.sqrt(80), abs=1e-6)


def test_there_are_no_means_without_images_of_both_kinds():
    q = np.linspace(0, 1, 6)
    assert UnseenMass.of(q, np.arange(6), np.ones(6, bool)) is None
    assert UnseenMass.of(q, np.arange(6), np.arange(6) < 5) is None


def test_a_confidence_keeps_its_means_and_older_ones_have_none():
    confidence = Confidence(2.0, 1.0, 0.1, {"open": UnseenMass(0.2, 0.7, 0.01, 0.02)})
    assert Confidence(**confidence.to_dict()) == confidence
    older = {key: value for key, value in confidence.to_dict().items() if key != "unseen_mass"}
    assert Confidence(**older) == replace(confidence, unseen_mass={})


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_answers_at_a_share_are_those_of_all_candidates_at_that_share(share):
    random = np.random.default_rng(1)
    scores = torch.from_numpy(random.normal(size=(60, C)) * 3)
    target = random.integers(0, C, 60)
    confidence = Confidence(1.3, 0.7)
    feasible = np.arange(C) != 9

    def posteriors(at: Confidence) -> np.ndarray:
        return at.log_posteriors(lambda x: x.softmax(1), scores, SEEN, feasible).exp().numpy()

    even = posteriors(confidence.even)
    groups = [np.where(mask, even, 0.0) for mask in (SEEN, ~SEEN)]
    answers = GroupAnswers(
        LABELS, np.arange(60), target,
        best=np.stack([group.argmax(1) for group in groups], 1),
        probability=np.stack([group.max(1) for group in groups], 1),
        unseen=groups[1].sum(1), mass=UnseenMass(**MASS),
    )  # fmt: skip
    expected = posteriors(replace(confidence, new_share=share))
    found = answers.at(share)
    np.testing.assert_array_equal(found.answer, expected.argmax(1))
    np.testing.assert_allclose(found.probability, expected.max(1), rtol=1e-9)
    table = answers.by_share()
    assert list(table) == ["stored", "estimated", "true"]
    estimate = estimate_share(groups[1].sum(1), MASS, 0.1)
    own = answers.at(estimate.value)
    assert table["estimated"]["error"] == estimate.error
    assert table["estimated"]["accuracy"] == pytest.approx(100 * np.mean(own.answer == target))
    assert table["true"]["new_share"] == pytest.approx(np.mean(target >= 8))
    assert "true" not in replace(answers, target=np.zeros(60, int)).by_share()
    assert list(replace(answers, mass=None).by_share()) == ["stored", "true"]


@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_the_balanced_share_has_the_highest_harmonic_mean_image_by_image(seed: int, images: int):
    random = np.random.default_rng(seed)
    target = random.integers(0, C, images)
    best = np.stack([random.integers(0, 8, images), random.integers(8, C, images)], 1)
    best[::2, 0] = np.where(target < 8, target, best[:, 0])[::2]
    best[::3, 1] = np.where(target >= 8, target, best[:, 1])[::3]
    unseen = random.uniform(size=images)
    probability = np.stack([1 - unseen, unseen], 1) * random.uniform(0.2, 1, (images, 2))
    answers = GroupAnswers(LABELS, np.arange(images), target, best, probability, unseen)

    def mean(share: float) -> float:
        right: dict[bool, list[bool]] = {True: [], False: []}
        for image in range(images):
            odds = (1 - share) * probability[image, 0], share * probability[image, 1]
            right[target[image] < 8].append(best[image, int(odds[1] > odds[0])] == target[image])
        seen, new = (100 * float(np.mean(each)) if each else 0.0 for each in right.values())
        return 2 * seen * new / (seen + new) if seen + new else 0.0

    means = [mean(share) for share in SHARES]
    assert mean(answers.balanced_share) == pytest.approx(max(means))
    assert answers.at(answers.balanced_share).harmonic_mean == pytest.approx(max(means))
