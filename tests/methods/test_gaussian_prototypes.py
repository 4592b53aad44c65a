"""The closed form against a twin with plain loops, and with very few images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError
from duplex.methods import gaussian
from duplex.methods.gaussian import ClassStatistics, ClosedForm, FitSettings, GroupPosterior, PairMeans, _fit_means
from tests.methods import twin_closed_form as twin
from tests.pretended import Pretended


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


# -- scores ---------------------------------------------------------------------------------------------------------


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


def test_outer_sums_in_single_precision_equal_the_dense_twins_to_1e_5() -> None:
    z, own, m, n = world(3, m=9, n=7, d=24, images=900, pairs=40)
    model = ClosedForm.fit(ClassStatistics.of(z, own, m, n), FitSettings(shrinkage=20.0)).to(torch.float32)
    new = world(4, m=9, n=7, d=24)[0][:20]
    wanted = twin.scores(z.numpy(), own.numpy(), new.numpy(), m, n, 1 / 20, 0.1)
    found = model.scorer(every(model), 0)(new.float())
    assert found.dtype == torch.float32
    apart = found.numpy() - wanted
    assert np.ptp(apart, axis=1).max() < 1e-5 * np.abs(wanted).max()  # a constant for all compositions is free


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
        close(GroupPosterior.fit(groups)(z), torch.from_numpy(logits).log_softmax(-1), 1e-8)


# -- statistics -----------------------------------------------------------------------------------------------------


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


def test_features_that_are_not_finite_are_refused() -> None:
    z, own, m, n = world()
    z[3, 1], z[9, 0] = torch.nan, torch.inf
    with pytest.raises(DuplexError, match=r"2 of 60 feature rows are not finite \(the first is row 3\)"):
        ClassStatistics.of(z, own, m, n)


@pytest.mark.parametrize("beyond", [12, -1])
def test_labels_that_do_not_fit_are_refused(beyond: int) -> None:
    z, own, m, n = world()
    with pytest.raises(DuplexError, match="from 0 to 11, for 4 x 3"):
        ClassStatistics.of(z, torch.cat([own[1:], torch.tensor([beyond])]), m, n)


# -- the fit --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 10), st.floats(0.01, 5))
def test_effects_equal_the_twins(seed: int, v: float, ridge: float) -> None:
    z, own, m, n = world(seed)
    found = gaussian.fit_additive(seen_means(z, own, m, n), v, ridge)
    close(
        torch.cat([found.mean[None], found.state, found.object]),
        twin.effects(z.numpy(), own.numpy(), m, n, v, ridge),
        1e-7,
    )


def test_the_likelihood_is_the_dense_gaussians() -> None:
    z, own, m, n = world()
    seen = seen_means(z, own, m, n)

    def dense(v: float) -> float:
        pairs = own.unique().tolist()
        return float(twin.log_likelihood(seen.means.numpy(), pairs, seen.counts.numpy(), m, n, v, 0.1))

    difference = [gaussian.log_likelihood(seen, v, 0.1) - dense(v) for v in (0.001, 0.1, 3.0)]
    assert max(difference) - min(difference) < 1e-8


@pytest.mark.parametrize("seed", range(6))
def test_the_chosen_variance_is_a_maximum_to_an_eighth_of_a_decade(seed: int) -> None:
    z, own, m, n = world(seed, images=int(30 + 200 * seed))
    seen = seen_means(z, own, m, n)
    seen = replace(seen, means=seen.means * 3**seed)
    v = gaussian.interaction_variance(seen, 0.1)
    height = gaussian.log_likelihood(seen, v, 0.1)
    for step in (0.125, 0.25, 0.5, 1.0):
        for moved in (v * 10**step, v / 10**step):
            assert not 10**-4.9 < moved < 10**1.9 or gaussian.log_likelihood(seen, moved, 0.1) <= height


@pytest.mark.parametrize("v", [0.02, 0.5])
def test_the_variance_of_interactions_is_recovered(v: float) -> None:
    """With means drawn from the model, the estimate is within a factor of two of the true variance."""
    rng, (m, n, d) = np.random.default_rng(0), (12, 10, 60)
    pairs = np.sort(rng.permutation(m * n)[:80])
    counts = rng.integers(2, 60, len(pairs))
    a, b = rng.standard_normal((m, d)), rng.standard_normal((n, d))
    means = a[pairs // n] + b[pairs % n] + rng.standard_normal((len(pairs), d)) * np.sqrt(v + 1 / counts)[:, None]
    tensors: Any = [torch.from_numpy(x) for x in (pairs // n, pairs % n, counts.astype(float), means)]
    assert v / 2 < gaussian.interaction_variance(PairMeans(*tensors, (m, n)), 0.1) < 2 * v


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


# -- few images ---------------------------------------------------------------------------------------------


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
    log_p = GroupPosterior.fit(statistics.by_state())(z)
    assert (log_p[:, unseen] == -torch.inf).all()
    assert not torch.isnan(log_p).any()


def test_a_fit_without_images_is_refused() -> None:
    with pytest.raises(DuplexError, match="no readable training image"):
        ClosedForm.fit(ClassStatistics.of(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 2, 2))


# -- support ----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(1, 5), n=st.integers(1, 4), d=st.integers(1, 6))
def test_support_equals_the_twins(seed: int, m: int, n: int, d: int) -> None:
    pairs = int(np.random.default_rng(seed).integers(1, m * n + 1))
    model = fitted(seed, m, n, d, images=3 * pairs, pairs=pairs)
    a, b = model.additive.state.numpy(), model.additive.object.numpy()
    found = model.log_support()
    close(found, twin.support(a, b, model.seen.tolist(), model.counts.tolist()), 1e-8)
    assert found.shape == (m, n) and (found <= 1e-12).all()  # the log of a share


def test_support_is_the_same_on_an_accelerator(pretended: Pretended) -> None:
    model = fitted()
    there = model.to(torch.float64, pretended.name).log_support()
    assert there.device == torch.device(pretended.name)
    torch.testing.assert_close(there.cpu(), model.log_support())


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
