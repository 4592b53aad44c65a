"""Detect images unlike the training images, by the distance to the mean feature of the nearest pair.

    D(z) = min_c |z W - m_c|,    m_c = mean of z W over the training images of pair c,    W W^T = Sigma^-1

is the Mahalanobis distance of a unit feature `z`; `Sigma` is the covariance of features within pairs, which all pairs
share. Images of unseen pairs lie farther than those of seen ones, and images of something else farther still.
Validation images, which show seen and unseen pairs, set the threshold: a given share of their distances does not
exceed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.features.examples import Examples
from duplex.labels import LabelSpace
from duplex.layers.class_statistics import ClassStatistics, shared_whitening
from duplex.layers.factors import unit

PREFIX = "known_images."
PASSING = 0.95  # share of the validation images that count as known
FIELDS = ("whitening", "means", "threshold")


@dataclass(frozen=True)
class KnownImages:
    """Detector of images unlike the training images: known ones are at most `threshold` away from a pair's mean."""

    whitening: Tensor  # W [d, d]
    means: Tensor  # m_c [P, d]
    threshold: Tensor  # []

    @classmethod
    def fit(cls, train: Examples, val: Examples, labels: LabelSpace, passing: float = PASSING) -> KnownImages:
        """Compute pair means and covariance from training images, the distance threshold from validation images.

        passing: share of the validation images that count as known.
        """
        sizes = len(labels.states), len(labels.objects)
        groups = ClassStatistics.of(unit(train.cls.double()), train.compositions, *sizes).by_pair()
        whitening = shared_whitening(groups)
        far = torch.tensor(torch.inf, device=whitening.device)
        model = cls(whitening.float(), (groups.means @ whitening).float(), far)
        distances = model.distances(val.cls)
        return cls(model.whitening, model.means, torch.quantile(distances, passing, interpolation="higher"))

    def distances(self, cls: Tensor) -> Tensor:
        """Return the distance [B] of each image feature [B, d] to the mean feature of the nearest training pair."""
        whitened = unit(cls.float()) @ self.whitening
        return torch.cdist(whitened, self.means, compute_mode="donot_use_mm_for_euclid_dist").amin(1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the detector's whitening, pair means and threshold by their names in a checkpoint or an export."""
        return {PREFIX + name: getattr(self, name).detach().cpu().contiguous() for name in FIELDS}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> KnownImages | None:
        """Return the detector of images unlike the training images, from a checkpoint's or an exported model's tensors.

        None if the tensors contain no detector.
        """
        if not any(name.startswith(PREFIX) for name in tensors):
            return None
        return cls(*(tensors[PREFIX + name].to(device) for name in FIELDS))
