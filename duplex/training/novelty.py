"""Detect images unlike all pairs of words (`in_distribution` of an answer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from duplex.data.negatives import KINDS
from duplex.evaluation.probabilities import NEW_SHARE, image_weights
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods.gaussian import ClassStatistics, PairMeans, additive_effects, shared_whitening
from duplex.methods.layers import unit

PREFIX = "novelty."
PASSING = 0.95  # least share of validation images within the threshold
HIGHER = (0.98, 0.97, 0.96)  # tried first
FEWER = 0.02  # of refused drawn images, on which a higher share may cost so much
FIELDS = ("whitening", "means", "states", "objects", "threshold", "negatives", "scale", "refused")


@dataclass(frozen=True)
class Placed:
    """Whitened unit features and their distances to the nearest pair."""

    x: Tensor  # z W [B, d]
    d: Tensor  # [B]


@dataclass(frozen=True)
class NoveltyDetector:
    """Detects images whose distance to each pair of words exceeds `threshold`.

        D(z) = max(d, o + s (d - e)),    e = min_k |z W - n_k|,    W W^T = Sigma^-1
        d = min(min_c |z W - m_c|, min_mn |z W - u_m - v_n|)

    d is the Mahalanobis distance of a unit feature z to the nearest pair; Sigma is the covariance
    of features within pairs. m_c is the mean of z W over the training images of pair c, and
    u_m + v_n predicts the mean of a pair of words from their effects on these means, also of a
    pair without images. e is the distance to the nearest n_k, which are drawn images of no pair
    (`data.negatives`). With o and s, both terms have the same mean and variance over validation
    images. Without drawn images, D = d.

    A share of validation images, weighted to have the expected share of images of unseen pairs,
    which are farther away, does not exceed the threshold: the largest of `HIGHER` that refuses
    hardly fewer drawn images than `PASSING` does, of kinds that the detector does not have.
    """

    whitening: Tensor  # W [d, d]
    means: Tensor  # m_c [P, d]
    states: Tensor  # u_m [M, d], of states with training images
    objects: Tensor  # v_n [N, d]
    threshold: Tensor  # []
    negatives: Tensor  # n_k [K, d]
    scale: Tensor  # o, s [2]
    refused: Tensor  # share of each of `KINDS` that is refused if the detector has no images of this kind; [0] without

    @classmethod
    def fit(
        cls,
        train: Examples,
        val: Examples,
        labels: LabelSpace,
        negatives: Tensor | None = None,
        passing: float = PASSING,
    ) -> NoveltyDetector:
        """Fit to `train`; the threshold accepts at least the share `passing` of `val`, weighted to `NEW_SHARE`.

        negatives: features [K, d] of drawn images, as many of each of `KINDS`; None: none, and
            exactly this share passes.
        """
        sizes = len(labels.states), len(labels.objects)
        known = train.compositions >= 0
        z = unit(train.cls.double())[known]
        statistics = ClassStatistics.of(z, train.compositions[known], *sizes)
        groups = statistics.by_pair()
        whitening = shared_whitening(groups)
        seen = PairMeans(statistics.state_of, statistics.object_of, groups.counts, groups.means @ whitening, sizes)
        means = seen.means.float()
        states, objects = word_terms(seen)
        model = cls(
            whitening=whitening.float(),
            means=means,
            states=states,
            objects=objects,
            threshold=means.new_tensor(torch.inf),
            negatives=means[:0],
            scale=means.new_tensor([0, 1]),
            refused=means.new_zeros(0),
        )
        is_seen = labels.is_seen(val.compositions.cpu().numpy())
        weights = torch.from_numpy(image_weights(is_seen, NEW_SHARE)).to(means.device)
        x = model._placed(val.cls)
        if negatives is None:
            return model._calibrated(x, weights, passing)
        parts = [model._placed(part) for part in negatives.to(means.device).chunk(len(KINDS))]
        refused = model._refused(parts, x, weights, passing)
        for share in HIGHER:
            higher = model._refused(parts, x, weights, share)
            if share > passing and higher.mean() >= refused.mean() - FEWER:
                passing, refused = share, higher
                break
        drawn = torch.cat([part.x for part in parts])
        return replace(model, negatives=drawn, refused=refused)._calibrated(x, weights, passing)

    def _placed(self, cls: Tensor) -> Placed:
        x = unit(cls.float()) @ self.whitening
        predicted = nearest_sum(x.double(), *self._terms).float()
        return Placed(x, torch.minimum(nearest(x, self.means), predicted))

    @cached_property
    def _terms(self) -> tuple[Tensor, Tensor, Tensor]:
        u = self.states.double()
        v = self.objects.double()
        return u, v, squared_sums(u, v)

    def _refused(self, parts: Sequence[Placed], val: Placed, weights: Tensor, passing: float) -> Tensor:
        # share of each kind of drawn images that is refused by a detector with those of the other kinds
        rates = []
        for kind, part in enumerate(parts):
            others = torch.cat([other.x for number, other in enumerate(parts) if number != kind])
            without = replace(self, negatives=others)._calibrated(val, weights, passing)
            rates.append((without._distances(part) > without.threshold).float().mean())
        return torch.stack(rates)

    def _calibrated(self, val: Placed, weights: Tensor, passing: float) -> NoveltyDetector:
        # with `scale` and `threshold` for validation images of the given weights [V]
        scale = self.scale
        if len(self.negatives):
            excess = val.d - nearest(val.x, self.negatives)
            means, deviations = zip(*(_mean_and_deviation(each, weights) for each in (val.d, excess)), strict=True)
            s = deviations[0] / deviations[1].clamp(min=1e-9)
            scale = torch.stack([means[0] - s * means[1], s]).float()
        scaled = replace(self, scale=scale)
        distances, order = scaled._distances(val).sort()
        enough = weights[order].cumsum(0) >= passing - 1e-9  # for rounding
        return replace(scaled, threshold=distances[enough][0])

    def distances(self, cls: Tensor) -> Tensor:
        """The distance D [B] of each image feature [B, d]."""
        return self._distances(self._placed(cls))

    def _distances(self, images: Placed) -> Tensor:
        if not len(self.negatives):
            return images.d
        excess = images.d - nearest(images.x, self.negatives)
        return torch.maximum(images.d, self.scale[0] + self.scale[1] * excess)

    def tensors(self) -> dict[str, Tensor]:
        """The detector's tensors, by the names that they have in a checkpoint or an export."""
        return {PREFIX + name: getattr(self, name).detach().cpu().contiguous() for name in FIELDS}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> NoveltyDetector | None:
        """The detector among the tensors of a checkpoint or an exported model; None if there is none."""
        if not any(name.startswith(PREFIX) for name in tensors):
            return None
        return cls(*(tensors[PREFIX + name].to(device) for name in FIELDS))


def word_terms(seen: PairMeans) -> tuple[Tensor, Tensor]:
    """`u` [M, d] and `v` [N, d] of states and objects with images: their sums predict pairs' means."""
    effects = additive_effects(seen)
    states = effects.mean + effects.state[seen.states.unique()]
    return states.float(), effects.object[seen.objects.unique()].float()


def squared_sums(u: Tensor, v: Tensor) -> Tensor:
    """`|u_m + v_n|^2` [M, N] of rows of `u` [M, d] and `v` [N, d]."""
    return u.square().sum(1)[:, None] + v.square().sum(1) + 2 * u @ v.T


def nearest_sum(x: Tensor, u: Tensor, v: Tensor, squares: Tensor) -> Tensor:
    """The distance [B] of each row of `x` [B, d] to the nearest `u_m + v_n`, whose `squared_sums` are given.

    min_mn |x - u_m - v_n|^2 = |x|^2 + min_m (min_n (|u_m + v_n|^2 - 2 x.v_n) - 2 x.u_m)
    """
    by_object = -2 * x @ v.T  # [B, N]
    by_state = torch.stack([(by_object + row).amin(1) for row in squares], dim=1) - 2 * x @ u.T  # [B, M]
    return (x.square().sum(1) + by_state.amin(1)).clamp(min=0).sqrt()


def nearest(x: Tensor, points: Tensor) -> Tensor:
    """The distance [B] of each row of `x` [B, d] to the nearest of `points` [P, d]."""
    return torch.cdist(x, points, compute_mode="donot_use_mm_for_euclid_dist").amin(1)


def _mean_and_deviation(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = weights @ values.double()
    return mean, (weights @ (values.double() - mean).square()).sqrt()
