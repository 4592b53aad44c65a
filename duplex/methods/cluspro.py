"""ClusPro (Qu et al., "Learning Clustering-based Prototypes for Compositional Zero-Shot Learning", ICLR 2025), over
cached features.

Three paths, trained towards a feature space in which every primitive is a few clusters. Each state has K prototypes
among the factors z^s, each object K among z^o; gradients never reach them. In each batch the images of a primitive are
shared out among its prototypes by optimal transport (Sinkhorn-Knopp), which move by momentum towards the means of
theirs. Two losses use them:

* contrast: an image is drawn to its prototype and away from all those of other primitives, `-log exp(z.p^+ / T) /
  (exp(z.p^+ / T) + sum_- exp(z.p^- / T))`, for states and for objects;
* decorrelation: state and object factors become independent of each other, by the Hilbert-Schmidt criterion, here with
  linear kernels: the squared norm of the batch's cross-covariance of z^s and z^o.

Prototypes have no part in inference, as in the paper: scores are the three paths'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.methods.base import Batch, Setting
from duplex.methods.three_paths import ThreePathOptions, ThreePaths
from duplex.parts.clusters import assign, moved, spread
from duplex.parts.prompts import Prototypes


@dataclass(frozen=True)
class ClusProOptions(ThreePathOptions):
    clusters: int = 5  # K
    momentum: float = 0.99
    temperature: float = 0.1  # T
    contrast: float = 1.0  # weights of the two losses
    decorrelation: float = 1.0

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield self.clusters >= 1, f"clusters is {self.clusters}; it is at least 1"
        yield 0 <= self.momentum <= 1, f"momentum is {self.momentum}; it lies in [0, 1]"
        yield self.temperature > 0, f"temperature is {self.temperature}; it is positive"
        yield self.contrast >= 0 and self.decorrelation >= 0, "contrast and decorrelation are at least 0"


class ClusPro(ThreePaths[ClusProOptions]):
    Options = ClusProOptions
    states: Tensor
    objects: Tensor

    def __init__(self, setting: Setting, options: ClusProOptions) -> None:
        super().__init__(setting, options)
        sizes = {"states": len(setting.labels.states), "objects": len(setting.labels.objects)}
        for name, count in sizes.items():
            rows = normalize(torch.randn(count, options.clusters, setting.dim), dim=-1)
            self.register_buffer(name, rows)  # [M, K, d], [N, K, d]
        self._moved: dict[str, Tensor] = {}

    @torch.no_grad()
    def start(self, train: Batch) -> None:
        """Prototypes start at factors of training images, evenly chosen among each primitive's."""
        assert self.paths.factors is not None
        factors = self.paths.factors(self.paths.features(train.z))
        for name, z, own in zip(("states", "objects"), factors, self.primitives(train.compositions), strict=True):
            rows: Tensor = getattr(self, name)
            rows.copy_(spread(z, own, rows))

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        seen = self.seen(batch, shared)
        z_s, z_o = seen.factored.z_s, seen.factored.z_o
        m, n = self.primitives(batch.compositions)
        contrast = seen.z.new_zeros(())
        for name, z, own in (("states", z_s, m), ("objects", z_o, n)):
            rows: Tensor = getattr(self, name)
            cluster = assign(z.detach(), own, rows)
            contrast = contrast + self.contrast(z, own, cluster, rows)
            if self.training:
                self._moved[name] = moved(rows, z.detach(), own, cluster, self.options.momentum)
        pull, apart = self.options.contrast, self.options.decorrelation
        return {**seen.losses, "contrast": pull * contrast, "decorrelation": apart * dependence(z_s, z_o)}

    def contrast(self, z: Tensor, own: Tensor, cluster: Tensor, rows: Tensor) -> Tensor:
        count, clusters, dim = rows.shape
        logits = (z @ rows.reshape(-1, dim).T) / self.options.temperature  # [B, M K]
        mine = own * clusters + cluster
        primitive = torch.arange(count, device=z.device).repeat_interleave(clusters)  # [M K]
        rivals = logits.masked_fill(primitive == own[:, None], -torch.inf)
        positive = logits.gather(1, mine[:, None])
        return (torch.cat([positive, rivals], dim=1).logsumexp(1) - positive[:, 0]).mean()

    @torch.no_grad()
    def after_batch(self) -> None:
        for name, rows in self._moved.items():
            getattr(self, name).copy_(rows)
        self._moved = {}


def dependence(z_s: Tensor, z_o: Tensor) -> Tensor:
    """`|cov(z^s, z^o)|^2` over a batch; nothing for a single image."""
    centred = (z - z.mean(0) for z in (z_s, z_o))
    a, b = centred
    return ((a.T @ b) / max(len(a) - 1, 1)).square().sum()
