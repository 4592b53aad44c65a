"""ClusPro: training pulls the features of every state and every object into a few clusters.

Qu et al., "Learning Clustering-based Prototypes for Compositional Zero-Shot Learning", ICLR 2025.

    L_contrast = -log exp(z.p^+ / T) / sum_p exp(z.p / T)                   Eq. 10, for z^s and for z^o
    L_decorrelation = HSIC(z^s, p^o) + HSIC(z^o, p^s)                       Eq. 11
    L = L_c + L_s + L_o + alpha L_contrast + beta L_decorrelation
    S = p(c|x) + p(s|x) p(o|x)

* p: prototypes without gradients, K per state and K per object: cluster centres of z^s and z^o.
  Optimal transport (Sinkhorn-Knopp) assigns a batch's images to those of their state (object);
  then they move by momentum towards the means of their images (Eq. 9)
* p^+: the prototype that an image is assigned to;  sum_p: over all K (M + N) prototypes
* HSIC: Hilbert-Schmidt criterion with linear kernels, squared norm of the cross-covariance
* L_c, L_s, L_o, p(.|x): cross-entropies and posteriors by prompts on three paths

In the paper, a coherence term (Eq. 7) also makes transport plans similar for images with similar
features; it is left out here. As in the paper, clusters have no part in inference.

With `form: published`, a second pair of disentanglers follows the first, as in the code: logits and
the contrast compare the outputs of the second, in the contrast with the second's outputs for the
prototypes, which themselves are clusters of the first's outputs; the first reads z before it is scaled
to unit length. The code adds no L_decorrelation (`decorrelation: 0`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from duplex.methods.base import Batch, MethodContext
from duplex.methods.families import Form, ThreePathOptions, ThreePaths
from duplex.methods.layers import CompositionIndex, FactorNetworks
from duplex.methods.prompts import Prototypes
from duplex.options import Count, NonNegative, Positive, Share

SHARPNESS = 0.05  # weight of the entropy in Sinkhorn-Knopp
ROUNDS = 3  # its iterations
Factors = tuple[Tensor, Tensor]  # of states and of objects [B, d]


@dataclass(frozen=True)
class ClusProOptions(ThreePathOptions):
    clusters: Count = 5  # prototypes K per primitive
    momentum: Share = 0.99  # weight of a prototype's old value per batch
    temperature: Positive = 0.1  # T of the contrast
    contrast: NonNegative = 0.2  # weight alpha of L_contrast
    decorrelation: NonNegative = 0.5  # weight beta of L_decorrelation
    form: Form = "plain"  # published: disentanglers twice, as in the published code


class ClusPro(ThreePaths[ClusProOptions]):
    """ClusPro: three paths; training pulls factors towards clusters of their state or object."""

    states: Tensor  # prototypes [M, K, d]
    objects: Tensor  # prototypes [N, K, d]

    def __init__(self, context: MethodContext, options: ClusProOptions) -> None:
        super().__init__(context, options)
        labels = context.labels
        self.second: FactorNetworks | None = None
        if options.form == "published":
            is_normed = options.disentangler == "batch_norm"
            self.second = FactorNetworks(context.tower.dim, options.width, batch_norm=is_normed)
        for name, count in (("states", len(labels.states)), ("objects", len(labels.objects))):
            self.register_buffer(name, normalize(torch.randn(count, options.clusters, context.dim), dim=-1))
        self._pending: dict[str, Tensor] = {}  # moved by `losses`, for `after_batch`

    @torch.no_grad()
    def start(self, train: Batch) -> None:
        _, factors, _ = self.factors(train.cls)
        groups = self.primitives(train.compositions)
        for name, z, group in zip(("states", "objects"), factors, groups, strict=True):
            prototypes: Tensor = getattr(self, name)
            prototypes.copy_(initial_clusters(z, group, prototypes))

    def factors(self, cls: Tensor) -> tuple[Tensor, Factors, Factors]:
        """Unit features [B, d], their factors, and what the second disentanglers make of these."""
        assert self.paths.factors is not None
        z = self.paths.adapt(cls)
        if self.second is None:
            first = self.paths.factors(z)
            return z, first, first
        z_s, z_o = self.paths.factors(self.unscaled(cls, z))
        return z, (z_s, z_o), (self.second.state(z_s), self.second.object(z_o))

    def factor_losses(self, batch: Batch, t: Prototypes) -> tuple[Factors, Factors, dict[str, Tensor]]:
        """Both pairs of factors, and the losses L_c, L_s and L_o by name."""
        if self.second is None:
            _, (z_s, z_o, _, _), losses = self.path_losses(batch, t)
            return (z_s, z_o), (z_s, z_o), losses
        z, first, last = self.factors(batch.cls)
        logits = [self.paths.logits(features, texts) for features, texts in zip((z, *last), t, strict=True)]
        return first, last, self.three_path_losses(logits, batch.compositions, primitives=self.options.primitives)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        (z_s, z_o), last, losses = self.factor_losses(batch, shared)
        m, n = self.primitives(batch.compositions)
        k_s = assign_clusters(z_s.detach(), m, self.states)
        k_o = assign_clusters(z_o.detach(), n, self.objects)
        contrast = self.contrast(*last, m * self.options.clusters + k_s, n * self.options.clusters + k_o)
        dependence = covariance_norm(last[0], self.objects[n, k_o]) + covariance_norm(last[1], self.states[m, k_s])
        if self.training:
            momentum = self.options.momentum
            self._pending = {
                "states": updated_clusters(self.states, z_s.detach(), m, k_s, momentum),
                "objects": updated_clusters(self.objects, z_o.detach(), n, k_o, momentum),
            }
        alpha = self.options.contrast
        beta = self.options.decorrelation
        return {**losses, "contrast": alpha * contrast, "decorrelation": beta * dependence}

    def contrast(self, z_s: Tensor, z_o: Tensor, own_s: Tensor, own_o: Tensor) -> Tensor:
        """Contrastive loss of factors [B, d]; `own_s`, `own_o` [B]: prototypes they belong to."""
        states = self.states.flatten(0, 1)  # [M K, d]
        objects = self.objects.flatten(0, 1)  # [N K, d]
        if self.second is not None:
            states = self.second.state(states)
            objects = self.second.object(objects)
        prototypes = torch.cat([states, objects])  # [(M + N) K, d]
        logits_s = z_s @ prototypes.T / self.options.temperature
        logits_o = z_o @ prototypes.T / self.options.temperature
        return cross_entropy(logits_s, own_s) + cross_entropy(logits_o, len(states) + own_o)

    def image_logits(self, cls: Tensor, t: Prototypes, candidates: CompositionIndex) -> Sequence[Tensor]:
        z, _, last = self.factors(cls)
        return [self.paths.logits(features, texts) for features, texts in zip((z, *last), t, strict=True)]

    @torch.no_grad()
    def after_batch(self) -> None:
        for name, prototypes in self._pending.items():
            getattr(self, name).copy_(prototypes)
        self._pending = {}


def covariance_norm(x: Tensor, y: Tensor) -> Tensor:
    """Squared Frobenius norm of the cross-covariance of `x` and `y` [B, d]; 0 for one image."""
    a = x - x.mean(0)
    b = y - y.mean(0)
    return ((a.T @ b) / max(len(a) - 1, 1)).square().sum()


def initial_clusters(z: Tensor, groups: Tensor, rows: Tensor) -> Tensor:
    """Initial prototypes [G, K, d]: K evenly spaced features `z` per group; else `rows`."""
    prototypes = rows.clone()
    for group in groups.unique().tolist():
        members = (groups == group).nonzero()[:, 0]
        places = torch.arange(rows.shape[1], device=z.device) * len(members) // rows.shape[1]
        prototypes[group] = normalize(z[members[places]], dim=-1).to(rows)
    return prototypes


def assign_clusters(z: Tensor, groups: Tensor, rows: Tensor) -> Tensor:
    """Assign each image of group `groups` [B] to one of its prototypes, of `rows` [G, K, d]."""
    similarity = torch.bmm(rows.index_select(0, groups), z[:, :, None].to(rows))[..., 0]  # [B, K]
    return balanced_assignment(similarity, groups, len(rows)).argmax(1)


def balanced_assignment(similarity: Tensor, groups: Tensor, count: int) -> Tensor:
    """Soft assignment [B, K] of images to their group's K prototypes, equally used."""
    log = similarity / SHARPNESS
    for _ in range(ROUNDS):
        masses = log.new_zeros(count, log.shape[1]).index_add(0, groups, log.exp())
        log = log - masses.log().index_select(0, groups)  # equal masses
        log = log - log.logsumexp(1, keepdim=True)  # the same mass for each image
    return log.exp()


def updated_clusters(rows: Tensor, z: Tensor, groups: Tensor, cluster: Tensor, momentum: float) -> Tensor:
    """`rows` [G, K, d] moved to mean features of their images; `momentum`: of old ones."""
    count, clusters, dim = rows.shape
    place = groups * clusters + cluster
    sums = rows.new_zeros(count * clusters, dim).index_add(0, place, z.to(rows))
    sizes = sums.new_zeros(count * clusters).index_add(0, place, sums.new_ones(len(place)))[:, None]
    flat = rows.reshape(-1, dim)
    blended = normalize(momentum * flat + (1 - momentum) * sums / sizes.clamp(min=1), dim=-1)
    return torch.where(sizes > 0, blended, flat).reshape(rows.shape)
