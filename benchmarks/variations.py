"""Variations of `duplex`: what refinement needs, asked one change at a time (benchmarks.validation --study).

What `options` can say is a row of options; the rest is a network that does one thing otherwise, or a write-back rate
that changes from epoch to epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from duplex.model.graph import Batch
from duplex.model.network import Network, Refinement, Step
from duplex.model.options import Options, TrainingOptions
from duplex.model.prompts import Prototypes

Schedule = Callable[[int, Options, TrainingOptions], float]  # finished epochs -> lambda of the next one


def constant(_: int, options: Options, __: TrainingOptions) -> float:
    return options.momentum


def late(epoch: int, options: Options, settings: TrainingOptions) -> float:
    """Rows stay as they are until half of the epochs are over."""
    return 1.0 if epoch < settings.epochs // 2 else options.momentum


def early(epoch: int, options: Options, settings: TrainingOptions) -> float:
    """Rows stay as they are once half of the epochs are over."""
    return options.momentum if epoch < settings.epochs // 2 else 1.0


def annealed(epoch: int, options: Options, settings: TrainingOptions) -> float:
    """`1 - lambda` falls as the learning rate does."""
    return 1 - (1 - options.momentum) * settings.decay ** (epoch // settings.decay_every)


class Uniform(Network):
    """Messages weigh the same from every image, whatever its posteriors."""

    def _refine(self, batch: Batch) -> Refinement:
        return super()._refine(replace(batch, p_s=torch.ones_like(batch.p_s), p_o=torch.ones_like(batch.p_o)))


class Labelled(Network):
    """Messages go where the image's own labels say, in place of its posteriors."""

    def _refine(self, batch: Batch) -> Refinement:
        p_s = one_hot(batch.states, len(self.labels.states)).to(batch.p_s)
        p_o = one_hot(batch.objects, len(self.labels.objects)).to(batch.p_o)
        return super()._refine(replace(batch, p_s=p_s, p_o=p_o))


class Detached(Network):
    """`L_c^h` does not reach the disentanglers or the posteriors: `L_s` and `L_o` alone pull them."""

    def _refine(self, batch: Batch) -> Refinement:
        parts = {name: getattr(batch, name).detach() for name in ("z_s", "z_o", "p_s", "p_o")}
        return super()._refine(replace(batch, **parts))


class PulledToImages(Network):
    """Factors are drawn to the mean image of their state or object as well: `L_s` and `L_o` each gain `1 - cos`, times
    `pull`, so that messages stay among the features with which prototypes are compared."""

    pull = 10.0
    mean_s: Tensor
    mean_o: Tensor

    def __init__(self, options: Options, labels: Any, tower: Any, codebook: Tensor | None = None) -> None:
        super().__init__(options, labels, tower, codebook)
        assert codebook is not None
        states, objects = self._split(torch.as_tensor(labels.pairs["train"]))
        codebook = codebook.cpu()  # as the network is, until it is moved
        rows = codebook[torch.as_tensor(labels.pairs["train"])]
        means = _unit_means(rows, states, len(labels.states)), _unit_means(rows, objects, len(labels.objects))
        self.register_buffer("mean_s", means[0], persistent=False)  # [M, d]
        self.register_buffer("mean_o", means[1], persistent=False)  # [N, d]

    def forward(self, z: Tensor, compositions: Tensor, prototypes: Prototypes) -> Step:
        step = super().forward(z, compositions, prototypes)
        assert self.factors is not None
        states, objects = self._split(compositions)
        z_s, z_o = self.factors(self.features(z))
        pulled = {"s": (z_s * self.mean_s[states]).sum(-1), "o": (z_o * self.mean_o[objects]).sum(-1)}
        losses = {name: step.losses[name] + self.pull * (1 - cosine).mean() for name, cosine in pulled.items()}
        return replace(step, losses={**step.losses, **losses})


def _unit_means(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    return normalize(torch.zeros(count, rows.shape[1]).index_add_(0, groups, rows), dim=-1)


@dataclass(frozen=True)
class Variation:
    """One change to a method."""

    options: dict[str, Any] = field(default_factory=dict)
    network: type[Network] = Network
    momentum: Schedule = constant


GRAPH_ALONE = {"losses": ("ct", "ch"), "inference": ("ch", "ct")}
IN_IMAGE_SPACE = {"fusion": "additive", "messages": ("counterfactual",)}
OPTIONS: dict[str, dict[str, Any]] = {
    "duplex": {},
    "static": {"graph": False},
    "no codebook": {"codebook": "none", "graph": False, "losses": ("s", "o", "ct"), "inference": ("ct", "so")},
    "state messages": {"messages": ("state",)},
    "object messages": {"messages": ("object",)},
    "counterfactual messages": {"messages": ("counterfactual",)},
    "lambda 0.5": {"momentum": 0.5},
    "lambda 0.99": {"momentum": 0.99},
    "lambda 0.999": {"momentum": 0.999},
    "not renormalised": {"renormalise": False},
    "random unseen rows": {"unseen_rows": "random"},
    "random unseen rows, static": {"unseen_rows": "random", "graph": False},
    "random rows": {"unseen_rows": "random", "seen_rows": "random"},
    "residual disentanglers": {"disentangler": "residual"},
    "residual disentanglers, static": {"disentangler": "residual", "graph": False},
    "pulled by the graph alone": GRAPH_ALONE,
    "pulled by the graph alone, static": {**GRAPH_ALONE, "graph": False},
    "trainable codebook": {"codebook": "trainable"},
    "trainable codebook, static": {"codebook": "trainable", "graph": False},
    "refine over all pairs": {"refine_over": "open"},
    "static, all pairs": {"graph": False, "refine_over": "open"},
    "no adapter": {"adapter": "none"},
    "no adapter, static": {"adapter": "none", "graph": False},
    "additive": IN_IMAGE_SPACE,
    "additive, lambda 0.99": {**IN_IMAGE_SPACE, "momentum": 0.99},
    "additive, all pairs": {**IN_IMAGE_SPACE, "refine_over": "open"},
}
STUDY = {name: Variation(options) for name, options in OPTIONS.items()} | {
    "uniform weights": Variation(network=Uniform),
    "label weights": Variation(network=Labelled),
    "refined late": Variation(momentum=late),
    "refined early": Variation(momentum=early),
    "annealed": Variation(momentum=annealed),
    "graph does not pull": Variation(network=Detached),
    "pulled to images": Variation(network=PulledToImages),
    "pulled to images, static": Variation({"graph": False}, network=PulledToImages),
    "additive, uniform weights": Variation(IN_IMAGE_SPACE, network=Uniform),
    "additive, label weights": Variation(IN_IMAGE_SPACE, network=Labelled),
}
