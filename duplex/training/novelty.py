"""Detect images unlike the training images, of any pair (`in_distribution` of an answer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.evaluation.probabilities import NEW_SHARE, image_weights
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods.gaussian import ClassStatistics, shared_whitening
from duplex.methods.layers import unit

PREFIX = "novelty."
PASSING = 0.95  # share of validation images within the threshold
FIELDS = ("whitening", "means", "threshold")


@dataclass(frozen=True)
class NoveltyDetector:
    """Detects images whose distance to the mean of each training pair exceeds `threshold`.

        D(z) = min_c |z W - m_c|,    W W^T = Sigma^-1,
        m_c = mean of z W over the training images of pair c

    D is the Mahalanobis distance of a unit feature z; Sigma is the covariance of features within
    pairs. A given share of validation images, weighted to have the expected share of images of
    unseen pairs, which are farther away, does not exceed the threshold.
    """

    whitening: Tensor  # W [d, d]
    means: Tensor  # m_c [P, d]
    threshold: Tensor  # []

    @classmethod
    def fit(cls, train: Examples, val: Examples, labels: LabelSpace, passing: float = PASSING) -> NoveltyDetector:
        """Fit to `train`; the threshold accepts the share `passing` of `val`, weighted to `NEW_SHARE`."""
        sizes = len(labels.states), len(labels.objects)
        known = train.compositions >= 0
        z = unit(train.cls.double())[known]
        groups = ClassStatistics.of(z, train.compositions[known], *sizes).by_pair()
        whitening = shared_whitening(groups)
        far = torch.tensor(torch.inf, device=whitening.device)
        model = cls(whitening.float(), (groups.means @ whitening).float(), far)
        distances, order = model.distances(val.cls).sort()
        is_seen = labels.is_seen(val.compositions.cpu().numpy())
        weights = torch.from_numpy(image_weights(is_seen, NEW_SHARE)).to(order.device)
        enough = weights[order].cumsum(0) >= passing - 1e-9  # for rounding
        return cls(model.whitening, model.means, distances[enough][0])

    def distances(self, cls: Tensor) -> Tensor:
        """Distance [B] of each image feature [B, d] to the nearest mean of a training pair."""
        whitened = unit(cls.float()) @ self.whitening
        return torch.cdist(whitened, self.means, compute_mode="donot_use_mm_for_euclid_dist").amin(1)

    def tensors(self) -> dict[str, Tensor]:
        """The detector's tensors, by the names that they have in a checkpoint or an export."""
        return {PREFIX + name: getattr(self, name).detach().cpu().contiguous() for name in FIELDS}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> NoveltyDetector | None:
        """The detector among the tensors of a checkpoint or an exported model; None if there is none."""
        if not any(name.startswith(PREFIX) for name in tensors):
            return None
        return cls(*(tensors[PREFIX + name].to(device) for name in FIELDS))
