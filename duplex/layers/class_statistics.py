"""Count and sum of image features by composition, and their covariance, to fit the linear classifier `ClosedForm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.errors import DuplexError


@dataclass(frozen=True)
class Groups:
    """Number of images and sum of their features per group: composition, state or object."""

    counts: Tensor  # n_g [G]
    sums: Tensor  # sum of z over each group [G, d]
    moment: Tensor  # sum of z z^T over all images [d, d]

    @property
    def means(self) -> Tensor:
        """Mean feature of each group [G, d]; zero for a group without images."""
        return self.sums / self.counts.clamp(min=1)[:, None]


@dataclass(frozen=True)
class ClassStatistics:
    """Number of images and sum of their features per composition, and second moment of all features, in float64."""

    states: int  # M
    objects: int  # N
    pairs: Tensor  # compositions with images, rising [P]
    counts: Tensor  # n_c [P]
    sums: Tensor  # [P, d]
    moment: Tensor  # [d, d]

    @classmethod
    def of(cls, z: Tensor, compositions: Tensor, states: int, objects: int) -> ClassStatistics:
        """Statistics of images with features `z` [n, d], which are not normalised here, and `compositions` [n].

        Raises DuplexError for an index out of range and for features that are not finite.
        """
        if len(z) != len(compositions):
            raise DuplexError(
                f"there are {len(z)} features and {len(compositions)} labels; expected one label per feature"
            )
        if len(z) and not 0 <= int(compositions.min()) <= int(compositions.max()) < states * objects:
            raise DuplexError(f"compositions must be from 0 to {states * objects - 1}, for {states} x {objects} labels")
        broken = ~torch.isfinite(z).all(dim=1)
        if broken.any():
            first = int(broken.nonzero()[0])
            raise DuplexError(
                f"{int(broken.sum())} of {len(z)} feature rows are not finite (the first is row {first}); remove them"
            )
        z = z.double()
        pairs, place = compositions.unique(return_inverse=True)
        sums = z.new_zeros(len(pairs), z.shape[1]).index_add_(0, place, z)
        return cls(states, objects, pairs, place.bincount(minlength=len(pairs)).double(), sums, z.T @ z)

    def relabelled(self, states: Tensor, objects: Tensor, shape: tuple[int, int]) -> ClassStatistics:
        """The statistics in a larger label space (M, N), given the new, rising index of each state and object."""
        pairs = states[self.state_of] * shape[1] + objects[self.object_of]
        return ClassStatistics(*shape, pairs, self.counts, self.sums, self.moment)

    def __add__(self, other: ClassStatistics) -> ClassStatistics:
        """The statistics of two sets of images with the same label space together."""
        pairs, place = torch.cat([self.pairs, other.pairs]).unique(return_inverse=True)
        counts = self.counts.new_zeros(len(pairs)).index_add_(0, place, torch.cat([self.counts, other.counts]))
        sums = self.sums.new_zeros(len(pairs), self.dim).index_add_(0, place, torch.cat([self.sums, other.sums]))
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

    def by_pair(self) -> Groups:
        return Groups(self.counts, self.sums, self.moment)

    def by_state(self) -> Groups:
        return self._grouped(self.state_of, self.states)

    def by_object(self) -> Groups:
        return self._grouped(self.object_of, self.objects)

    def _grouped(self, place: Tensor, size: int) -> Groups:
        counts = self.counts.new_zeros(size).index_add_(0, place, self.counts)
        return Groups(counts, self.sums.new_zeros(size, self.dim).index_add_(0, place, self.sums), self.moment)


def within_group_covariance(groups: Groups) -> tuple[Tensor, float]:
    """Pooled covariance [d, d] of features about their group's mean, and its degrees of freedom.

    If no group has two images, the covariance is about the mean of all images.
    """
    counts, means = groups.counts, groups.means
    free = float(counts.sum() - (counts > 0).sum())
    if free < 1:
        total = groups.sums.sum(0, keepdim=True)
        counts, means = counts.sum()[None], total / counts.sum().clamp(min=1)
        free = max(float(counts.sum()) - 1, 1.0)
    scatter = groups.moment - (means * counts[:, None]).T @ means  # sum z z^T - sum n_g m_g m_g^T
    return (scatter + scatter.T) / (2 * free), free


def oas_shrinkage(covariance: Tensor, free: float) -> float:
    """Weight from 0 to 1 with which a covariance S is shrunk towards `tr(S)/d I`, by OAS (Chen et al., 2010).

    free: degrees of freedom of S, the number of images minus the number of means.
    """
    d = len(covariance)
    trace, squares = float(covariance.trace()), float((covariance * covariance).sum())  # tr S, tr S^2
    above = (1 - 2 / d) * squares + trace**2
    below = (free + 1 - 2 / d) * (squares - trace**2 / d)
    return min(1.0, above / below) if below > 0 else 1.0


def shared_whitening(groups: Groups, added: float = 0.0) -> Tensor:
    """Whitening map `W` [d, d] that makes the covariance of features about their group's mean the identity.

    `W W^T = Sigma^-1`, where `Sigma = (1 - rho) S + rho tr(S)/d I` is the sample covariance S, shrunk so that it is
    positive definite for any number of images. `rho` is OAS's (Chen, Wiesel, Eldar and Hero 2010, Eq. 23); the
    shrinkage of Ledoit and Wolf would need a second pass over the images.

    added: share of the mean variance tr(S)/d to add to the diagonal as well.
    """
    sample, free = within_group_covariance(groups)
    d = len(sample)
    eye = torch.eye(d, dtype=sample.dtype, device=sample.device)
    level = float(sample.trace()) / d
    if not level > 1e-12:  # no variation: the largest variance of unit features
        sample, level = eye / d, 1 / d
    rho = oas_shrinkage(sample, free)
    values, vectors = torch.linalg.eigh((1 - rho) * sample + (rho + added) * level * eye)
    values = values.clamp(min=1e-9 * level)  # rounding may give a zero eigenvalue a negative sign
    whitening: Tensor = vectors / values.sqrt()
    return whitening
