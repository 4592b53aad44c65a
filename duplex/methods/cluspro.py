"""ClusPro (Qu et al., "Learning Clustering-based Prototypes for Compositional Zero-Shot Learning", ICLR 2025), over
cached features.

Three paths, trained towards a feature space in which every primitive is a few clusters. Each state has K prototypes
among the factors z^s, each object K among z^o; gradients never reach them. In each batch the images of a primitive are
shared out among its prototypes by optimal transport (Sinkhorn-Knopp), which move by momentum towards the means of
theirs (Eq. 9). Two losses use them:

* contrast (Eq. 10): an image is drawn to its prototype and away from all others, those of its own primitive and of
  the other kind too: `-log exp(z.p^+ / T) / sum_p exp(z.p / T)` over K (M + N) prototypes, for states and for objects;
* decorrelation (Eq. 11): `HSIC(z^s, p^o) + HSIC(z^o, p^s)` with the prototypes that the image has been given, by the
  Hilbert-Schmidt criterion, here with linear kernels: the squared norm of the batch's cross-covariance.

`L = L_c + L_s + L_o + alpha L_contrast + beta L_decorrelation`. The paper's assignment also asks like features for
like plans (the coherence term of Eq. 7), which plain transport does not.
Prototypes have no part in inference, as in the paper: scores are the three paths'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from duplex.layers.clusters import assign, moved, spread
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch, Setting
from duplex.methods.three_paths import ThreePathOptions, ThreePaths


@dataclass(frozen=True)
class ClusProOptions(ThreePathOptions):
    clusters: int = 5  # K
    momentum: float = 0.99
    temperature: float = 0.1  # T
    contrast: float = 0.2  # alpha
    decorrelation: float = 0.5  # beta

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
        k_s, k_o = assign(z_s.detach(), m, self.states), assign(z_o.detach(), n, self.objects)
        contrast = self.contrast(z_s, z_o, m * self.options.clusters + k_s, n * self.options.clusters + k_o)
        apart = dependence(z_s, self.objects[n, k_o]) + dependence(z_o, self.states[m, k_s])
        if self.training:
            momentum = self.options.momentum
            self._moved = {
                "states": moved(self.states, z_s.detach(), m, k_s, momentum),
                "objects": moved(self.objects, z_o.detach(), n, k_o, momentum),
            }
        alpha, beta = self.options.contrast, self.options.decorrelation
        return {**seen.losses, "contrast": alpha * contrast, "decorrelation": beta * apart}

    def contrast(self, z_s: Tensor, z_o: Tensor, mine_s: Tensor, mine_o: Tensor) -> Tensor:
        """Of both factors, whose own prototypes are the `mine`-th among the states' and the objects'."""
        states = self.states.flatten(0, 1)  # [M K, d]
        every = torch.cat([states, self.objects.flatten(0, 1)])  # [(M + N) K, d]
        of_s, of_o = (z @ every.T / self.options.temperature for z in (z_s, z_o))
        return cross_entropy(of_s, mine_s) + cross_entropy(of_o, len(states) + mine_o)

    @torch.no_grad()
    def after_batch(self) -> None:
        for name, rows in self._moved.items():
            getattr(self, name).copy_(rows)
        self._moved = {}


def dependence(x: Tensor, y: Tensor) -> Tensor:
    """`|cov(x, y)|^2` over a batch; nothing for a single image."""
    a, b = (rows - rows.mean(0) for rows in (x, y))
    return ((a.T @ b) / max(len(a) - 1, 1)).square().sum()
