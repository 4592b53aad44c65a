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

from duplex.labels import Ints
from duplex.layers.factors import unit
from duplex.layers.graph import Nodes
from duplex.layers.paths import Factored
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.options import TrainingOptions

Schedule = Callable[[int, DuplexOptions, TrainingOptions], float]  # finished epochs -> lambda of the next one


def late(epoch: int, options: DuplexOptions, settings: TrainingOptions) -> float:
    """Rows stay as they are until half of the epochs are over."""
    return 1.0 if epoch < settings.epochs // 2 else options.momentum


def early(epoch: int, options: DuplexOptions, settings: TrainingOptions) -> float:
    """Rows stay as they are once half of the epochs are over."""
    return options.momentum if epoch < settings.epochs // 2 else 1.0


def annealed(epoch: int, options: DuplexOptions, settings: TrainingOptions) -> float:
    """`1 - lambda` falls as the learning rate does."""
    return 1 - (1 - options.momentum) * settings.decay ** (epoch // settings.decay_every)


class Scheduled(Duplex):
    """Lambda follows a schedule over epochs."""

    schedule: Schedule | None = None
    settings: TrainingOptions | None = None
    epoch = 0

    @property
    def momentum(self) -> float:
        if self.schedule is None or self.settings is None:
            return self.options.momentum
        return self.schedule(self.epoch, self.options, self.settings)

    def after_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Uniform(Scheduled):
    """Messages weigh the same from every image, whatever its posteriors."""

    def nodes(self, z: Tensor, factored: Factored, compositions: Tensor, labels: Ints) -> Nodes:
        nodes = super().nodes(z, factored, compositions, labels)
        return replace(nodes, p_s=torch.ones_like(nodes.p_s), p_o=torch.ones_like(nodes.p_o))


class Labelled(Scheduled):
    """Messages go where the image's own labels say, in place of its posteriors."""

    def nodes(self, z: Tensor, factored: Factored, compositions: Tensor, labels: Ints) -> Nodes:
        nodes = super().nodes(z, factored, compositions, labels)
        p_s = one_hot(nodes.states, len(self.labels.states)).to(nodes.p_s)
        p_o = one_hot(nodes.objects, len(self.labels.objects)).to(nodes.p_o)
        return replace(nodes, p_s=p_s, p_o=p_o)


class Detached(Scheduled):
    """`L_c^h` does not reach the disentanglers or the posteriors: `L_s` and `L_o` alone pull them."""

    def nodes(self, z: Tensor, factored: Factored, compositions: Tensor, labels: Ints) -> Nodes:
        nodes = super().nodes(z, factored, compositions, labels)
        return replace(nodes, **{name: getattr(nodes, name).detach() for name in ("z_s", "z_o", "p_s", "p_o")})


class PulledToImages(Scheduled):
    """Factors are drawn to the mean image of their state or object as well: `L_s` and `L_o` each gain `1 - cos`, times
    `pull`, so that messages stay among the features with which prototypes are compared."""

    pull = 10.0
    mean_s: Tensor
    mean_o: Tensor

    def start(self, train: Batch) -> None:
        super().start(train)
        n = len(self.labels.objects)
        groups = {"mean_s": (train.compositions // n, len(self.labels.states)), "mean_o": (train.compositions % n, n)}
        for name, (group, count) in groups.items():  # [M, d], [N, d]
            self.register_buffer(name, _unit_means(unit(train.z), group, count), persistent=False)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        losses = super().losses(batch, shared)
        assert self.paths.factors is not None
        n = len(self.labels.objects)
        z_s, z_o = self.paths.factors(self.paths.features(batch.z))
        means = {"s": (z_s, self.mean_s[batch.compositions // n]), "o": (z_o, self.mean_o[batch.compositions % n])}
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


GRAPH_ALONE = {"losses": ("ct", "ch"), "inference": ("ch", "ct")}
IN_IMAGE_SPACE = {"fusion": "additive", "messages": ("counterfactual",)}
READINGS: dict[str, dict[str, Any]] = {  # what the paper leaves open, read otherwise (docs/method.md)
    "label nodes": {"nodes": "label"},
    "no relu": {"fusion": "linear"},
    "low rank": {"fusion_rank": 16},
    "weighed by kind": {"weighing": "by_kind"},
    "anchored blend": {"blend": "anchored"},
    "empty unseen rows": {"unseen_rows": "empty"},
    "L_c^t over C_tgt": {"semantic_negatives": "target"},
    "frozen names": {"vocabulary": "fixed"},
    "no relu, by kind": {"fusion": "linear", "weighing": "by_kind"},
    "no relu, by kind, label nodes, anchored": {
        **{"fusion": "linear", "weighing": "by_kind"},
        **{"nodes": "label", "blend": "anchored"},
    },
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
    "trainable codebook": {"codebook": "trainable"},
    "trainable codebook, static": {"codebook": "trainable", "graph": False},
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
    "additive, label weights": Variation(IN_IMAGE_SPACE, kind=Labelled),
}
