"""Variations of `duplex`, each with one change, for `benchmarks.validation --study`: what does refinement need?

A variation is a set of options, a network with one difference, or a momentum that changes over epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from duplex.layers.factors import unit
from duplex.layers.graph import FactorNodes
from duplex.layers.paths import FactorPosteriors
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.options import TrainingOptions

Schedule = Callable[[int, DuplexOptions, TrainingOptions], float]  # finished epochs -> lambda of the next one


def late(epoch: int, options: DuplexOptions, settings: TrainingOptions) -> float:
    """Keep prototypes unchanged for the first half of the epochs."""
    return 1.0 if epoch < settings.epochs // 2 else options.momentum


def early(epoch: int, options: DuplexOptions, settings: TrainingOptions) -> float:
    """Keep prototypes unchanged in the second half of the epochs."""
    return options.momentum if epoch < settings.epochs // 2 else 1.0


def annealed(epoch: int, options: DuplexOptions, settings: TrainingOptions) -> float:
    """Decrease `1 - lambda` like the learning rate."""
    return 1 - (1 - options.momentum) * settings.decay ** (epoch // settings.decay_every)


class Scheduled(Duplex):
    """Lambda may follow a schedule over epochs."""

    schedule: Callable[[int], float] | None = None  # finished epochs -> lambda of the next one

    def follow(self, schedule: Schedule, settings: TrainingOptions) -> None:
        """Follow a schedule, from the first epoch."""
        options = self.options
        self.schedule = lambda epoch: schedule(epoch, options, settings)
        self.after_epoch(0)

    def after_epoch(self, epoch: int) -> None:
        if self.schedule is not None:
            self.options = replace(self.options, momentum=self.schedule(epoch))


class Uniform(Scheduled):
    """Messages have the same weight from every image, whatever its posteriors."""

    def nodes(self, z: Tensor, factors: FactorPosteriors, compositions: Tensor) -> FactorNodes:
        nodes = super().nodes(z, factors, compositions)
        return replace(nodes, p_s=torch.ones_like(nodes.p_s), p_o=torch.ones_like(nodes.p_o))


class Labelled(Scheduled):
    """Messages follow the labels of the image instead of its posteriors."""

    def nodes(self, z: Tensor, factors: FactorPosteriors, compositions: Tensor) -> FactorNodes:
        nodes = super().nodes(z, factors, compositions)
        p_s = one_hot(nodes.states, len(self.labels.states)).to(nodes.p_s)
        p_o = one_hot(nodes.objects, len(self.labels.objects)).to(nodes.p_o)
        return replace(nodes, p_s=p_s, p_o=p_o)


class Detached(Scheduled):
    """`L_c^h` has no gradient for disentanglers and posteriors: only `L_s` and `L_o` train them."""

    def nodes(self, z: Tensor, factors: FactorPosteriors, compositions: Tensor) -> FactorNodes:
        nodes = super().nodes(z, factors, compositions)
        return replace(nodes, **{name: getattr(nodes, name).detach() for name in ("z_s", "z_o", "p_s", "p_o")})


class PulledToImages(Scheduled):
    """Factors are also drawn to the mean image of their class: `L_s` and `L_o` each gain `1 - cos`, times `pull`.

    Messages then stay among the features with which prototypes are compared.
    """

    pull = 10.0
    mean_s: Tensor
    mean_o: Tensor

    def start(self, train: Batch) -> None:
        super().start(train)
        n = len(self.labels.objects)
        groups = {"mean_s": (train.compositions // n, len(self.labels.states)), "mean_o": (train.compositions % n, n)}
        for name, (group, count) in groups.items():  # [M, d], [N, d]
            self.register_buffer(name, _unit_means(unit(train.cls), group, count), persistent=False)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        losses = super().losses(batch, shared)
        assert self.paths.factors is not None
        n = len(self.labels.objects)
        z_s, z_o = self.paths.factors(self.paths.adapt(batch.cls))
        means = {
            "state": (z_s, self.mean_s[batch.compositions // n]),
            "object": (z_o, self.mean_o[batch.compositions % n]),
        }
        pulled = {name: losses[name] + self.pull * (1 - (z * mean).sum(-1)).mean() for name, (z, mean) in means.items()}
        return {**losses, **pulled}


def _unit_means(z: Tensor, groups: Tensor, count: int) -> Tensor:
    return normalize(z.new_zeros(count, z.shape[1]).index_add_(0, groups, z), dim=-1)


@dataclass(frozen=True)
class Variation:
    """One change to a method."""

    options: dict[str, Any] = field(default_factory=dict)
    kind: type[Scheduled] = Scheduled
    schedule: Schedule | None = None


GRAPH_ALONE = {"losses": ("semantic", "visual"), "inference": ("visual", "semantic")}
IN_IMAGE_SPACE = {"fusion": "additive", "messages": ("counterfactual",)}
READINGS: dict[str, dict[str, Any]] = {  # what the paper leaves open, read otherwise (docs/method.md)
    "no relu": {"fusion": "linear"},
    "anchored blend": {"blend": "anchored"},
    "L_c^t over C_tgt": {"semantic_negatives": "target"},
    "frozen names": {"vocabulary": "fixed"},
    "no relu, anchored": {"fusion": "linear", "blend": "anchored"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "duplex": {},
    "static": {"graph": False},
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
    "refine over all pairs": {"refine_over": "open"},
    "static, all pairs": {"graph": False, "refine_over": "open"},
    "no adapter": {"adapter": "none"},
    "no adapter, static": {"adapter": "none", "graph": False},
    "additive": IN_IMAGE_SPACE,
    "additive, lambda 0.99": {**IN_IMAGE_SPACE, "momentum": 0.99},
    "additive, all pairs": {**IN_IMAGE_SPACE, "refine_over": "open"},
    **READINGS,
}
STUDY = {name: Variation(options) for name, options in OPTIONS.items()} | {
    "uniform weights": Variation(kind=Uniform),
    "label weights": Variation(kind=Labelled),
    "refined late": Variation(schedule=late),
    "refined early": Variation(schedule=early),
    "annealed": Variation(schedule=annealed),
    "graph does not pull": Variation(kind=Detached),
    "pulled to images": Variation(kind=PulledToImages),
    "pulled to images, static": Variation({"graph": False}, kind=PulledToImages),
    "additive, uniform weights": Variation(IN_IMAGE_SPACE, kind=Uniform),
}
