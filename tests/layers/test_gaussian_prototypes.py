"""The closed form against a twin with plain loops, and at the edges where data run out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError
from duplex.layers import additive
from duplex.layers.additive import Normal, Observations
from duplex.layers.gaussian_prototypes import ClosedForm, Posterior, Settings
from duplex.layers.statistics import Statistics
from tests.layers import twin_closed_form as twin
from tests.pretended import Pretended


def world(seed: int = 0, m: int = 4, n: int = 3, d: int = 5, images: int = 60, pairs: int = 8):
    """Unit features about composed means, the first image of each pair certain; `pairs` of the `m n` have images."""
    rng = np.random.default_rng(seed)
    some = rng.permutation(m * n)[:pairs]
    own = np.r_[some, rng.choice(some, max(images - len(some), 0))]
    a, b = rng.standard_normal((m, d)), rng.standard_normal((n, d))
    z = a[own // n] + b[own % n] + rng.standard_normal((len(own), d)) * rng.uniform(0.2, 1, d)
    return torch.nn.functional.normalize(torch.from_numpy(z), dim=-1), torch.from_numpy(own), m, n


def fitted(*args, options: Settings = Settings(), **kwargs) -> ClosedForm:
    z, own, m, n = world(*args, **kwargs)
    return ClosedForm.fit(Statistics.of(z, own, m, n), options)


def every(model: ClosedForm) -> torch.Tensor:
    return torch.arange(model.shape[0] * model.shape[1])


def close(found: torch.Tensor, wanted, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found.numpy(), np.asarray(wanted), rtol=tolerance, atol=tolerance)


def equal(one: Statistics, other: Statistics) -> None:
    assert torch.equal(one.pairs, other.pairs)
    for name in ("counts", "sums", "moment"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-12, atol=1e-12)


# -- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predictive", [False, True])
@pytest.mark.parametrize("rows", [0, 1 << 14], ids=["outer sums", "rows"])
def test_scores_are_the_twins(predictive: bool, rows: int) -> None:
    z, own, m, n = world()
    new = world(seed=1)[0][:7]
    model = ClosedForm.fit(Statistics.of(z, own, m, n), Settings(shrinkage=4.0, predictive=predictive))
    wanted = twin.scores(z.numpy(), own.numpy(), new.numpy(), m, n, 1 / 4, 0.1, predictive)
    found = model.scorer(every(model), rows)(new)
    shift = np.asarray(wanted[:, :1] - found[:, :1].numpy())  # shared by all compositions
    close(found, wanted - shift, 1e-8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5), st.integers(2, 7), st.booleans(), st.booleans())
def test_any_list_of_columns_scores_as_all_do(seed: int, m: int, n: int, d: int, predictive: bool, prior: bool) -> None:
    rng = np.random.default_rng(seed)
    model = fitted(
        seed, m, n, d, images=int(rng.integers(m * n, 40 + m * n)), pairs=int(rng.integers(1, m * n + 1)),
        options=Settings(predictive=predictive, prior=prior),
    )  # fmt: skip
    new, columns = world(seed + 1, m, n, d)[0], torch.from_numpy(rng.permutation(m * n)[: rng.integers(1, m * n + 1)])
    whole = model.scorer(every(model), 0)(new)
    assert torch.isfinite(whole).all()
    close(model.scorer(columns, 0)(new), whole[:, columns], 1e-8)
    close(model.scorer(columns)(new), whole[:, columns], 1e-8)


@pytest.mark.parametrize("prior", [True, False])
def test_rows_and_offsets_are_the_score(prior: bool) -> None:
    """`g_c(z) = (z W - mu) . h_c + offset_c`: what an export holds of it."""
    z, own, m, n = world()
    model = ClosedForm.fit(Statistics.of(z, own, m, n), Settings(prior=prior))
    new, columns = world(seed=1)[0][:7], torch.tensor([11, 0, 5, 3])
    rows, offset = model.linear(columns)
    close((new @ model.whitening - model.additive.mean) @ rows.T + offset, model.scorer(columns)(new))
    wanted = twin.scores(z.numpy(), own.numpy(), new.numpy(), m, n, 1 / model.shrinkage, 0.1, False)
    share = np.array([np.log((own == c).sum().item()) if c in own and not prior else 0 for c in columns.tolist()])
    apart = model.scorer(columns)(new).numpy() - (wanted[:, columns.numpy()] - share)
    close(torch.from_numpy(apart - apart[:, :1]), np.zeros_like(apart), 1e-8)


def test_outer_sums_in_single_precision_are_the_dense_twins_to_1e_5() -> None:
    z, own, m, n = world(3, m=9, n=7, d=24, images=900, pairs=40)
    model = ClosedForm.fit(Statistics.of(z, own, m, n), Settings(shrinkage=20.0)).to(torch.float32)
    new = world(4, m=9, n=7, d=24)[0][:20]
    wanted = twin.scores(z.numpy(), own.numpy(), new.numpy(), m, n, 1 / 20, 0.1, False)
    found = model.scorer(every(model), 0)(new.float())
    assert found.dtype == torch.float32
    apart = found.numpy() - wanted
    assert np.ptp(apart, axis=1).max() < 1e-5 * np.abs(wanted).max()  # what all compositions share is free


def test_scores_hold_in_any_orientation_of_the_features() -> None:
    z, own, m, n = world()
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    plain, turned = (ClosedForm.fit(Statistics.of(x, own, m, n)) for x in (z, z @ turn))
    torch.testing.assert_close(plain.scorer(every(plain))(z), turned.scorer(every(turned))(z @ turn), rtol=0, atol=1e-7)


def test_posteriors_are_bayes_rule_over_groups() -> None:
    z, own, m, n = world()
    statistics = Statistics.of(z, own, m, n)
    for groups, labels in ((statistics.by_state(), own // n), (statistics.by_object(), own % n)):
        inverse = np.linalg.inv(twin.covariance(z.numpy(), labels.numpy()))
        logits = np.full((len(z), len(groups.counts)), -np.inf)
        for g in set(labels.tolist()):
            mean = z[labels == g].mean(0).numpy()
            logits[:, g] = [-0.5 * (x - mean) @ inverse @ (x - mean) for x in z.numpy()]
            logits[:, g] += np.log((labels == g).sum().item())
        logits -= np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) + logits.max(
            1, keepdims=True
        )
        close(Posterior.fit(groups)(z), logits, 1e-8)


# -- statistics -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 60), max_size=4))
def test_shards_added_are_the_whole(seed: int, cuts: list[int]) -> None:
    z, own, m, n = world(seed)
    total = Statistics.empty(m, n, z.shape[1])
    edges = [0, *sorted(cuts), len(z)]
    for start, stop in pairwise(edges):
        total += Statistics.of(z[start:stop], own[start:stop], m, n)
    equal(total, Statistics.of(z, own, m, n))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(8, 20))
def test_what_was_added_can_be_taken_out_again(seed: int, images: int) -> None:
    """Pairs that lose all their images among them, and pairs that keep a single one."""
    z, own, m, n = world(seed, images=images)
    fold = torch.from_numpy(np.random.default_rng(seed).random(len(z)) < 0.5)
    whole, part = Statistics.of(z, own, m, n), Statistics.of(z[fold], own[fold], m, n)
    equal(whole - part, Statistics.of(z[~fold], own[~fold], m, n))
    if fold.any():
        with pytest.raises(DuplexError, match="add them first"):
            part - (whole + whole)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 20))
def test_means_are_those_of_each_groups_images(seed: int, images: int) -> None:
    """Of one image or several; nothing where a state or an object has none."""
    z, own, m, n = world(seed, images=images, pairs=4)
    statistics = Statistics.of(z, own, m, n)
    for groups, labels, names in (
        (statistics.by_pair(), own, statistics.pairs.tolist()),
        (statistics.by_state(), own // n, range(m)),
        (statistics.by_object(), own % n, range(n)),
    ):
        for mean, count, name in zip(groups.means, groups.counts.tolist(), names, strict=True):
            mine = z[labels == name]
            assert count == len(mine)
            close(mean, mine.mean(0) if len(mine) else torch.zeros(z.shape[1]))


def test_statistics_of_other_labels_do_not_join() -> None:
    z, own, m, n = world()
    with pytest.raises(DuplexError, match="4 states, 3 objects and 5 dimensions cannot join those of 4, 4 and 5"):
        Statistics.of(z, own, m, n) + Statistics.of(z, own, m, n + 1)


def test_rows_that_are_not_numbers_are_counted() -> None:
    z, own, m, n = world()
    z[3, 1], z[9, 0] = torch.nan, torch.inf
    with pytest.raises(DuplexError, match=r"2 of 60 feature rows are not finite \(the first is row 3\)"):
        Statistics.of(z, own, m, n)


def test_labels_must_fit() -> None:
    z, own, m, n = world()
    with pytest.raises(DuplexError, match="give one label a feature"):
        Statistics.of(z, own[1:], m, n)
    for beyond in (m * n, -1):
        with pytest.raises(DuplexError, match="outside of the 4 x 3"):
            Statistics.of(z, torch.cat([own[1:], torch.tensor([beyond])]), m, n)
    for last in (0, m * n - 1):
        assert Statistics.of(z[:1], torch.tensor([last]), m, n).pairs.tolist() == [last]


# -- the fit --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 10), st.floats(0.01, 5))
def test_effects_are_the_twins_directly_and_by_conjugate_gradients(seed: int, v: float, ridge: float) -> None:
    z, own, m, n = world(seed)
    statistics = Statistics.of(z, own, m, n)
    groups = statistics.by_pair()
    seen = Observations(statistics.state_of, statistics.object_of, groups.counts, groups.means, (m, n))
    beta, inverse = twin.effects(z.numpy(), own.numpy(), m, n, v, ridge)
    direct, iterated = additive.fit(seen, v, ridge, direct=m + n), additive.fit(seen, v, ridge, direct=m + n - 1)
    assert torch.equal(direct.variance, additive.fit(seen, v, ridge).variance)
    alone = Normal(seen, v, ridge).diagonal
    close(iterated.variance, (1 / alone[1 : 1 + m, None] + 1 / alone[1 + m :]).numpy(), 1e-12)
    for found in (direct, iterated):
        close(torch.cat([found.mean[None], found.state, found.object]), beta, 1e-7)
    pick = np.zeros((m * n, 1 + m + n))
    for c in range(m * n):
        pick[c, [0, 1 + c // n, 1 + m + c % n]] = 1
    close(direct.variance.reshape(-1), np.einsum("ci,ij,cj->c", pick, inverse, pick), 1e-8)
    normal = Normal(seen, v, ridge)
    close(normal.times(torch.from_numpy(beta)), (normal.matrix() @ torch.from_numpy(beta)).numpy(), 1e-9)


def test_likelihood_is_the_dense_gaussians() -> None:
    z, own, m, n = world()
    statistics = Statistics.of(z, own, m, n)
    groups = statistics.by_pair()
    seen = Observations(statistics.state_of, statistics.object_of, groups.counts, groups.means, (m, n))

    def dense(v: float) -> float:
        pairs = statistics.pairs.tolist()
        return float(twin.log_likelihood(groups.means.numpy(), pairs, groups.counts.numpy(), m, n, v, 0.1))

    difference = [additive.log_likelihood(seen, v, 0.1) - dense(v) for v in (0.001, 0.1, 3.0)]
    assert max(difference) - min(difference) < 1e-8


@pytest.mark.parametrize("seed", range(6))
def test_no_step_of_an_eighth_of_a_decade_is_likelier_than_what_is_found(seed: int) -> None:
    z, own, m, n = world(seed, images=int(30 + 200 * seed))
    statistics = Statistics.of(z, own, m, n)
    groups = statistics.by_pair()
    seen = Observations(statistics.state_of, statistics.object_of, groups.counts, groups.means * 3**seed, (m, n))
    v = additive.interaction_variance(seen, 0.1)
    height = additive.log_likelihood(seen, v, 0.1)
    for step in (0.125, 0.25, 0.5, 1.0):
        for moved in (v * 10**step, v / 10**step):
            assert not 10**-4.9 < moved < 10**1.9 or additive.log_likelihood(seen, moved, 0.1) <= height


@pytest.mark.parametrize("counts", [(1, 1, 1), (5, 5, 5)])
def test_interactions_that_moments_do_not_find_are_next_to_none(counts: tuple[int, ...]) -> None:
    """Residuals no larger than the noise of the means; fewer pairs than effects among them."""
    tensors: Any = [torch.tensor(x) for x in ([0, 1, 2], [0, 1, 0], counts)]
    seen = Observations(tensors[0], tensors[1], tensors[2].double(), torch.ones(3, 4).double(), (3, 2))
    assert additive.interaction_variance(seen, 0.1, direct=0) == 1e-4


@pytest.mark.parametrize("direct", [additive.DIRECT, 0], ids=["likelihood", "moments"])
@pytest.mark.parametrize("v", [0.02, 0.5])
def test_the_variance_of_interactions_is_found(v: float, direct: int) -> None:
    """Means drawn from the model itself: the estimate lies within a factor of two of what they were drawn with."""
    rng, (m, n, d) = np.random.default_rng(0), (12, 10, 60)
    pairs = np.sort(rng.permutation(m * n)[:80])
    counts = rng.integers(2, 60, len(pairs))
    a, b = rng.standard_normal((m, d)), rng.standard_normal((n, d))
    means = a[pairs // n] + b[pairs % n] + rng.standard_normal((len(pairs), d)) * np.sqrt(v + 1 / counts)[:, None]
    tensors: Any = [torch.from_numpy(x) for x in (pairs // n, pairs % n, counts.astype(float), means)]
    found = additive.interaction_variance(Observations(*tensors, (m, n)), 0.1, direct)
    assert v / 2 < found < 2 * v


def test_confounded_effects_are_told_apart() -> None:
    """A frequent pair must not lend its object's look to its state: means of states do, least squares do not."""
    m, n = 2, 3
    looks = torch.eye(5)
    own = torch.tensor([0] * 30 + [1] * 2 + [4] * 30 + [5] * 2)  # state 0 is mostly object 0, state 1 mostly object 1
    noise = 1e-3 * torch.randn(len(own), 5, generator=torch.Generator().manual_seed(0))
    statistics = Statistics.of(looks[own // n] + looks[m + own % n] + noise, own, m, n)
    wanted = looks[0] + looks[m + 2]  # state 0 with object 2, which no image shows
    model = ClosedForm.fit(statistics, Settings(ridge=1e-6))
    composed = (model.rows_of(torch.tensor([2])) @ torch.linalg.inv(model.whitening))[0]
    assert (composed - wanted).norm() < 0.01
    naive = statistics.by_state().means[0] + statistics.by_object().means[2] - statistics.sums.sum(0) / len(own)
    assert (naive - wanted).norm() > 0.5


def test_rows_move_from_the_fit_to_their_own_mean_as_images_come() -> None:
    z, own, m, n = world()
    statistics = Statistics.of(z, own, m, n)
    loose, tight = (ClosedForm.fit(statistics, Settings(shrinkage=k)) for k in (1e-6, 1e6))
    close(loose.rows, statistics.by_pair().means @ loose.whitening, 1e-5)
    close(tight.rows, tight.additive.at(statistics.state_of, statistics.object_of), 1e-3)


# -- where data run out ---------------------------------------------------------------------------------------------

THIN = {
    "one image a pair": {"images": 8, "pairs": 8},
    "one pair": {"images": 9, "pairs": 1},
    "one image": {"images": 1, "pairs": 1},
    "one state": {"m": 1, "n": 5, "pairs": 3},
    "one object": {"m": 5, "n": 1, "pairs": 3},
    "one composition in all": {"m": 1, "n": 1, "pairs": 1},
    "fewer images than dimensions": {"images": 12, "d": 40},
    "one dimension": {"d": 1},
}


@pytest.mark.parametrize("predictive", [False, True])
@pytest.mark.parametrize("case", THIN.values(), ids=THIN.keys())
def test_thin_data_give_a_result(case: dict, predictive: bool) -> None:
    model = fitted(**case, options=Settings(predictive=predictive))
    scores = model.scorer(every(model), 0)(world(seed=2, **case)[0])
    assert torch.isfinite(scores).all()


def test_a_singular_covariance_gives_a_result() -> None:
    z, own, m, n = world()
    still = torch.cat([z, z[:, :2], torch.ones(len(z), 1, dtype=z.dtype)], dim=1)  # repeated and constant dimensions
    model = ClosedForm.fit(Statistics.of(still, own, m, n))
    assert torch.isfinite(model.scorer(every(model))(still)).all()


def test_pictures_that_are_all_the_same_give_a_result() -> None:
    z, own, m, n = world()
    same = z[:1].expand(len(z), -1)
    model = ClosedForm.fit(Statistics.of(same, own, m, n))
    assert torch.isfinite(model.scorer(every(model))(same)).all()


def test_a_state_without_images_is_an_average_one() -> None:
    z, own, m, n = world(pairs=3)
    statistics = Statistics.of(z, own, m, n)
    model, unseen = ClosedForm.fit(statistics), torch.tensor([m not in statistics.state_of for m in range(m)])
    assert unseen.any()
    assert model.additive.state[unseen].abs().max() == 0
    assert (model.variance[unseen].amin() > model.variance[~unseen].amin()).all()
    log_p = Posterior.fit(statistics.by_state())(z)
    assert (log_p[:, unseen] == -torch.inf).all()
    assert not torch.isnan(log_p).any()


def test_no_image_at_all_is_one_sentence() -> None:
    with pytest.raises(DuplexError, match="no readable training image"):
        ClosedForm.fit(Statistics.empty(2, 2, 4))


# -- which compositions there may be ----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(1, 5), n=st.integers(1, 4), d=st.integers(1, 6))
def test_support_is_a_loop_over_the_pairs_with_images(seed: int, m: int, n: int, d: int) -> None:
    pairs = int(np.random.default_rng(seed).integers(1, m * n + 1))
    model = fitted(seed, m, n, d, images=3 * pairs, pairs=pairs)
    a, b = model.additive.state.numpy(), model.additive.object.numpy()
    found = model.support()
    close(found, twin.support(a, b, model.pairs.tolist(), model.counts.tolist()), 1e-8)
    assert found.shape == (m, n) and (found <= 1e-12).all()  # the log of a share


def test_support_falls_as_looks_part_and_never_to_nothing() -> None:
    """A state next to one that is seen with the object is better supported than a state far from all of them; the share
    of the object's images is the most that any state of it can have."""
    model = fitted(d=6, images=90)
    near, far = model.additive.state.clone(), model.additive.state.clone()
    own = int(model.pairs[model.counts.argmax()])
    m, n = own // model.shape[1], own % model.shape[1]
    other = (m + 1) % model.shape[0]
    near[other], far[other] = model.additive.state[m], model.additive.state[m] + 1e6
    alike, unlike = (replace(model, additive=replace(model.additive, state=part)).support() for part in (near, far))
    assert alike[other, n] == pytest.approx(float(alike[m, n]))
    assert unlike[other, n] < alike[other, n] and torch.isfinite(unlike).all()


def test_support_is_the_same_on_a_device(pretended: Pretended) -> None:
    model = fitted()
    there = model.to(torch.float64, pretended.name).support()
    assert there.device == torch.device(pretended.name)
    torch.testing.assert_close(there.cpu(), model.support())
