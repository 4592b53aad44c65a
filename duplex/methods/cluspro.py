"""ClusPro (Qu et al., "Learning Clustering-based Prototypes for Compositional Zero-Shot Learning", ICLR 2025).

Images are compared with prompts of compositions, states and objects (the three paths), in a feature space where every
state and object (primitive) is trained to be a few clusters. Each of the M states has K prototypes, the cluster centres
of the images' state factors z^s, and each of the N objects has K of the object factors z^o; they get no gradients. In
each batch the images of a primitive are assigned to its prototypes by optimal transport (Sinkhorn-Knopp), and the
prototypes move by momentum towards the means of their images (Eq. 9). Two losses use them:

* contrast (Eq. 10): an image is drawn to its prototype p^+ and away from all others, including those of its own
  primitive and of the other kind: `-log exp(z.p^+ / T) / sum_p exp(z.p / T)` over K (M + N) prototypes, for z^s and
  for z^o;
* decorrelation (Eq. 11): `HSIC(z^s, p^o) + HSIC(z^o, p^s)` with the prototypes that the images are assigned to, by the
  Hilbert-Schmidt criterion, here with linear kernels: the squared norm of the batch's cross-covariance.

The loss adds both to the cross-entropies of compositions, states and objects:
`L = L_c + L_s + L_o + alpha L_contrast + beta L_decorrelation`. The paper's assignment also makes images with similar
features have similar transport plans (the coherence term of Eq. 7); plain transport does not. As in the paper, clusters
have no part in inference: the score is `p(c|x) + p(s|x) p(o|x)`, from the posteriors by prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch, MethodContext
from duplex.methods.three_paths import ThreePathOptions, ThreePaths
from duplex.options import Count, NonNegative, Positive, Share


@dataclass(frozen=True)
class ClusProOptions(ThreePathOptions):
    clusters: Count = 5  # prototypes K per primitive
    momentum: Share = 0.99  # weight of a prototype's old value per batch
    temperature: Positive = 0.1  # T of the contrast
    contrast: NonNegative = 0.2  # weight alpha of L_contrast
    decorrelation: NonNegative = 0.5  # weight beta of L_decorrelation


class ClusPro(ThreePaths[ClusProOptions]):
    """ClusPro: prompts of compositions, states and objects; an image's state and object features are trained towards a
    few clusters per state and per object."""

    states: Tensor  # prototypes [M, K, d]
    objects: Tensor  # prototypes [N, K, d]

    def __init__(self, context: MethodContext, options: ClusProOptions) -> None:
        super().__init__(context, options)
        sizes = {"states": len(context.labels.states), "objects": len(context.labels.objects)}
        for name, count in sizes.items():
            prototypes = normalize(torch.randn(count, options.clusters, context.dim), dim=-1)
            self.register_buffer(name, prototypes)
        self._pending: dict[str, Tensor] = {}  # prototypes moved by `losses`, to be written by `after_batch`

    @torch.no_grad()
    def start(self, train: Batch) -> None:
        """Set the K prototypes of each state (object) to the state (object) parts of features of K of its images."""
        assert self.paths.factors is not None
        factors = self.paths.factors(self.paths.adapt(train.cls))
        for name, z, group in zip(("states", "objects"), factors, self.primitives(train.compositions), strict=True):
            prototypes: Tensor = getattr(self, name)
            prototypes.copy_(initial_clusters(z, group, prototypes))

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        _, (z_s, z_o, _, _), losses = self.path_losses(batch, shared)
        m, n = self.primitives(batch.compositions)
        k_s, k_o = assign_clusters(z_s.detach(), m, self.states), assign_clusters(z_o.detach(), n, self.objects)
        contrast = self.contrast(z_s, z_o, m * self.options.clusters + k_s, n * self.options.clusters + k_o)
        dependence = covariance_norm(z_s, self.objects[n, k_o]) + covariance_norm(z_o, self.states[m, k_s])
        if self.training:
            momentum = self.options.momentum
            self._pending = {
                "states": updated_clusters(self.states, z_s.detach(), m, k_s, momentum),
                "objects": updated_clusters(self.objects, z_o.detach(), n, k_o, momentum),
            }
        alpha, beta = self.options.contrast, self.options.decorrelation
        return {**losses, "contrast": alpha * contrast, "decorrelation": beta * dependence}

    def contrast(self, z_s: Tensor, z_o: Tensor, own_s: Tensor, own_o: Tensor) -> Tensor:
        """Return the loss that draws state and object parts of images' features to their prototypes, away from others.

        z_s, z_o: state factors and object factors [B, d].
        own_s, own_o: index of each image's prototype [B] among those of all states, and of all objects.
        """
        states = self.states.flatten(0, 1)  # [M K, d]
        prototypes = torch.cat([states, self.objects.flatten(0, 1)])  # [(M + N) K, d]
        logits_s, logits_o = (z @ prototypes.T / self.options.temperature for z in (z_s, z_o))
        return cross_entropy(logits_s, own_s) + cross_entropy(logits_o, len(states) + own_o)

    @torch.no_grad()
    def after_batch(self) -> None:
        for name, prototypes in self._pending.items():
            getattr(self, name).copy_(prototypes)
        self._pending = {}


def covariance_norm(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared norm of the cross-covariance of `x` and `y` [B, d] over a batch; 0 for a single image."""
    a, b = (rows - rows.mean(0) for rows in (x, y))
    return ((a.T @ b) / max(len(a) - 1, 1)).square().sum()


SHARPNESS, ROUNDS = 0.05, 3  # of Sinkhorn-Knopp: weight of the entropy, and iterations


def initial_clusters(z: Tensor, groups: Tensor, rows: Tensor) -> Tensor:
    """Return initial prototypes [G, K, d] of G states (or objects): features of K evenly spaced images of each.

    z: features [n, d] of all images.
    groups: state (or object) of each image [n].
    rows: prototypes [G, K, d] to keep where a state (or object) has no images.
    """
    prototypes = rows.clone()
    for group in groups.unique().tolist():
        members = (groups == group).nonzero()[:, 0]
        places = torch.arange(rows.shape[1], device=z.device) * len(members) // rows.shape[1]
        prototypes[group] = normalize(z[members[places]], dim=-1).to(rows)
    return prototypes


def assign_clusters(z: Tensor, groups: Tensor, rows: Tensor) -> Tensor:
    """Assign each image to one of the K prototypes of its state (or object) by optimal transport; return indices [B].

    z: features [B, d].
    groups: state (or object) of each image [B].
    rows: prototypes [G, K, d].
    """
    similarity = torch.bmm(rows.index_select(0, groups), z[:, :, None].to(rows))[..., 0]  # [B, K]
    return balanced_assignment(similarity, groups, len(rows)).argmax(1)


def balanced_assignment(similarity: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return each image's shares in the K prototypes of its state (or object) [B, K], by Sinkhorn-Knopp iterations.

    The iterations start at `exp(similarity / SHARPNESS)`, with `similarity` [B, K]. In each of the `count` groups
    (states or objects), they give equal mass to all prototypes and to all images. `groups` [B]: group of each image.

    Similarities are cosines, so exponents differ by at most 2 / SHARPNESS, and sums of exponentials cannot overflow.
    """
    log = similarity / SHARPNESS
    for _ in range(ROUNDS):
        masses = log.new_zeros(count, log.shape[1]).index_add(0, groups, log.exp())
        log = log - masses.log().index_select(0, groups)  # the same mass for each prototype of a group
        log = log - log.logsumexp(1, keepdim=True)  # the same mass for each image
    return log.exp()


def updated_clusters(rows: Tensor, z: Tensor, groups: Tensor, cluster: Tensor, momentum: float) -> Tensor:
    """Return prototypes `rows` [G, K, d], moved by momentum towards the mean of the features assigned to each.

    z: features [B, d].
    groups: state (or object) of each image [B].
    cluster: index of the assigned prototype [B]; prototypes without images stay unchanged.
    """
    count, clusters, dim = rows.shape
    place = groups * clusters + cluster
    sums = rows.new_zeros(count * clusters, dim).index_add(0, place, z.to(rows))
    sizes = sums.new_zeros(count * clusters).index_add(0, place, sums.new_ones(len(place)))[:, None]
    flat = rows.reshape(-1, dim)
    blended = normalize(momentum * flat + (1 - momentum) * sums / sizes.clamp(min=1), dim=-1)
    return torch.where(sizes > 0, blended, flat).reshape(rows.shape)
