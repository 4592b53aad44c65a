"""The closed form against twins with plain loops and dense matrices, and with very few images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError
from duplex.methods import gaussian
from duplex.methods.gaussian import (
    ClassStatistics,
    ClosedForm,
    FitSettings,
    LinearDiscriminant,
    LowRankWordSimilarities,
    NormalEquations,
    PairMeans,
    _fit_means,
    oas_shrinkage_weight,
    shared_whitening,
)
from tests.methods import twin_closed_form as twin


def world(seed: int = 0, m: int = 4, n: int = 3, d: int = 5, images: int = 60, pairs: int = 8):
    """Return unit features about composed means, their compositions, m and n; `pairs` compositions have images."""
    rng = np.random.default_rng(seed)
    some = rng.permutation(m * n)[:pairs]
    own = np.r_[some, rng.choice(some, max(images - len(some), 0))]
    a, b = rng.standard_normal((m, d)), rng.standard_normal((n, d))
    z = a[own // n] + b[own % n] + rng.standard_normal((len(own), d)) * rng.uniform(0.2, 1, d)
    return torch.nn.functional.normalize(torch.from_numpy(z), dim=-1), torch.from_numpy(own), m, n


def fitted(*args, options: FitSettings = FitSettings(), **kwargs) -> ClosedForm:
    z, own, m, n = world(*args, **kwargs)
    return ClosedForm.fit(ClassStatistics.of(z, own, m, n), options)


def seen_means(z: torch.Tensor, own: torch.Tensor, m: int, n: int) -> PairMeans:
    statistics = ClassStatistics.of(z, own, m, n)
    groups = statistics.by_pair()
    return PairMeans(statistics.state_of, statistics.object_of, groups.counts, groups.means, (m, n))


def every(model: ClosedForm) -> torch.Tensor:
    return torch.arange(model.shape[0] * model.shape[1])


def close(found: torch.Tensor, wanted, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found.numpy(), np.asarray(wanted), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [0, 1 << 14], ids=["outer sums", "rows"])
def test_scores_equal_the_twins(rows: int) -> None:
    z, own, m, n = world()
    new = world(seed=1)[0][:7]
    model = ClosedForm.fit(ClassStatistics.of(z, own, m, n), FitSettings(shrinkage=4.0))
    wanted = twin.scores(z.numpy(), own.numpy(), new.numpy(), m, n, 1 / 4, 0.1)
    found = model.scorer(every(model), rows)(new)
    shift = np.asarray(wanted[:, :1] - found[:, :1].numpy())  # shared by all compositions
    close(found, wanted - shift, 1e-8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5), st.integers(2, 7), st.booleans())
def test_scores_do_not_depend_on_the_other_candidates(seed: int, m: int, n: int, d: int, prior: bool) -> None:
    rng = np.random.default_rng(seed)
    model = fitted(
        seed, m, n, d, images=int(rng.integers(m * n, 40 + m * n)), pairs=int(rng.integers(1, m * n + 1)),
        options=FitSettings(prior=prior),
    )  # fmt: skip
    new, columns = world(seed + 1, m, n, d)[0], torch.from_numpy(rng.permutation(m * n)[: rng.integers(1, m * n + 1)])
    whole = model.scorer(every(model), 0)(new)
    assert torch.isfinite(whole).all()
    close(model.scorer(columns, 0)(new), whole[:, columns], 1e-8)
    close(model.scorer(columns)(new), whole[:, columns], 1e-8)


@pytest.mark.parametrize("prior", [True, False])
def test_rows_and_offsets_give_the_scores(prior: bool) -> None:
    """`g_c(z) = (z W - mu) . h_c + offset_c`, as in an export."""
    z, own, m, n = world()
    model = ClosedForm.fit(ClassStatistics.of(z, own, m, n), FitSettings(prior=prior))
    new, columns = world(seed=1)[0][:7], torch.tensor([11, 0, 5, 3])
    rows, offset = model.linear(columns)
    close((new @ model.whitening - model.additive.mean) @ rows.T + offset, model.scorer(columns)(new))
    seen = torch.isin(columns, own)
    counts = torch.tensor([(own == c).sum().clamp(min=1) for c in columns]).double()
    unprior = ClosedForm.fit(ClassStatistics.of(z, own, m, n), FitSettings(prior=False)).linear(columns)[1]
    close(offset - unprior, torch.where(seen, counts.log(), 0.0) * prior)


def test_group_posteriors_follow_from_bayes_rule() -> None:
    z, own, m, n = world()
    statistics = ClassStatistics.of(z, own, m, n)
    for groups, labels in ((statistics.by_state(), own // n), (statistics.by_object(), own % n)):
        inverse = np.linalg.inv(twin.covariance(z.numpy(), labels.numpy()))
        logits = np.full((len(z), len(groups.counts)), -np.inf)
        for g in set(labels.tolist()):
            mean = z[labels == g].mean(0).numpy()
            logits[:, g] = [-0.5 * (x - mean) @ inverse @ (x - mean) for x in z.numpy()]
            logits[:, g] += np.log((labels == g).sum().item())
        close(LinearDiscriminant.fit(groups)(z), torch.from_numpy(logits).log_softmax(-1), 1e-8)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 20))
def test_group_means_are_those_of_their_images(seed: int, images: int) -> None:
    """A state or object without images has the mean 0."""
    z, own, m, n = world(seed, images=images, pairs=4)
    statistics = ClassStatistics.of(z, own, m, n)
    for groups, labels, names in (
        (statistics.by_pair(), own, statistics.pairs.tolist()),
        (statistics.by_state(), own // n, range(m)),
        (statistics.by_object(), own % n, range(n)),
    ):
        for mean, count, name in zip(groups.means, groups.counts.tolist(), names, strict=True):
            members = z[labels == name]
            assert count == len(members)
            close(mean, members.mean(0) if len(members) else torch.zeros(z.shape[1]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 10), st.floats(0.01, 5))
def test_effects_equal_the_twins(seed: int, v: float, ridge: float) -> None:
    z, own, m, n = world(seed)
    found = NormalEquations(seen_means(z, own, m, n), v, ridge).solve()[0]
    close(
        torch.cat([found.mean[None], found.state, found.object]),
        twin.effects(z.numpy(), own.numpy(), m, n, v, ridge),
        1e-7,
    )


def test_the_likelihood_is_the_dense_gaussians() -> None:
    z, own, m, n = world()
    seen = seen_means(z, own, m, n)

    def dense(v: float) -> float:
        return float(twin.log_likelihood(seen.means.numpy(), own.unique().tolist(), seen.counts.numpy(), m, n, v, 0.1))

    difference = [NormalEquations(seen, v, 0.1).log_likelihood() - dense(v) for v in (0.001, 0.1, 3.0)]
    assert max(difference) - min(difference) < 1e-8


@pytest.mark.parametrize("seed", range(6))
def test_the_chosen_variance_is_a_maximum_to_an_eighth_of_a_decade(seed: int) -> None:
    z, own, m, n = world(seed, images=int(30 + 200 * seed))
    seen = seen_means(z, own, m, n)
    seen = replace(seen, means=seen.means * 3**seed)
    v = gaussian.interaction_variance(seen, 0.1)
    height = NormalEquations(seen, v, 0.1).log_likelihood()
    for step in (0.125, 0.25, 0.5, 1.0):
        for moved in (v * 10**step, v / 10**step):
            assert not 10**-4.9 < moved < 10**1.9 or NormalEquations(seen, moved, 0.1).log_likelihood() <= height


def test_confounded_effects_are_separated() -> None:
    m, n = 2, 3
    looks = torch.eye(5)
    own = torch.tensor([0] * 30 + [1] * 2 + [4] * 30 + [5] * 2)  # state 0 is mostly object 0, state 1 mostly object 1
    noise = 1e-3 * torch.randn(len(own), 5, generator=torch.Generator().manual_seed(0))
    statistics = ClassStatistics.of(looks[own // n] + looks[m + own % n] + noise, own, m, n)
    wanted = looks[0] + looks[m + 2]  # state 0 with object 2, which no image shows
    model = ClosedForm.fit(statistics, FitSettings(ridge=1e-6))
    composed = (model.prototypes(torch.tensor([2])) @ torch.linalg.inv(model.whitening))[0]
    assert (composed - wanted).norm() < 0.01
    naive = statistics.by_state().means[0] + statistics.by_object().means[2] - statistics.sums.sum(0) / len(own)
    assert (naive - wanted).norm() > 0.5


@pytest.mark.parametrize("degenerate", ["repeated dimensions", "identical images"])
def test_a_singular_covariance_gives_finite_scores(degenerate: str) -> None:
    z, own, m, n = world()
    images = torch.cat([z, z[:, :2]], dim=1) if degenerate == "repeated dimensions" else z[:1].expand(len(z), -1)
    model = ClosedForm.fit(ClassStatistics.of(images, own, m, n))
    assert torch.isfinite(model.scorer(every(model))(images)).all()


def test_a_state_without_images_has_no_effect() -> None:
    z, own, m, n = world(pairs=3)
    statistics = ClassStatistics.of(z, own, m, n)
    model, unseen = ClosedForm.fit(statistics), torch.tensor([m not in statistics.state_of for m in range(m)])
    assert unseen.any()
    assert model.additive.state[unseen].abs().max() == 0
    posterior = LinearDiscriminant.fit(statistics.by_state())
    assert not posterior.weight[:, unseen].any() and not posterior.offset[unseen].any()  # one image at the overall mean
    assert torch.isfinite(posterior(z)).all()


def test_a_fit_without_images_is_refused() -> None:
    with pytest.raises(DuplexError, match="no readable training image"):
        ClosedForm.fit(ClassStatistics.of(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 2, 2))


def test_a_given_variance_is_kept_while_the_other_is_chosen() -> None:
    z, own, m, n = world(images=80)[:4]
    means = seen_means(z, own, m, n)
    words = torch.randn(m, 6, dtype=torch.float64), torch.randn(n, 6, dtype=torch.float64)
    _, interactions, v, tau = _fit_means(means, FitSettings(shrinkage=2.0), words)
    assert interactions is not None and v == 0.5 and tau > 0
    _, _, v, tau = _fit_means(means, FitSettings(interactions=0.25), words)
    assert v > 0 and tau == 0.25


def test_statistics_keep_their_pairs_in_a_larger_label_space() -> None:
    z, own, m, n = world()[:4]
    statistics = ClassStatistics.of(z, own, m, n)
    states, objects = torch.arange(m) + 1, torch.arange(n) * 2
    larger = statistics.relabelled(states, objects, (m + 2, 2 * n))
    wanted = [int(states[c // n]) * 2 * n + int(objects[c % n]) for c in statistics.pairs.tolist()]
    assert larger.pairs.tolist() == wanted and (larger.states, larger.objects) == (m + 2, 2 * n)
    assert torch.equal(larger.sums, statistics.sums)


def test_oas_approaches_scikit_learns_in_many_dimensions() -> None:
    """scikit-learn drops the `2 / d` of Eq. 23, which matters for small d."""
    from sklearn.covariance import oas as theirs

    x = np.random.default_rng(0).standard_normal((150, 100)) * np.linspace(0.2, 2, 100)
    sample = torch.from_numpy(x.T @ x / len(x))
    assert oas_shrinkage_weight(sample, len(x)) == pytest.approx(theirs(x, assume_centered=True)[1], abs=0.005)


@pytest.mark.parametrize("images", [400, 12, 10, 9, 8, 5, 3], ids=lambda images: f"{images} images of 8 pairs")
def test_whitening_gives_an_identity_covariance(images: int) -> None:
    """The covariance is about each pair's mean if any pair has two images, else about the mean of all."""
    z, own, m, n = world(images=images, pairs=min(images, 8))
    whitening = shared_whitening(ClassStatistics.of(z, own, m, n).by_pair())
    close(whitening.T @ torch.from_numpy(twin.covariance(z.numpy(), own.numpy())) @ whitening, np.eye(5), 1e-7)


@pytest.mark.parametrize("images", [1, 20])
def test_identical_images_get_the_largest_variance_of_unit_features(images: int) -> None:
    z, own, m, n = world(images=images, pairs=1)
    whitening = shared_whitening(ClassStatistics.of(z[:1].expand(images, -1), own, m, n).by_pair())
    close(whitening.T @ whitening, 5 * np.eye(5))


V, TAU, RIDGE = 0.05, 0.3, 0.1


def words(m: int, n: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, 6, generator=g), torch.randn(n, 6, generator=g)


def seen_pairs(m: int = 5, n: int = 4, pairs: int = 13) -> PairMeans:
    return seen_means(*world(m=m, n=n, images=80, pairs=pairs))


def kernel(embedded: torch.Tensor) -> np.ndarray:
    """`exp(-|t - t'|^2 / (2 l median))` of unit vectors, entry by entry."""
    t = [row / np.linalg.norm(row) for row in embedded.double().numpy()]
    apart = np.array([[((a - b) ** 2).sum() for b in t] for a in t])
    median = torch.from_numpy(apart[apart > 1e-12]).median().item()
    return np.exp(-0.5 * apart / (gaussian.LENGTH * median))


def covariances(seen: PairMeans, k_s: np.ndarray, k_o: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return covariances of all pairs' means with the seen ones' [M N, P], and of the observed means [P, P]."""
    m, n = seen.shape
    s, o = seen.states.numpy(), seen.objects.numpy()
    cross = np.array(
        [
            [(a == p) / RIDGE + (b == q) / RIDGE + TAU * k_s[a, p] * k_o[b, q] for p, q in zip(s, o, strict=True)]
            for a in range(m)
            for b in range(n)
        ]
    )
    return cross, cross[s * n + o] + np.diag(V + 1 / seen.counts.numpy())


@pytest.mark.parametrize("rank", [1, 3, 6, 9])
def test_a_kernel_of_low_rank_is_the_nearest_one(rank: int) -> None:
    states, _ = words(6, 4)
    values, vectors = np.linalg.eigh(kernel(states))
    nearest = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
    u = gaussian.kernel_factor(states, rank)
    assert u.shape == (6, min(rank, 6))
    np.testing.assert_allclose((u @ u.T).numpy(), nearest, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_chosen_variances_are_a_maximum_to_an_eighth_of_a_decade(seed: int) -> None:
    seen, kernels = seen_pairs(), LowRankWordSimilarities.of_words(*words(5, 4, seed))

    def height(v: float, tau: float) -> float:
        return NormalEquations(seen, v, RIDGE, kernels, tau).log_likelihood()

    v, tau = gaussian.choose_variances(seen, kernels, RIDGE)
    for step in (10**0.125, 10**-0.125):
        for moved in ((v * step, tau), (v, tau * step)):
            inside = all(1e-6 <= part <= 1e2 for part in moved)
            assert not inside or height(*moved) <= height(v, tau)


def test_means_equal_the_gaussian_processes() -> None:
    seen = seen_pairs()
    m, n = seen.shape
    embedded = words(m, n)
    cross, covariance = covariances(seen, *map(kernel, embedded))
    inverse, x, one = np.linalg.inv(covariance), seen.means.numpy(), np.ones(len(covariance))
    mu = one @ inverse @ x / (one @ inverse @ one)  # a flat prior's mean
    wanted = mu + cross @ inverse @ (x - mu)
    settings = FitSettings(ridge=RIDGE, shrinkage=1 / V, interactions=TAU)
    additive, mixed, _, _ = _fit_means(seen, settings, embedded)
    assert mixed is not None
    pairs = torch.arange(m * n)
    found = additive.of_pairs(pairs // n, pairs % n) + mixed.of_pairs(pairs // n, pairs % n)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-8)


def test_the_likelihood_equals_the_gaussian_processes() -> None:
    seen = seen_pairs()
    embedded = words(*seen.shape)
    kernels = LowRankWordSimilarities.of_words(*embedded)

    def dense(tau: float) -> float:
        s, o = seen.states.numpy(), seen.objects.numpy()
        k_s, k_o = map(kernel, embedded)
        _, covariance = covariances(seen, k_s, k_o)
        covariance = covariance + (tau - TAU) * k_s[np.ix_(s, s)] * k_o[np.ix_(o, o)]
        inverse, one, x = np.linalg.inv(covariance), np.ones((len(covariance), 1)), seen.means.numpy()
        flat = (one.T @ inverse @ one).item()
        left = inverse - inverse @ one @ one.T @ inverse / flat
        determinant = np.linalg.slogdet(covariance)[1] + np.log(flat)
        return float(-0.5 * np.trace(x.T @ left @ x) - x.shape[1] / 2 * determinant)

    difference = [
        NormalEquations(seen, V, RIDGE, kernels, tau).log_likelihood() - dense(tau) for tau in (0.01, 0.3, 2.0)
    ]
    assert max(difference) - min(difference) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outer_sums_equal_products_with_prototypes(dtype: torch.dtype) -> None:
    z, own, m, n = world(m=6, n=5, d=9, images=200, pairs=17)
    model = ClosedForm.fit(ClassStatistics.of(z, own, m, n), words=words(m, n)).to(dtype)
    assert model.interactions is not None
    wanted = model.scorer(every(model))(z)
    some = torch.tensor([4, 29, 0, 11])
    allowed = (1e-9 if dtype == torch.float64 else 1e-5) * wanted.abs().max()
    assert (model.scorer(every(model), 0)(z) - wanted).abs().max() < allowed
    assert (model.scorer(some, 0)(z) - wanted[:, some]).abs().max() < allowed


def test_without_interactions_words_change_nothing() -> None:
    z, own, m, n = world()
    statistics = ClassStatistics.of(z, own, m, n)
    plain, off = ClosedForm.fit(statistics), ClosedForm.fit(statistics, FitSettings(interactions=0.0), words(m, n))
    assert off.interactions is None
    assert torch.equal(plain.scorer(every(plain))(z), off.scorer(every(off))(z))


THIN = {
    "one image a pair": {"images": 8, "pairs": 8}, "one pair": {"images": 9, "pairs": 1},
    "one image": {"images": 1, "pairs": 1}, "one state": {"m": 1, "n": 5, "pairs": 3},
    "one object": {"m": 5, "n": 1, "pairs": 3}, "one composition in all": {"m": 1, "n": 1, "pairs": 1},
    "fewer images than dimensions": {"images": 12, "d": 40}, "one dimension": {"d": 1},
}  # fmt: skip


@pytest.mark.parametrize("case", THIN.values(), ids=THIN.keys())
@pytest.mark.parametrize("shared", [False, True], ids=["effects alone", "interactions"])
def test_few_images_give_finite_scores(case: dict, shared: bool) -> None:
    z, own, m, n = world(**case)
    model = ClosedForm.fit(ClassStatistics.of(z, own, m, n), words=words(m, n) if shared else None)
    assert torch.isfinite(model.scorer(every(model), 0)(world(seed=2, **case)[0])).all()
