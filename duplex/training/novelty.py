"""Detect images unlike the training images, of any pair (`in_distribution` of an answer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duplex.data.negatives import KINDS
from duplex.evaluation.probabilities import NEW_SHARE, image_weights
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods.gaussian import ClassStatistics, shared_whitening
from duplex.methods.layers import unit

PREFIX = "novelty."
PASSING = 0.95  # least share of validation images within the threshold
HIGHER = (0.98, 0.97, 0.96)  # tried first
FEWER = 0.02  # of refused drawn images, on which a higher share may cost so much
FIELDS = ("whitening", "means", "threshold", "negatives", "scale", "refused")


@dataclass(frozen=True)
class NoveltyDetector:
    """Detects images whose distance to the training images exceeds `threshold`.

        D(z) = max(d, o + s (d - e)),    d = min_c |z W - m_c|,    e = min_k |z W - n_k|,
        m_c = mean of z W over the training images of pair c,    W W^T = Sigma^-1

    d is the Mahalanobis distance of a unit feature z to the nearest pair; Sigma is the covariance
    of features within pairs. e is the distance to the nearest n_k, which are drawn images of no
    pair (`data.negatives`). With o and s, both terms have the same mean and variance over
    validation images. Without drawn images, D = d.

    A share of validation images, weighted to have the expected share of images of unseen pairs,
    which are farther away, does not exceed the threshold: the largest of `HIGHER` that refuses
    hardly fewer drawn images than `PASSING` does, of kinds that the detector does not have.
    """

    whitening: Tensor  # W [d, d]
    means: Tensor  # m_c [P, d]
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
        groups = ClassStatistics.of(z, train.compositions[known], *sizes).by_pair()
        whitening = shared_whitening(groups)
        means = (groups.means @ whitening).float()
        none = means.new_zeros(0)
        model = cls(whitening.float(), means, means.new_tensor(torch.inf), means[:0], means.new_tensor([0, 1]), none)
        is_seen = labels.is_seen(val.compositions.cpu().numpy())
        weights = torch.from_numpy(image_weights(is_seen, NEW_SHARE)).to(means.device)
        if negatives is None:
            return model._calibrated(val, weights, passing)
        parts = (unit(negatives.to(means.device)) @ model.whitening).chunk(len(KINDS))
        refused = model._refused(parts, val, weights, passing)
        for share in HIGHER:
            higher = model._refused(parts, val, weights, share)
            if share > passing and higher.mean() >= refused.mean() - FEWER:
                passing, refused = share, higher
                break
        return replace(model, negatives=torch.cat(parts), refused=refused)._calibrated(val, weights, passing)

    def _refused(self, parts: Sequence[Tensor], val: Examples, weights: Tensor, passing: float) -> Tensor:
        # share of each kind of drawn images that is refused by a detector with those of the other kinds
        rates = []
        for kind, part in enumerate(parts):
            others = torch.cat([other for number, other in enumerate(parts) if number != kind])
            without = replace(self, negatives=others)._calibrated(val, weights, passing)
            rates.append((without._distances(part) > without.threshold).float().mean())
        return torch.stack(rates)

    def _calibrated(self, val: Examples, weights: Tensor, passing: float) -> NoveltyDetector:
        # with `scale` and `threshold` for validation images of the given weights [V]
        x = unit(val.cls.float()) @ self.whitening
        scale = self.scale
        if len(self.negatives):
            d = nearest(x, self.means)
            excess = d - nearest(x, self.negatives)
            means, deviations = zip(*(_mean_and_deviation(each, weights) for each in (d, excess)), strict=True)
            s = deviations[0] / deviations[1].clamp(min=1e-9)
            scale = torch.stack([means[0] - s * means[1], s]).float()
        scaled = replace(self, scale=scale)
        distances, order = scaled._distances(x).sort()
        enough = weights[order].cumsum(0) >= passing - 1e-9  # for rounding
        return replace(scaled, threshold=distances[enough][0])

    def distances(self, cls: Tensor) -> Tensor:
        """The distance D [B] of each image feature [B, d]."""
        return self._distances(unit(cls.float()) @ self.whitening)

    def _distances(self, x: Tensor) -> Tensor:
        d = nearest(x, self.means)
        if not len(self.negatives):
            return d
        return torch.maximum(d, self.scale[0] + self.scale[1] * (d - nearest(x, self.negatives)))

    def tensors(self) -> dict[str, Tensor]:
        """The detector's tensors, by the names that they have in a checkpoint or an export."""
        return {PREFIX + name: getattr(self, name).detach().cpu().contiguous() for name in FIELDS}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> NoveltyDetector | None:
        """The detector among the tensors of a checkpoint or an exported model; None if there is none."""
        if not any(name.startswith(PREFIX) for name in tensors):
            return None
        return cls(*(tensors[PREFIX + name].to(device) for name in FIELDS))


def nearest(x: Tensor, points: Tensor) -> Tensor:
    """The distance [B] of each row of `x` [B, d] to the nearest of `points` [P, d]."""
    return torch.cdist(x, points, compute_mode="donot_use_mm_for_euclid_dist").amin(1)


def _mean_and_deviation(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = weights @ values.double()
    return mean, (weights @ (values.double() - mean).square()).sqrt()
