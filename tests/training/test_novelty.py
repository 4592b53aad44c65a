"""The distance to the nearest pair's mean, and the share of validation images that pass."""

import numpy as np
import pytest
import torch

from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods.gaussian import ClassStatistics, shared_whitening
from duplex.training.novelty import NoveltyDetector

LABELS = LabelSpace.from_pairs(
    {"train": [("a", "x"), ("b", "y"), ("a", "y")], "val": [("b", "x")], "test": [("b", "x")]}
)
WIDTH = 12


def examples(images: int, seed: int, scale: float = 0.3) -> Examples:
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(LABELS.size, WIDTH))
    pairs = random.choice(LABELS.pairs["train"], images)
    z = centres[pairs] + scale * random.normal(size=(images, WIDTH)) * np.linspace(0.2, 2, WIDTH)
    return Examples(np.arange(images), {"cls": torch.from_numpy(z).float()}, torch.from_numpy(pairs))


def test_distances_are_those_of_the_inverse_covariance_to_pairs_means_and_to_sums_of_their_words() -> None:
    train, val = examples(200, 1), examples(50, 2)
    model = NoveltyDetector.fit(train, val, LABELS)
    z, pairs = (
        (torch.nn.functional.normalize(x, dim=1).double().numpy() for x in (train.cls, val.cls)),
        train.compositions,
    )
    z_train, z_val = z
    whitening = shared_whitening(ClassStatistics.of(torch.from_numpy(z_train), pairs, 2, 2).by_pair()).numpy()
    inverse = whitening @ whitening.T
    means = [z_train[pairs.numpy() == pair].mean(0) for pair in np.unique(pairs)]
    back = np.linalg.pinv(whitening)
    sums = [(u + v) @ back for u in model.states.double().numpy() for v in model.objects.double().numpy()]
    naive = [min(np.sqrt((row - mean) @ inverse @ (row - mean)) for mean in means + sums) for row in z_val]
    np.testing.assert_allclose(model.distances(val.cls).numpy(), naive, rtol=1e-3)


def test_a_new_pair_whose_words_add_up_is_nearer_than_its_nearest_seen_pair() -> None:
    random = np.random.default_rng(0)
    states, objects = random.normal(size=(4, WIDTH)), 20 + random.normal(size=(5, WIDTH))  # lengths are alike
    everything = [(f"s{m}", f"o{n}") for m in range(4) for n in range(5)]
    labels = LabelSpace.from_pairs({"train": everything[:-1], "val": everything[-1:], "test": everything[-1:]})
    pairs = random.choice(19, 400)

    def features(which: np.ndarray) -> torch.Tensor:
        z = states[which // 5] + objects[which % 5] + 0.1 * random.normal(size=(len(which), WIDTH))
        return torch.from_numpy(z).float()

    train = Examples(np.arange(400), {"cls": features(pairs)}, torch.from_numpy(pairs))
    model = NoveltyDetector.fit(train, train, labels)
    new = features(np.full(50, 19))
    x = torch.nn.functional.normalize(new, dim=1) @ model.whitening
    to_seen = torch.cdist(x, model.means).amin(1)
    assert float(model.distances(new).median()) < 0.5 * float(to_seen.median())


def test_words_without_images_have_no_part_in_sums() -> None:
    labels = LabelSpace.from_pairs(
        {"train": [("a", "x"), ("b", "y"), ("a", "y")], "val": [("c", "x")], "test": [("b", "z")]}
    )
    rows = examples(200, 1)
    words = [LABELS.states[i] for i in LABELS.state_of(rows.compositions.numpy())]
    things = [LABELS.objects[i] for i in LABELS.object_of(rows.compositions.numpy())]
    places = [labels.states.index(s) * 3 + labels.objects.index(o) for s, o in zip(words, things, strict=True)]
    renumbered = Examples(rows.rows, rows.inputs, torch.tensor(places))
    few, more = (NoveltyDetector.fit(r, r, names) for r, names in ((rows, LABELS), (renumbered, labels)))
    assert more.states.shape == (2, WIDTH) and more.objects.shape == (2, WIDTH)
    torch.testing.assert_close(few.distances(rows.cls), more.distances(rows.cls))


def unseen(images: int, seed: int, away: float) -> Examples:
    """Images of an unseen pair, farther from the training pairs."""
    other = examples(images, seed)
    return Examples(other.rows, {"cls": other.cls + away}, torch.full((images,), int(LABELS.pairs["val"][0])))


@pytest.mark.parametrize("away", [0, 0.5, 4])
@pytest.mark.parametrize("share", [0.5, 0.85, 0.95, 1.0])
def test_the_stated_share_of_validation_images_passes_if_one_in_ten_is_of_an_unseen_pair(share, away) -> None:
    parts = examples(100, 2), unseen(300, 3, away)
    cls, compositions = (torch.cat([getattr(part, name) for part in parts]) for name in ("cls", "compositions"))
    model = NoveltyDetector.fit(
        examples(200, 1), Examples(np.arange(400), {"cls": cls}, compositions), LABELS, passing=share
    )
    passes = model.distances(cls) <= model.threshold  # in one batch, as in `fit`
    passing = [float(part.double().mean()) for part in passes.split([100, 300])]
    assert share - 1e-9 <= 0.9 * passing[0] + 0.1 * passing[1] <= share + 0.02


@pytest.mark.parametrize("share", [0.5, 0.95, 1.0])
def test_without_images_of_unseen_pairs_all_count_alike(share) -> None:
    val = examples(100, 2)
    model = NoveltyDetector.fit(examples(200, 1), val, LABELS, passing=share)
    passing = float((model.distances(val.cls) <= model.threshold).double().mean())
    assert share <= passing <= share + 0.02


def drawn(seed: int = 5) -> torch.Tensor:
    """Features of 30 drawn images of no pair, ten of a kind."""
    centres = np.random.default_rng(seed).normal(size=(3, WIDTH))
    z = np.repeat(centres, 10, 0) + 0.1 * np.random.default_rng(6).normal(size=(30, WIDTH))
    return torch.from_numpy(z).float()


def test_drawn_images_add_a_term_of_the_same_mean_and_variance() -> None:
    train, val = examples(200, 1), examples(50, 2)
    plain = NoveltyDetector.fit(train, val, LABELS)
    model = NoveltyDetector.fit(train, val, LABELS, drawn())
    x, n = (torch.nn.functional.normalize(z, dim=1).numpy() @ model.whitening.numpy() for z in (val.cls, drawn()))
    d = plain.distances(val.cls).numpy()
    excess = np.array([near - min(np.linalg.norm(row - other) for other in n) for near, row in zip(d, x, strict=True)])
    second = d.mean() + d.std() * (excess - excess.mean()) / excess.std()
    np.testing.assert_allclose(model.distances(val.cls).numpy(), np.maximum(d, second), rtol=1e-3)
    assert (model.distances(val.cls) <= model.threshold).double().mean() >= 0.95


def test_images_like_the_drawn_ones_are_farther_than_most_although_they_are_near_a_pair() -> None:
    train, val = examples(400, 1), examples(200, 2)
    plain = NoveltyDetector.fit(train, val, LABELS)
    near = val.cls[plain.distances(val.cls).argsort()[100]]  # farther than half of the validation images
    noise = 0.001 * torch.from_numpy(np.random.default_rng(7).normal(size=(10, WIDTH))).float()
    model = NoveltyDetector.fit(train, val, LABELS, torch.cat([near + noise, drawn()[10:]]))
    nearer = [float((each.distances(val.cls) < each.distances(near[None])).double().mean()) for each in (plain, model)]
    assert nearer[0] == pytest.approx(0.5, abs=0.01) and nearer[1] > 0.9
    assert model.refused.tolist() == [0, 1, 1], "a kind has no part in its own rate"


def test_the_tensors_of_a_detector_make_it_again() -> None:
    model = NoveltyDetector.fit(examples(200, 1), examples(50, 2), LABELS, drawn())
    again = NoveltyDetector.from_tensors(model.tensors(), torch.device("cpu"))
    cls = examples(20, 3).cls
    assert again is not None and torch.equal(model.distances(cls), again.distances(cls))
