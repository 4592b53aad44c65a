"""Visual prototypes in closed form, without training: mean features of seen pairs, and predictions for all other pairs.

    x = z W                                        W: whitening map of Sigma
    mu_mn = mu + a_m + b_n (+ gamma_mn)            predicted mean of pair (m, n)
    h_c = (n_c x_c + k mu_mn) / (n_c + k), k = 1/v    prototype of a seen pair (empirical Bayes); of others, mu_mn
    g_c(z) = x . h_c - |h_c|^2 / 2 + log n_c       score; unseen pairs have a calibrated bias instead of log n_c

* z: feature;  x_c, n_c: mean and number of the training images of pair c = (m, n)
* Sigma: covariance of images about their pair's mean, shrunk (class_statistics.py, held_out_pairs.py)
* mu, a, b: mean and effects by weighted least squares over pairs (additive.py);  v: Var(interaction), by likelihood
* gamma: with word embeddings, interactions shared between pairs of like words (interactions.py)

`g` is Bayes' rule for images with a normal distribution about `h_c`, up to a constant: linear discriminant analysis
(Fisher 1936) with composed means of unseen pairs. Vectors are stored as differences from `mu`, which all compositions
share, where float32 loses least. Prototypes of all M N compositions are never stored: `x . mu_mn` is an outer sum (and
a product of small factors), `|mu_mn|^2` a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.layers.additive import AdditiveEffects, PairMeans, fit_additive, interaction_variance
from duplex.layers.class_statistics import ClassStatistics, Groups, shared_whitening
from duplex.layers.held_out_pairs import Compose, Fit, choose_added_variance
from duplex.layers.interactions import Interactions, KernelFactors, choose_variances, fit_with_interactions

FeatureScorer = Callable[[Tensor], Tensor]  # features z [B, d] -> g_c(z) [B, C]
WordEmbeddings = tuple[Tensor, Tensor]  # text embeddings of the states [M, w] and of the objects [N, w]
Part = TypeVar("Part", bound="TensorRecord")
ROWS = 1 << 14  # candidates up to which scores are products with prototypes; beyond it, outer sums
CELLS = 1 << 22  # scores worked on at a time in outer sums
LEAST = 1e-300  # smallest support


@dataclass(frozen=True)
class FitSettings:
    """Options of the fit; those that are None are chosen from training images."""

    ridge: float = 0.1  # number of images at which the effect of a state or object is shrunk by half
    shrinkage: float | None = None  # k: number of images at which h_c is halfway from mu_mn to x_c; None: by likelihood
    interactions: float | None = None  # tau, variance of the interactions; 0: no interactions; None: by likelihood
    prior: bool = True  # whether g_c includes log n_c of seen pairs
    added_variance: float | None = 0.0  # share of the mean variance added to the covariance; None: by held-out pairs


class TensorRecord:
    """Base class of dataclasses of tensors, which may be nested."""

    def to(self: Part, dtype: torch.dtype, device: torch.device | str | None = None) -> Part:
        """A copy with floating-point tensors in `dtype` and all tensors on `device`."""

        def convert(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
            if not is_dataclass(value):
                return value
            return replace(value, **{field.name: convert(getattr(value, field.name)) for field in fields(value)})  # type: ignore[type-var]

        converted: Part = convert(self)
        return converted


@dataclass(frozen=True)
class ClosedForm(TensorRecord):
    """Linear classifier of compositions in closed form: effects of states and objects, prototypes of seen pairs.

    Features are whitened first. The fit is in float64; `to` sets the precision of scoring.
    """

    settings: FitSettings
    whitening: Tensor  # W [d, d]
    additive: AdditiveEffects
    interactions: Interactions | None
    seen: Tensor  # seen compositions, rising [P]
    rows: Tensor  # h_c of the seen compositions [P, d]
    counts: Tensor  # n_c [P]
    shrinkage: float  # k
    tau: float  # of the interactions; 0 without them
    added_variance: float = 0.0  # share of the mean variance that was added to the covariance

    @classmethod
    def fit(
        cls, statistics: ClassStatistics, settings: FitSettings = FitSettings(), words: WordEmbeddings | None = None
    ) -> ClosedForm:
        """Fit the classifier to feature statistics of training images. Raises DuplexError if there are none.

        words: text embeddings of states and objects; without them there are no interactions.
        """
        if not len(statistics.pairs):
            raise DuplexError("there is no readable training image; the closed form needs at least one")
        groups = statistics.by_pair()
        added = settings.added_variance
        if added is None:
            added = choose_added_variance(statistics, lambda seen: _prepare_fit(seen, settings, words))
        whitening = shared_whitening(groups, added)
        seen = PairMeans(
            states=statistics.state_of,
            objects=statistics.object_of,
            counts=groups.counts,
            means=groups.means @ whitening,
            shape=(statistics.states, statistics.objects),
        )
        effects, interactions, v, tau = _fit_means(seen, settings, words)
        n, k = groups.counts, 1 / v
        share = (n / (n + k))[:, None]
        fitted = effects.at(seen.states, seen.objects)
        if interactions is not None:
            fitted = fitted + interactions.at(seen.states, seen.objects)
        rows = share * seen.means + (1 - share) * fitted
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
            added_variance=added,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of states and number of objects, (M, N)."""
        return len(self.additive.state), len(self.additive.object)

    def prototypes(self, compositions: Tensor) -> Tensor:
        """The visual prototypes of `compositions` in whitened coordinates [C, d]."""
        n = self.shape[1]
        rows = self.additive.at(compositions // n, compositions % n)
        if self.interactions is not None:
            rows = rows + self.interactions.at(compositions // n, compositions % n)
        positions, place = self._find_seen(compositions)
        rows[positions] = self.rows[place]
        return rows

    def _find_seen(self, compositions: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.searchsorted(self.seen, compositions).clamp(max=len(self.seen) - 1)
        positions = (self.seen[place] == compositions).nonzero()[:, 0]
        return positions, place[positions]

    def log_support(self) -> Tensor:
        """How plausible each composition is [M, N], by training images with similar states and objects:

            log sum_c' pi_c' k(a_m, a_m') k(b_n, b_n'),   pi_c' = n_c' / n,   k(a, a') = exp(-|a - a'|^2 / 4)

        over seen pairs c' = (m', n') with n_c' of the n images; `k` is the overlap of two normal distributions with
        means `a` and `a'`, 1 where they are the same.
        """
        n = self.shape[1]
        share = self.counts.new_zeros(self.shape, dtype=torch.float64)
        share[self.seen // n, self.seen % n] = self.counts.double() / self.counts.sum()
        a, b = self.additive.state.double(), self.additive.object.double()
        k_s = torch.exp(-(torch.cdist(a, a) ** 2) / 4)
        k_o = torch.exp(-(torch.cdist(b, b) ** 2) / 4)
        return (k_s @ share @ k_o).clamp(min=LEAST).log()

    def linear(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Weights `h_c - mu` [C, d] and offsets [C] of the scores `(x - mu) . (h_c - mu) + offset_c`."""
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
        a, b, interactions = self.additive.state, self.additive.object, self.interactions
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
            for i in range(0, len(x), step):  # a few images at a time: their scores stay in the processor's cache
                some = slice(i, i + step)
                cells = out[some].view(-1, m, n) if every else x.new_empty(len(x[some]), m, n)
                torch.add(by_s[some, :, None], by_o[some, None], out=cells)
                if interactions is not None:
                    cells.baddbmm_(interactions.project(x[some]), interactions.objects.T.expand(len(cells), -1, -1))
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
        objects, table = torch.arange(len(b), device=b.device), a.new_empty(self.shape)
        for m in range(len(a)):  # to save memory
            rows = a[m] + b + self.interactions.at(torch.full_like(objects, m), objects)
            table[m] = (rows * rows).sum(1)
        return table


def _prepare_fit(seen: PairMeans, settings: FitSettings, words: WordEmbeddings | None) -> Fit:
    *_, v, tau = _fit_means(seen, settings, words)  # variances are chosen once, on all seen pairs
    fixed = replace(settings, shrinkage=1 / v, interactions=tau)

    def fit(some: PairMeans) -> Compose:
        effects, interactions, _, _ = _fit_means(some, fixed, words)
        if interactions is None:
            return effects.at
        return lambda states, objects: effects.at(states, objects) + interactions.at(states, objects)

    return fit


def _fit_means(
    seen: PairMeans, settings: FitSettings, words: WordEmbeddings | None
) -> tuple[AdditiveEffects, Interactions | None, float, float]:
    v = None if settings.shrinkage is None else 1 / settings.shrinkage
    if words is None or settings.interactions == 0:
        v = interaction_variance(seen, settings.ridge) if v is None else v
        return fit_additive(seen, v, settings.ridge), None, v, 0.0
    states, objects = words
    kernels, tau = KernelFactors.of_words(states, objects), settings.interactions
    if v is None or tau is None:
        likely_v, likely_tau = choose_variances(seen, kernels, settings.ridge)
        v = likely_v if v is None else v
        tau = likely_tau if tau is None else tau
    return *fit_with_interactions(seen, kernels, v, tau, settings.ridge), v, tau


@dataclass(frozen=True)
class FittedStatistics:
    """What a `ClosedForm` was fitted from, to fit it again with further images but without the earlier ones."""

    statistics: ClassStatistics
    settings: FitSettings


@dataclass(frozen=True)
class GroupPosterior(TensorRecord):
    """Linear discriminant analysis: posterior over all states, or over all objects, given a feature.

    Its covariance is that of images about the mean of their state (or object).
    """

    weight: Tensor  # Sigma^-1 e [d, G], with e the differences of the groups' means from the mean of all images
    offset: Tensor  # [G]; -inf for a group without images

    @classmethod
    def fit(cls, groups: Groups) -> GroupPosterior:
        """Fit it to feature statistics grouped by state or by object."""
        whitening = shared_whitening(groups)
        means = groups.means @ whitening  # [G, d]
        middle = (groups.counts @ means) / groups.counts.sum()
        apart = means - middle  # where float32 loses least; the difference is the same for all groups
        offset = groups.counts.log() - 0.5 * (apart * apart).sum(1) - apart @ middle
        return cls(whitening @ apart.T, offset)

    def __call__(self, z: Tensor) -> Tensor:
        """Log-posteriors [B, G] of G states, or of G objects, given features [B, d]."""
        return (z @ self.weight + self.offset).log_softmax(-1)
