"""Sufficient statistics of labelled features: all that the closed form asks of the training images.

Counts, sums and one second-moment matrix are sums over images. So they stream over blocks of any size, the statistics
of two shards added are those of the whole, new pictures join later, and what was added can be taken out again, which
is how an image is scored by a model that never saw it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.errors import DuplexError


@dataclass(frozen=True)
class Groups:
    """Images in labelled groups: pairs, or the states or objects that pairs share."""

    counts: Tensor  # n_g [G]
    sums: Tensor  # sum of z over each group [G, d]
    moment: Tensor  # sum of z z^T over all images [d, d]

    @property
    def means(self) -> Tensor:
        """[G, d]; zero where a group has no images."""
        return self.sums / self.counts.clamp(min=1)[:, None]


@dataclass(frozen=True)
class Statistics:
    """Of `M x N` compositions, the pairs that have images; float64, on the features' own device."""

    states: int  # M
    objects: int  # N
    pairs: Tensor  # compositions with images, rising [P]
    counts: Tensor  # n_c [P]
    sums: Tensor  # [P, d]
    moment: Tensor  # [d, d]

    @classmethod
    def empty(cls, states: int, objects: int, dim: int, device: torch.device | str = "cpu") -> Statistics:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        pairs = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(states, objects, pairs, zeros(0), zeros(0, dim), zeros(dim, dim))

    @classmethod
    def of(cls, z: Tensor, compositions: Tensor, states: int, objects: int) -> Statistics:
        """Statistics of one block of features `z [n, d]`, which are taken as they are, and their compositions `[n]`."""
        if len(z) != len(compositions):
            raise DuplexError(f"there are {len(z)} features and {len(compositions)} labels; give one label a feature")
        if len(z) and not 0 <= int(compositions.min()) <= int(compositions.max()) < states * objects:
            raise DuplexError(f"a composition lies outside of the {states} x {objects} that exist")
        broken = ~torch.isfinite(z).all(dim=1)
        if broken.any():
            first = int(broken.nonzero()[0])
            raise DuplexError(
                f"{int(broken.sum())} of {len(z)} feature rows are not finite (the first is row {first}); "
                "leave them out"
            )
        z = z.double()
        pairs, place = compositions.unique(return_inverse=True)
        sums = z.new_zeros(len(pairs), z.shape[1]).index_add_(0, place, z)
        return cls(states, objects, pairs, place.bincount(minlength=len(pairs)).double(), sums, z.T @ z)

    def __add__(self, other: Statistics) -> Statistics:
        """Statistics of the images of both."""
        return self._joined(other, 1.0)

    def __sub__(self, other: Statistics) -> Statistics:
        """Statistics without images that were added before; a pair that loses its last image is gone."""
        left = self._joined(other, -1.0)
        if (left.counts < 0).any():
            raise DuplexError("statistics were taken away of images that are not among these; add them first")
        kept = left.counts > 0
        return Statistics(left.states, left.objects, left.pairs[kept], left.counts[kept], left.sums[kept], left.moment)

    def _joined(self, other: Statistics, sign: float) -> Statistics:
        mine, theirs = ((part.states, part.objects, part.dim) for part in (self, other))
        if mine != theirs:
            raise DuplexError(
                f"statistics of {mine[0]} states, {mine[1]} objects and {mine[2]} dimensions cannot join those of "
                f"{theirs[0]}, {theirs[1]} and {theirs[2]}; make both from one label file and one encoder"
            )
        pairs, place = torch.cat([self.pairs, other.pairs]).unique(return_inverse=True)
        counts = torch.cat([self.counts, sign * other.counts])
        sums = torch.cat([self.sums, sign * other.sums])
        return Statistics(
            self.states,
            self.objects,
            pairs,
            counts.new_zeros(len(pairs)).index_add_(0, place, counts),
            sums.new_zeros(len(pairs), self.dim).index_add_(0, place, sums),
            self.moment + sign * other.moment,
        )

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
        """All `M` states; a state without images has count 0."""
        return self._grouped(self.state_of, self.states)

    def by_object(self) -> Groups:
        return self._grouped(self.object_of, self.objects)

    def _grouped(self, place: Tensor, size: int) -> Groups:
        counts = self.counts.new_zeros(size).index_add_(0, place, self.counts)
        return Groups(counts, self.sums.new_zeros(size, self.dim).index_add_(0, place, self.sums), self.moment)
