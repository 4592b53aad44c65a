"""Visual prototypes in closed form: class means of features, composed where a pair has no images, and their own metric.

    1. Sigma, the spread of images about their pair's mean, shrunk (covariance.py); x = z W has unit spread
    2. mu_mn = mu + a_m + b_n by weighted least squares over pairs (additive.py), v = Var(interaction) by likelihood;
       with words at hand, + gamma_mn, interactions shared between pairs of like words (interactions.py)
    3. h_c = (n_c x_c + k mu_mn) / (n_c + k), k = 1/v, for seen pairs (empirical Bayes); h_c = mu_mn for all others
    4. g_c(z) = x . h_c - |h_c|^2 / 2 + log n_c    (the last for seen pairs; 0 for others, whose bias is calibrated)

`g` is Bayes' rule for images that scatter normally about `h_c`, up to what all compositions share: linear
discriminant analysis (Fisher 1936) whose unseen means are composed. Nothing is trained. Scores are taken from `mu`,
which all compositions share, where float32 loses least.

Nothing is `M N` rows at rest: `x . mu_mn` is an outer sum (and a product of small factors), `|mu_mn|^2` a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.layers import additive, interactions
from duplex.layers.additive import Additive, Observations, interaction_variance
from duplex.layers.covariance import spread
from duplex.layers.interactions import Interactions, Kernels
from duplex.layers.statistics import Groups, Statistics

Scorer = Callable[[Tensor], Tensor]
Words = tuple[Tensor, Tensor]  # text embeddings of the states [M, w] and of the objects [N, w]
Filler = Callable[[Tensor, Tensor, Tensor], object]  # x [b, d], out [b, C], base [C]: out = base + x . h_c
ROWS = 1 << 14  # columns up to which a scorer makes rows; beyond it, outer sums
CELLS = 1 << 22  # of those, how many are worked on at a time
LEAST = 1e-300  # support that is nothing


@dataclass(frozen=True)
class Settings:
    """What the fit leaves to choose; `None` asks the marginal likelihood."""

    ridge: float = 0.1  # in images: a state seen on so many is drawn half-way to the mean of all states
    shrinkage: float | None = None  # k, in images
    interactions: float | None = None  # tau; 0: none, whatever the words
    prior: bool = True  # log n_c of seen pairs
    predictive: bool = False  # widen a pair's spread by how uncertain its mean is


@dataclass(frozen=True)
class ClosedForm:
    """A fitted model: `M + N + P + 1` vectors and a map. float64 as fitted; `to` sets the precision of scoring."""

    settings: Settings
    whitening: Tensor  # W [d, d]
    additive: Additive
    interactions: Interactions | None
    pairs: Tensor  # seen compositions, rising [P]
    rows: Tensor  # h_c of the seen ones [P, d]
    counts: Tensor  # n_c [P]
    variance: Tensor  # Var(h_c) in each direction, of all compositions [M, N]
    shrinkage: float  # k
    tau: float  # of the interactions; 0 without them

    @classmethod
    def fit(cls, statistics: Statistics, settings: Settings = Settings(), words: Words | None = None) -> ClosedForm:
        """From sufficient statistics and, where there is a text tower, its embeddings of the words; in float64."""
        if not len(statistics.pairs):
            raise DuplexError("there is no readable training image")
        groups = statistics.by_pair()
        whitening = spread(groups).whitening
        shape = statistics.states, statistics.objects
        seen = Observations(statistics.state_of, statistics.object_of, groups.counts, groups.means @ whitening, shape)
        effects, mixed, v, tau = _means(seen, settings, words)
        n, k = groups.counts, 1 / v
        share = (n / (n + k))[:, None]
        fitted = effects.at(seen.states, seen.objects)
        if mixed is not None:
            fitted = fitted + mixed.at(seen.states, seen.objects)
        rows = share * seen.means + (1 - share) * fitted
        # an unseen mean: what the fit leaves open and the interaction; a seen one: what its images leave of both
        left = 1 / (n + k) + (1 - share[:, 0]) ** 2 * effects.variance[seen.states, seen.objects]
        variance = (effects.variance + v).index_put((seen.states, seen.objects), left)
        return cls(settings, whitening, effects, mixed, statistics.pairs, rows, n, variance, k, tau)

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> ClosedForm:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        effects = Additive(*(moved(getattr(self.additive, part.name)) for part in fields(Additive)))
        mixed = self.interactions and Interactions(
            *(moved(getattr(self.interactions, part.name)) for part in fields(Interactions))
        )
        return replace(
            self,
            whitening=moved(self.whitening),
            additive=effects,
            interactions=mixed,
            pairs=moved(self.pairs),
            rows=moved(self.rows),
            counts=moved(self.counts),
            variance=moved(self.variance),
        )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.additive.state), len(self.additive.object)

    # -- rows ---------------------------------------------------------------------------------------------------

    def rows_of(self, columns: Tensor) -> Tensor:
        """`h_c` of some compositions, in whitened coordinates [C, d]."""
        n = self.shape[1]
        rows = self.additive.at(columns // n, columns % n)
        if self.interactions is not None:
            rows = rows + self.interactions.at(columns // n, columns % n)
        mine, place = self._seen_among(columns)
        rows[mine] = self.rows[place]
        return rows

    def _seen_among(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Places in `columns` of seen compositions, and their places among the seen ones."""
        place = torch.searchsorted(self.pairs, columns).clamp(max=len(self.pairs) - 1)
        mine = (self.pairs[place] == columns).nonzero()[:, 0]
        return mine, place[mine]

    def support(self) -> Tensor:
        """How far training images reach a composition with its state or its object mistaken for another [M, N]: the log
        of the share of images that are, or overlap, of state `m` and of object `n`,

            log sum_c' pi_c' k(a_m, a_m') k(b_n, b_n'),   pi_c' = n_c' / n,   k(a, a') = exp(-|a - a'|^2 / 4),

        where `k` is the overlap `int N(x; a, I) N(x; a', I) dx` of two spreads of images, 1 where they are the same.
        """
        n = self.shape[1]
        share = self.counts.new_zeros(self.shape, dtype=torch.float64)
        share[self.pairs // n, self.pairs % n] = self.counts.double() / self.counts.sum()
        k_s, k_o = overlaps(self.additive.state), overlaps(self.additive.object)
        return (k_s @ share @ k_o).clamp(min=LEAST).log()

    # -- scores -------------------------------------------------------------------------------------------------

    def linear(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """`g_c(z) = (x - mu) . h_c + offset_c` as rows [C, d], from the origin `mu`, and offsets [C]."""
        h, prior = self.rows_of(columns) - self.additive.mean, self.rows.new_zeros(len(columns))
        if self.settings.prior:
            mine, place = self._seen_among(columns)
            prior[mine] = self.counts[place].log()
        return h, prior - 0.5 * (h * h).sum(1)

    def scorer(self, columns: Tensor, rows: int = ROWS) -> Scorer:
        """A function from features `z [B, d]` to `g_c(z) [B, C]`. Short lists of columns by their rows, long ones by
        outer sums with the seen pairs as corrections on top."""
        n = self.shape[1]
        mine, place = self._seen_among(columns)
        prior = self.rows.new_zeros(len(columns))
        if self.settings.prior:
            prior[mine] = self.counts[place].log()
        fill, halves = self._by_rows(columns) if len(columns) <= rows else self._by_sums(columns, mine, place)
        precision = 1 / (1 + self.variance[columns // n, columns % n])  # of x about h_c, in each direction [C]
        certain = prior + 0.5 * len(self.whitening) * precision.log()

        def scores(z: Tensor) -> Tensor:
            x = z.to(self.whitening) @ self.whitening - self.additive.mean
            out = x.new_empty(len(x), len(columns))
            if not self.settings.predictive:
                fill(x, out, prior - halves)
                return out
            fill(x, out, -halves)
            far = 0.5 * (x * x).sum(1, keepdim=True)  # |x|^2 / 2: with a spread of each pair's own, it matters
            return out.sub_(far).mul_(precision).add_(certain)

        return scores

    def _by_rows(self, columns: Tensor) -> tuple[Filler, Tensor]:
        """`x . h_c` and `|h_c|^2 / 2`."""
        h = self.rows_of(columns) - self.additive.mean
        return (lambda x, out, base: torch.addmm(base, x, h.T, out=out)), 0.5 * (h * h).sum(1)

    def _by_sums(self, columns: Tensor, mine: Tensor, place: Tensor) -> tuple[Filler, Tensor]:
        """The same from `M + N` vectors: x . mu_mn = x . a_m + x . b_n + x . gamma_mn, from the origin `mu`."""
        m, n = self.shape
        a, b, mixed = self.additive.state, self.additive.object, self.interactions
        own = self.rows[place] - self.additive.mean
        whole = torch.equal(columns, torch.arange(m * n, device=columns.device))
        squares = self._squares().reshape(-1)[columns]  # |h_c|^2 [C]
        squares[mine] = (own * own).sum(1)

        step = max(1, CELLS // (m * n))

        def fill(x: Tensor, out: Tensor, base: Tensor) -> None:
            by_s, by_o, corrections = x @ a.T, x @ b.T, torch.addmm(base[mine], x, own.T)
            for i in range(0, len(x), step):  # a few images at a time: their scores stay in the processor's cache
                some = slice(i, i + step)
                cells = out[some].view(-1, m, n) if whole else x.new_empty(len(x[some]), m, n)
                torch.add(by_s[some, :, None], by_o[some, None], out=cells)
                if mixed is not None:
                    cells.baddbmm_(mixed.along(x[some]), mixed.objects.T.expand(len(cells), -1, -1))
                if whole:
                    out[some].add_(base)
                else:
                    torch.add(cells.flatten(1)[:, columns], base, out=out[some])
            out.index_copy_(1, mine, corrections)

        return fill, 0.5 * squares

    def _squares(self) -> Tensor:
        """`|mu_mn - mu|^2` [M, N], a state at a time where it has no formula in `M + N` numbers."""
        a, b = self.additive.state, self.additive.object
        if self.interactions is None:
            return (a * a).sum(1)[:, None] + (b * b).sum(1) + 2 * a @ b.T
        every, table = torch.arange(len(b), device=b.device), a.new_empty(self.shape)
        for m in range(len(a)):
            rows = a[m] + b + self.interactions.at(torch.full_like(every, m), every)
            table[m] = (rows * rows).sum(1)
        return table


def overlaps(means: Tensor) -> Tensor:
    """`exp(-|a - a'|^2 / 4)` of every two of some means [G, d], in double precision [G, G]."""
    return torch.exp(-(torch.cdist(means.double(), means.double()) ** 2) / 4)


def _means(
    seen: Observations, settings: Settings, words: Words | None
) -> tuple[Additive, Interactions | None, float, float]:
    """`mu_mn`'s parts, `v` and `tau`."""
    v = None if settings.shrinkage is None else 1 / settings.shrinkage
    if words is None or settings.interactions == 0:
        v = interaction_variance(seen, settings.ridge) if v is None else v
        return additive.fit(seen, v, settings.ridge), None, v, 0.0
    kernels, tau = Kernels.of(*words), settings.interactions
    if v is None or tau is None:
        likely = interactions.choose(seen, kernels, settings.ridge)
        v, tau = likely[0] if v is None else v, likely[1] if tau is None else tau
    return *interactions.fit(seen, kernels, v, tau, settings.ridge), v, tau


@dataclass(frozen=True)
class Posterior:
    """`log p(group | z)` of a one-way layout: the state's or the object's own means, spread and frequency."""

    weight: Tensor  # Sigma^-1 e [d, G], of the means' distances e from the mean of all images
    offset: Tensor  # [G]; -inf for a group without images

    @classmethod
    def fit(cls, groups: Groups) -> Posterior:
        """From statistics grouped by state or by object; the spread about a state holds that of its objects."""
        whitening = spread(groups).whitening
        means = groups.means @ whitening  # [G, d]
        middle = (groups.counts @ means) / groups.counts.sum()
        apart = means - middle  # where float32 loses least; what all groups share is free
        offset = groups.counts.log() - 0.5 * (apart * apart).sum(1) - apart @ middle
        return cls(whitening @ apart.T, offset)

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Posterior:
        return Posterior(*(getattr(self, part.name).to(device, dtype) for part in fields(Posterior)))

    def __call__(self, z: Tensor) -> Tensor:
        """[B, d] -> [B, G]"""
        return (z @ self.weight + self.offset).log_softmax(-1)
