"""Visual prototypes in closed form: mean features of seen pairs, predicted means of other pairs.

    x = z W,  W W^T = Sigma^-1                                 whitened features
    x_c = mu + a_m + b_n + gamma_c + noise                     mean of the n_c images of pair c = (m, n)
    Var(noise) = 1 / n_c,   Var(gamma_c) = v                   in every direction
    h_c = (n_c x_c + k mu_mn) / (n_c + k),  k = 1 / v          prototype of a seen pair (empirical Bayes)
    h_c = mu_mn = mu + a_m + b_n (+ gamma_mn)                  prototype of another pair
    g_c(z) = x . h_c - |h_c|^2 / 2 + log n_c                   score; without log n_c for unseen pairs

* z: feature;  Sigma: covariance of images about their pair's mean, shrunk by OAS
* mu, a, b: overall mean, effects of states and objects (a two-way layout), fitted by least squares with
  weights w_c = 1 / (v + 1 / n_c), about n_c for few images, at most 1 / v. The simpler mean_s + mean_o - mean_all
  would mix up effects of states and objects that do not co-occur evenly
* v: chosen by marginal likelihood
* gamma_mn: a Gaussian process over pairs, given word embeddings t: a wet dog and a wet cat deviate alike

    Cov(gamma_mn, gamma_m'n') = tau K_s(m, m') K_o(n, n'),   K(t, t') = exp(-|t - t'|^2 / (2 l median |t - t'|^2))
    gamma_mn = sum_rs U_mr V_ns G_rs,   G_rs ~ N(0, tau I),   K_s = U U^T, K_o = V V^T (of low rank)

This adds `r s` columns `phi_mn = U_m (x) V_n` with the ridge `1 / tau` to the least squares; tau
is chosen with v.

Up to a constant, `g` is Bayes' rule for normal distributions around `h_c`: linear discriminant
analysis (Fisher 1936) with composed means. Vectors are stored minus `mu`, which loses least in
float32, and never for all M N pairs: `x . mu_mn` is computed as an outer sum (and a product of
small factors), `|mu_mn|^2` as a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.errors import DuplexError
from duplex.methods.layers import part_scales

RIDGE = 0.1  # images at which the effect of a state or object is halved
RANK = 12  # of each kernel
LENGTH = 0.5  # l
PAIRS = 1024  # the most frequent pairs, by which tau and v are chosen
ROWS = 1 << 14  # candidates up to which scores are products with prototypes; beyond it, outer sums
CELLS = 1 << 22  # scores worked on at a time in outer sums
Guess = tuple[float, float]  # log10 v, log10 tau
FeatureScorer = Callable[[Tensor], Tensor]  # features z [B, d] -> g_c(z) [B, C]
WordEmbeddings = tuple[Tensor, Tensor]  # of states [M, w], objects [N, w]
Part = TypeVar("Part", bound="MovableTensors")


@dataclass(frozen=True)
class GroupSums:
    """Image count and feature sum per composition, state or object; `moment`: sum of `z z^T`."""

    counts: Tensor  # n_g [G]
    sums: Tensor  # sum of z over each group [G, d]
    moment: Tensor  # sum of z z^T over all images [d, d]

    @property
    def means(self) -> Tensor:
        """Mean feature of each group [G, d]; zero for a group without images."""
        return self.sums / self.counts.clamp(min=1)[:, None]


@dataclass(frozen=True)
class ClassStatistics:
    """Image count and feature sum per composition, and outer products of features, in float64."""

    states: int  # M
    objects: int  # N
    pairs: Tensor  # compositions with images, rising [P]
    counts: Tensor  # n_c [P]
    sums: Tensor  # [P, d]
    moment: Tensor  # [d, d]

    @classmethod
    def of(cls, z: Tensor, compositions: Tensor, states: int, objects: int) -> ClassStatistics:
        """Count and add up features `z` [n, d] by their `compositions` [n] of M N pairs."""
        z = z.double()
        pairs, place = compositions.unique(return_inverse=True)
        sums = z.new_zeros(len(pairs), z.shape[1]).index_add_(0, place, z)
        return cls(states, objects, pairs, place.bincount(minlength=len(pairs)).double(), sums, z.T @ z)

    def relabelled(self, states: Tensor, objects: Tensor, shape: tuple[int, int]) -> ClassStatistics:
        """These statistics with more words; `states`, `objects`: new indices of old words."""
        pairs = states[self.state_of] * shape[1] + objects[self.object_of]
        return ClassStatistics(*shape, pairs, self.counts, self.sums, self.moment)

    def __add__(self, other: ClassStatistics) -> ClassStatistics:
        pairs, place = torch.cat([self.pairs, other.pairs]).unique(return_inverse=True)
        counts = self.counts.new_zeros(len(pairs)).index_add_(0, place, torch.cat([self.counts, other.counts]))
        rows = torch.cat([self.sums, other.sums])
        sums = self.sums.new_zeros(len(pairs), self.dim).index_add_(0, place, rows)
        return ClassStatistics(self.states, self.objects, pairs, counts, sums, self.moment + other.moment)

    @property
    def dim(self) -> int:
        return len(self.moment)

    @property
    def state_of(self) -> Tensor:
        return self.pairs // self.objects

    @property
    def object_of(self) -> Tensor:
        return self.pairs % self.objects

    def by_pair(self) -> GroupSums:
        return GroupSums(self.counts, self.sums, self.moment)

    def by_state(self) -> GroupSums:
        return self._grouped(self.state_of, self.states)

    def by_object(self) -> GroupSums:
        return self._grouped(self.object_of, self.objects)

    def _grouped(self, place: Tensor, size: int) -> GroupSums:
        counts = self.counts.new_zeros(size).index_add_(0, place, self.counts)
        sums = self.sums.new_zeros(size, self.dim).index_add_(0, place, self.sums)
        return GroupSums(counts, sums, self.moment)


def within_group_covariance(groups: GroupSums) -> tuple[Tensor, float]:
    """Covariance [d, d] about group means, or about the overall one, and degrees of freedom."""
    counts = groups.counts
    means = groups.means
    free = float(counts.sum() - (counts > 0).sum())
    if free < 1:
        means = groups.sums.sum(0, keepdim=True) / counts.sum().clamp(min=1)
        counts = counts.sum()[None]
        free = max(float(counts.sum()) - 1, 1.0)
    scatter = groups.moment - (means * counts[:, None]).T @ means  # sum z z^T - sum n_g m_g m_g^T
    return (scatter + scatter.T) / (2 * free), free


def oas_shrinkage_weight(covariance: Tensor, free: float) -> float:
    """Weight of the identity in OAS shrinkage of a covariance with `free` degrees of freedom."""
    d = len(covariance)
    trace = float(covariance.trace())  # tr S
    squares = float((covariance * covariance).sum())  # tr S^2
    above = (1 - 2 / d) * squares + trace**2
    below = (free + 1 - 2 / d) * (squares - trace**2 / d)
    return min(1.0, above / below) if below > 0 else 1.0


def shared_whitening(groups: GroupSums, added: float = 0.0, parts: Sequence[int] = ()) -> Tensor:
    """Matrix W [d, d] that whitens: `W W^T = Sigma^-1`, `Sigma = (1 - rho) S + rho tr(S)/d I`.

    S: sample covariance; rho: weight by OAS (Chen et al., 2010, Eq. 23). Ledoit and Wolf's weight
        would need a second pass over the images.
    added: share of the mean variance tr(S)/d that is also added to the diagonal.
    parts: widths of joined encoders' features, each of which is first scaled by its own deviation.
    """
    sample, free = within_group_covariance(groups)
    scales = part_scales(sample.diagonal(), parts)
    sample = scales[:, None] * sample * scales
    d = len(sample)
    eye = torch.eye(d, dtype=sample.dtype, device=sample.device)
    level = float(sample.trace()) / d
    if not level > 1e-12:  # no variation: the largest variance of unit features
        sample = eye / d
        level = 1 / d
    rho = oas_shrinkage_weight(sample, free)
    values, vectors = torch.linalg.eigh((1 - rho) * sample + (rho + added) * level * eye)
    values = values.clamp(min=1e-9 * level)  # rounding may give a zero eigenvalue a negative sign
    return scales[:, None] * torch.div(vectors, values.sqrt())


@dataclass(frozen=True)
class PairMeans:
    """Mean feature and image count of each pair that has images."""

    states: Tensor  # m of each pair [P]
    objects: Tensor  # n of each pair [P]
    counts: Tensor  # n_c [P]
    means: Tensor  # x_c [P, d]
    shape: tuple[int, int]  # M, N


@dataclass(frozen=True)
class AdditiveEffects:
    """Overall mean and effects of states and objects; a pair's predicted mean is their sum."""

    mean: Tensor  # mu [d]
    state: Tensor  # a [M, d]
    object: Tensor  # b [N, d]

    def of_pairs(self, states: Tensor, objects: Tensor) -> Tensor:
        return self.mean + self.state[states] + self.object[objects]


@dataclass(frozen=True)
class LowRankWordSimilarities:
    """Low-rank factors of word similarities: `U U^T` for states, `V V^T` for objects."""

    states: Tensor  # U [M, r]
    objects: Tensor  # V [N, s]

    @classmethod
    def of_words(cls, states: Tensor, objects: Tensor) -> LowRankWordSimilarities:
        return cls(kernel_factor(states), kernel_factor(objects))

    def pair_factors(self, states: Tensor, objects: Tensor) -> Tensor:
        """Kronecker products [P, r * s] of pairs' rows of `self.states` and `self.objects`."""
        return (self.states[states][:, :, None] * self.objects[objects][:, None]).flatten(1)


def kernel_factor(words: Tensor, rank: int = RANK) -> Tensor:
    """Factor U [M, rank] of the similarities K of words with vectors `words` [M, w]: `U U^T`."""
    unit = normalize(words.double(), dim=-1)
    squares = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    different = squares[squares > 1e-12]
    median = different.median() if len(different) else squares.new_ones(())
    values, vectors = torch.linalg.eigh(torch.exp(-0.5 * squares / (LENGTH * median)))
    return torch.mul(vectors[:, -rank:], values[-rank:].clamp(min=0).sqrt())


@dataclass(frozen=True)
class Interactions(LowRankWordSimilarities):
    """The interactions `gamma_mn` [d]: what a pair's mean has beyond its state's and object's."""

    core: Tensor  # G [r, s, d], the fitted weights of products of both factors

    def of_pairs(self, states: Tensor, objects: Tensor) -> Tensor:
        return self.pair_factors(states, objects) @ self.core.flatten(0, 1)

    def scores_before_objects(self, x: Tensor) -> Tensor:
        """[B, M, s]; times `self.objects.T`, the product of `x` [B, d] with each `gamma_mn`."""
        return self.states @ (x @ self.core.flatten(0, 1).T).view(len(x), *self.core.shape[:2])


def compose(effects: AdditiveEffects, interactions: Interactions | None, states: Tensor, objects: Tensor) -> Tensor:
    """Predicted mean features [K, d] of K pairs, given by their states' and objects' indices."""
    rows = effects.of_pairs(states, objects)
    return rows if interactions is None else rows + interactions.of_pairs(states, objects)


class NormalEquations:
    """Normal equations `H beta = r` of pairs' means: `beta` is a mean, state and object effects.

    If `w` is the `M x N` table of pairs' weights (0 without images), and `w 1`, `1 w` its sums,

        H = [[sum w, w 1, 1 w], [., diag(w 1) + ridge, w], [., ., diag(1 w) + ridge]]    (symmetric)

    v: variance of interactions; n images give a pair the weight `1 / (v + 1 / n)`.
    ridge: number of images at which an effect is shrunk by half; tau: variance of G.
    kernels: similarities of words; if given, `beta` also holds the interactions' coefficients G.
    """

    def __init__(
        self, seen: PairMeans, v: float, ridge: float, kernels: LowRankWordSimilarities | None = None, tau: float = 0.0
    ) -> None:
        self.seen = seen
        self.w = 1 / (v + 1 / seen.counts)  # w_c [P]
        self.matrix = self._effects_matrix(ridge)
        self.right = self.gather(self.w[:, None] * seen.means)
        self.log_prior = 0.0  # log-determinant of the prior covariance of G
        if kernels is not None:
            phi = kernels.pair_factors(seen.states, seen.objects)
            weighted = self.w[:, None] * phi
            corner = phi.T @ weighted
            corner.diagonal().add_(1 / tau)
            side = self.gather(weighted)
            top = torch.cat([self.matrix, side], dim=1)
            self.matrix = torch.cat([top, torch.cat([side.T, corner], dim=1)])
            self.right = torch.cat([self.right, weighted.T @ seen.means])
            self.log_prior = phi.shape[1] * math.log(tau)

    def gather(self, rows: Tensor) -> Tensor:
        """Sums of `rows` [P, d] (one per pair) over all, by state and by object [1 + M + N, d]."""
        m, n = self.seen.shape
        by_s = rows.new_zeros(m, rows.shape[1]).index_add_(0, self.seen.states, rows)
        by_o = rows.new_zeros(n, rows.shape[1]).index_add_(0, self.seen.objects, rows)
        return torch.cat([rows.sum(0, keepdim=True), by_s, by_o])

    def _effects_matrix(self, ridge: float) -> Tensor:
        m, n = self.seen.shape
        h = self.w.new_zeros(1 + m + n, 1 + m + n)
        sums = self.gather(self.w[:, None])[1:, 0]
        h[0, 0] = self.w.sum()
        h[0, 1:] = sums
        h[1 : 1 + m, 1 + m :].index_put_((self.seen.states, self.seen.objects), self.w)
        h = h + h.triu(1).T
        h.diagonal()[1:] += sums + ridge
        return h

    def solve(self) -> tuple[AdditiveEffects, Tensor]:
        """Effects, 0 for words without images, and interaction coefficients G [r s, d]."""
        beta = torch.cholesky_inverse(torch.linalg.cholesky(self.matrix)) @ self.right
        m, n = self.seen.shape
        return AdditiveEffects(beta[0], beta[1 : 1 + m], beta[1 + m : 1 + m + n]), beta[1 + m + n :]

    def log_likelihood(self) -> float:
        """Marginal log-likelihood of pairs' means x_c (`beta` integrated out), up to a constant.

        -1/2 [ sum_c w_c |x_c|^2 - r . H^-1 r  +  d (log|H| - sum_c log w_c + log_prior) ]
        """
        factor = torch.linalg.cholesky(self.matrix)
        half = torch.linalg.solve_triangular(factor, self.right, upper=False)
        quadratic = float((self.w[:, None] * self.seen.means**2).sum() - (half * half).sum())
        determinant = float(2 * factor.diagonal().log().sum() - self.w.log().sum() + self.log_prior)
        return -0.5 * (quadratic + self.seen.means.shape[1] * determinant)


def interaction_variance(seen: PairMeans, ridge: float) -> float:
    """The most likely variance of interactions, which state and object do not explain."""

    def height(exponent: float) -> float:
        return NormalEquations(seen, 10.0**exponent, ridge).log_likelihood()

    heights = {float(e): height(e) for e in range(-4, 2)}  # whole decades, then halves
    step = 0.5
    while step > 0.1:
        best = max(heights, key=heights.__getitem__)
        for exponent in (best - step, best + step):
            heights[exponent] = height(exponent)
        step /= 2
    return float(10.0 ** max(heights, key=heights.__getitem__))


def additive_effects(seen: PairMeans, ridge: float = RIDGE) -> AdditiveEffects:
    """The effects of words on pairs' means, with the most likely variance of interactions."""
    return NormalEquations(seen, interaction_variance(seen, ridge), ridge).solve()[0]


def choose_variances(seen: PairMeans, kernels: LowRankWordSimilarities, ridge: float) -> tuple[float, float]:
    """The likeliest `v` and `tau` for the most frequent pairs, found by hill climbing."""
    often = seen.counts.argsort(descending=True, stable=True)[:PAIRS]
    some = PairMeans(seen.states[often], seen.objects[often], seen.counts[often], seen.means[often], seen.shape)

    def likelihood(guess: Guess) -> float:
        return NormalEquations(some, 10 ** guess[0], ridge, kernels, 10 ** guess[1]).log_likelihood()

    v, tau = _climb(likelihood, (-2.0, -1.0))
    return 10**v, 10**tau


def _climb(height: Callable[[Guess], float], start: Guess, step: float = 1.0) -> Guess:
    heights = {start: height(start)}
    best = start
    while step > 0.1:
        for move in ((step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step)):
            guess = best[0] + move[0], best[1] + move[1]
            if guess not in heights and all(-6 <= part <= 2 for part in guess):
                heights[guess] = height(guess)
        top = max(heights, key=heights.__getitem__)
        if top == best:
            step /= 2
        best = top
    return best


@dataclass(frozen=True)
class FitSettings:
    """Settings of the fit, in the module's symbols; None: chosen by the likelihood."""

    ridge: float = RIDGE
    shrinkage: float | None = None  # k, images at which h_c is halfway from mu_mn to x_c
    interactions: float | None = None  # tau, their variance; 0: none
    prior: bool = True  # whether g_c includes log n_c of seen pairs
    parts: tuple[int, ...] = ()  # widths of joined encoders' features, each scaled by its own deviation


class MovableTensors:
    """Base of dataclasses that contain tensors or each other; `to` changes dtype and device."""

    def to(self: Part, dtype: torch.dtype, device: torch.device | str | None = None) -> Part:
        """Copy with all tensors moved to `device`, and floating-point ones of type `dtype`."""

        def convert(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
            if not is_dataclass(value):
                return value
            return replace(value, **{field.name: convert(getattr(value, field.name)) for field in fields(value)})  # type: ignore[type-var]

        converted: Part = convert(self)
        return converted


@dataclass(frozen=True)
class ClosedForm(MovableTensors):
    """Linear classifier by closed-form prototypes; fitted in float64, and `to` converts it."""

    settings: FitSettings
    whitening: Tensor  # W [d, d]
    additive: AdditiveEffects
    interactions: Interactions | None
    seen: Tensor  # seen compositions, ascending [P]
    rows: Tensor  # h_c of the seen compositions [P, d]
    counts: Tensor  # n_c [P]
    shrinkage: float  # k
    tau: float  # of the interactions; 0 without them

    @classmethod
    def fit(
        cls, statistics: ClassStatistics, settings: FitSettings = FitSettings(), words: WordEmbeddings | None = None
    ) -> ClosedForm:
        """Fit to statistics of training images; with word vectors `words`, it has interactions."""
        if not len(statistics.pairs):
            raise DuplexError("there is no readable training image; `duplex data check NAME` lists the unreadable ones")
        groups = statistics.by_pair()
        whitening = shared_whitening(groups, parts=settings.parts)
        seen = PairMeans(
            states=statistics.state_of,
            objects=statistics.object_of,
            counts=groups.counts,
            means=groups.means @ whitening,
            shape=(statistics.states, statistics.objects),
        )
        effects, interactions, v, tau = _fit_means(seen, settings, words)
        n = groups.counts
        k = 1 / v
        share = (n / (n + k))[:, None]
        rows = share * seen.means + (1 - share) * compose(effects, interactions, seen.states, seen.objects)
        return cls(
            settings=settings,
            whitening=whitening,
            additive=effects,
            interactions=interactions,
            seen=statistics.pairs,
            rows=rows,
            counts=n,
            shrinkage=k,
            tau=tau,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.additive.state), len(self.additive.object)

    def prototypes(self, compositions: Tensor) -> Tensor:
        """The visual prototypes of `compositions` [C, d], in whitened coordinates."""
        n = self.shape[1]
        rows = compose(self.additive, self.interactions, compositions // n, compositions % n)
        positions, place = self._find_seen(compositions)
        rows[positions] = self.rows[place]
        return rows

    def _find_seen(self, compositions: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.searchsorted(self.seen, compositions).clamp(max=len(self.seen) - 1)
        positions = (self.seen[place] == compositions).nonzero()[:, 0]
        return positions, place[positions]

    def linear(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [C, d] and offsets [C] of scores, linear in centred whitened features."""
        h = self.prototypes(candidates) - self.additive.mean
        return h, self._log_prior(candidates) - 0.5 * (h * h).sum(1)

    def _log_prior(self, candidates: Tensor) -> Tensor:
        prior = self.rows.new_zeros(len(candidates))
        if self.settings.prior:
            positions, place = self._find_seen(candidates)
            prior[positions] = self.counts[place].log()
        return prior

    def scorer(self, candidates: Tensor, rows: int = ROWS) -> FeatureScorer:
        if len(candidates) > rows:
            return self._outer_sum_scorer(candidates)
        h, offset = self.linear(candidates)
        return lambda z: torch.addmm(offset, self._whiten(z), h.T)

    def _whiten(self, z: Tensor) -> Tensor:
        return z.to(self.whitening) @ self.whitening - self.additive.mean

    def _outer_sum_scorer(self, candidates: Tensor) -> FeatureScorer:
        m, n = self.shape
        a, b = self.additive.state, self.additive.object
        interactions = self.interactions
        positions, place = self._find_seen(candidates)
        h_seen = self.rows[place] - self.additive.mean
        every = torch.equal(candidates, torch.arange(m * n, device=candidates.device))
        squares = self._squares().reshape(-1)[candidates]  # |h_c - mu|^2 [C]
        squares[positions] = (h_seen * h_seen).sum(1)
        offset = self._log_prior(candidates) - 0.5 * squares
        step = max(1, CELLS // (m * n))

        def scores(z: Tensor) -> Tensor:
            x = self._whiten(z)
            out = x.new_empty(len(x), len(candidates))
            by_s, by_o = x @ a.T, x @ b.T
            for i in range(0, len(x), step):  # few images, to stay in the processor's cache
                some = slice(i, i + step)
                cells = out[some].view(-1, m, n) if every else x.new_empty(len(x[some]), m, n)
                torch.add(by_s[some, :, None], by_o[some, None], out=cells)
                if interactions is not None:
                    before = interactions.scores_before_objects(x[some])
                    cells.baddbmm_(before, interactions.objects.T.expand(len(cells), -1, -1))
                if every:
                    out[some].add_(offset)
                else:
                    torch.add(cells.flatten(1)[:, candidates], offset, out=out[some])
            # seen pairs have prototypes of their own
            return out.index_copy_(1, positions, torch.addmm(offset[positions], x, h_seen.T))

        return scores

    def _squares(self) -> Tensor:
        a, b = self.additive.state, self.additive.object
        if self.interactions is None:
            return (a * a).sum(1)[:, None] + (b * b).sum(1) + 2 * a @ b.T
        objects = torch.arange(len(b), device=b.device)
        table = a.new_empty(self.shape)
        for m in range(len(a)):  # to save memory
            rows = a[m] + b + self.interactions.of_pairs(torch.full_like(objects, m), objects)
            table[m] = (rows * rows).sum(1)
        return table


def _fit_means(
    seen: PairMeans, settings: FitSettings, words: WordEmbeddings | None
) -> tuple[AdditiveEffects, Interactions | None, float, float]:
    v = None if settings.shrinkage is None else 1 / settings.shrinkage
    if words is None or settings.interactions == 0:
        v = interaction_variance(seen, settings.ridge) if v is None else v
        return NormalEquations(seen, v, settings.ridge).solve()[0], None, v, 0.0
    states, objects = words
    kernels = LowRankWordSimilarities.of_words(states, objects)
    tau = settings.interactions
    if v is None or tau is None:
        likely_v, likely_tau = choose_variances(seen, kernels, settings.ridge)
        v = likely_v if v is None else v
        tau = likely_tau if tau is None else tau
    effects, coefficients = NormalEquations(seen, v, settings.ridge, kernels, tau).solve()
    core = coefficients.view(kernels.states.shape[1], kernels.objects.shape[1], -1)
    return effects, Interactions(kernels.states, kernels.objects, core), v, tau


@dataclass(frozen=True)
class FittedStatistics:
    """What a `ClosedForm` was fitted with; with more images, it can be fitted again."""

    statistics: ClassStatistics
    settings: FitSettings


@runtime_checkable
class HasStatistics(Protocol):
    """A method with closed-form prototypes, which `duplex update` fits again."""

    def fitted_statistics(self) -> FittedStatistics | None:
        """What the prototypes were fitted with; None without such prototypes."""


@dataclass(frozen=True)
class LinearDiscriminant(MovableTensors):
    """Linear discriminant analysis of G groups; a call returns their log probabilities [B, G]."""

    weight: Tensor  # Sigma^-1 e [d, G], e: groups' means minus the mean of all images
    offset: Tensor  # [G]

    @classmethod
    def fit(cls, groups: GroupSums, parts: Sequence[int] = ()) -> LinearDiscriminant:
        """Fit to images by state or object; an empty group counts as an image at the mean.

        parts: as of `shared_whitening`.
        """
        whitening = shared_whitening(groups, parts=parts)
        means = groups.means @ whitening  # [G, d]
        middle = (groups.counts @ means) / groups.counts.sum()
        apart = means - middle  # where float32 loses least
        apart[groups.counts == 0] = 0
        offset = groups.counts.clamp(min=1).log() - 0.5 * (apart * apart).sum(1) - apart @ middle
        return cls(whitening @ apart.T, offset)

    def __call__(self, z: Tensor) -> Tensor:
        return (z @ self.weight + self.offset).log_softmax(-1)
