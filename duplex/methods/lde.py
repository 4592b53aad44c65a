"""LDE and GDE: a composition's feature is the sum of *ideal words* of its state and its object.

Trager et al., "Linear Spaces of Meanings: Compositional Structures in Vision-Language Models",
ICCV 2023 (LDE). Berasi et al., "Not Only Text: Exploring Compositionality of Visual
Representations in Vision-Language Models", CVPR 2025 (GDE).

    u_(s,o) ~ u_0 + u_s + u_o,    u_0 = mean_c u_c,    u_s = mean_o u_(s,o) - u_0,    u_o = mean_s u_(s,o) - u_0
    GDE:  exp_mu(v_s + v_o), where v_s and v_o are the same means of v_c = log_mu(u_c)
    S = p(c|x) = softmax_c z . u_c / tau

* u_c: unit text features of all M*N compositions;  z: unit image feature;  tau: CLIP's temperature
* mu: intrinsic mean on the sphere;  log_mu, exp_mu: maps to the tangent space at mu and back

Nothing is trained. `space` is `linear` (LDE; sums are not normalised) or `sphere` (GDE, which also
decomposes the features of training images, weighted by CLIP's scores; here only text).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.methods.base import Batch, MethodContext
from duplex.methods.families import TextMethod, TextOptions
from duplex.methods.layers import CompositionIndex, mean_over
from duplex.methods.prompts import TEMPLATE, Prompts
from duplex.options import Template

SMALL = 1e-7
ROUNDS = 20  # of the iteration for the mean


@dataclass(frozen=True)
class LdeOptions(TextOptions):
    space: Literal["linear", "sphere"] = "linear"  # LDE's or GDE's decomposition
    template: Template = TEMPLATE  # words before the names in the prompts


class Lde(TextMethod[LdeOptions]):
    """LDE or GDE: scores by sums of two vectors, the "ideal words" of state and object."""

    centre: Tensor
    states: Tensor
    objects: Tensor

    def __init__(self, context: MethodContext, options: LdeOptions) -> None:
        super().__init__(context, options)
        labels = context.labels
        sizes = {"centre": (), "states": (len(labels.states),), "objects": (len(labels.objects),)}
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(*size, context.dim))

    @torch.no_grad()
    def start(self, train: Batch) -> None:
        every = np.arange(self.labels.size)
        prompts = Prompts(self.labels, self.context.tower, paths="composition", template=self.options.template)
        u = prompts.encode(every).compositions.to(self.centre)
        if self.options.space == "linear":
            self.centre.copy_(u.new_ones(len(u)) @ u / len(u))
            v = u - self.centre
        else:
            self.centre.copy_(intrinsic_mean(u))
            v = log_map(self.centre, u)
        m, n = self.primitives(torch.as_tensor(every, device=u.device))
        self.states.copy_(mean_over(v, m, len(self.states)))
        self.objects.copy_(mean_over(v, n, len(self.objects)))

    def prepare(self, candidates: CompositionIndex) -> Tensor:
        v = self.states.index_select(0, candidates.states) + self.objects.index_select(0, candidates.objects)
        return self.centre + v if self.options.space == "linear" else exp_map(self.centre, v)


def log_map(mu: Tensor, u: Tensor) -> Tensor:
    """Logarithmic map: tangent vectors [C, d] from `mu` to points `u` [C, d] on the sphere."""
    cosine = (u @ mu).clamp(-1, 1)
    theta = cosine.arccos()
    factor = torch.where(theta > SMALL, theta / theta.sin().clamp(min=SMALL), 1.0)
    return factor[:, None] * (u - cosine[:, None] * mu)


def exp_map(mu: Tensor, v: Tensor) -> Tensor:
    """Exponential map: points [C, d] of the unit sphere to which tangent vectors `v` lead."""
    length = v.norm(dim=-1, keepdim=True)
    return normalize(length.cos() * mu + torch.sinc(length / torch.pi) * v, dim=-1)


def intrinsic_mean(u: Tensor) -> Tensor:
    """Mean [d] on the sphere: tangent vectors to the points `u` [C, d] sum to zero."""
    shares = u.new_ones(len(u)) / len(u)
    mu = normalize(shares @ u, dim=-1)
    for _ in range(ROUNDS):
        mu = exp_map(mu, (shares @ log_map(mu, u))[None])[0]
    return mu
