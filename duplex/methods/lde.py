"""Ideal words: LDE (Trager et al., "Linear Spaces of Meanings: Compositional Structures in Vision-Language Models",
ICCV 2023) and GDE (Berasi et al., "Not Only Text: Exploring Compositionality of Visual Representations in
Vision-Language Models", CVPR 2025). Nothing is trained.

With unit features `u_c` of compositions, LDE (`space: linear`) writes `u_(s,o) ~ u_0 + u_s + u_o`:

    u_0 = mean_c u_c,    u_s = mean_o u_(s,o) - u_0,    u_o = mean_s u_(s,o) - u_0

GDE (`space: sphere`) does the same with `v_c = log_mu(u_c)` in the tangent space at the intrinsic mean mu, and
composes `exp_mu(v_s + v_o)`. Composed vectors stand in for prompts, `p(c|x) = softmax(z . u / tau)` with z of unit
length; LDE's are as long as they come out.

`source: text` takes prompts of all M*N compositions, as LDE does; `source: images` takes all training images, of which
each seen composition's weigh as much as another's, as GDE does with equal weights within a composition. Its weights by
CLIP's own scores are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from duplex.labels import Ints
from duplex.layers.factors import unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts
from duplex.layers.sphere import exp_map, intrinsic_mean, log_map
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, columns_of
from duplex.options import Options


@dataclass(frozen=True)
class LdeOptions(Options):
    space: Literal["linear", "sphere"] = "linear"
    source: Literal["text", "images"] = "text"
    template: str = TEMPLATE

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.template.strip(), "template is empty; give at least one word such as 'a photo of'"


class Lde(Method[LdeOptions]):
    Options = LdeOptions
    centre: Tensor
    states: Tensor
    objects: Tensor

    def __init__(self, setting: Setting, options: LdeOptions) -> None:
        super().__init__(setting, options)
        self.scale = math.exp(setting.tower.logit_scale)
        sizes = {"centre": (), "states": (len(setting.labels.states),), "objects": (len(setting.labels.objects),)}
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(*size, setting.dim))

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"})

    @torch.no_grad()
    def start(self, train: Batch) -> None:
        if self.options.source == "text":
            everything = np.arange(self.labels.size)
            prompts = Prompts(self.labels, self.setting.tower, paths="c", template=self.options.template)
            self.decompose(prompts.encode(everything).compositions.to(self.centre), torch.as_tensor(everything))
            return
        _, inverse, counts = train.compositions.unique(return_inverse=True, return_counts=True)
        self.decompose(unit(train.z), train.compositions, 1 / counts[inverse].to(self.centre))

    def decompose(self, u: Tensor, compositions: Tensor, weights: Tensor | None = None) -> None:
        """Ideal words of unit features `u` [C, d]. A primitive that no composition has adds nothing."""
        n = len(self.labels.objects)
        weights = u.new_ones(len(u)) if weights is None else weights.to(u)
        compositions = compositions.to(u.device)
        if self.options.space == "linear":
            self.centre.copy_(weights @ u / weights.sum())
            v = u - self.centre
        else:
            self.centre.copy_(intrinsic_mean(u, weights))
            v = log_map(self.centre, u)
        for words, group in ((self.states, compositions // n), (self.objects, compositions % n)):
            sums = torch.zeros_like(words).index_add(0, group, (weights[:, None] * v).to(words))
            masses = words.new_zeros(len(words)).index_add(0, group, weights.to(words))
            words.copy_(sums / torch.where(masses > 0, masses, 1.0)[:, None])

    def composed(self, m: Tensor, n: Tensor) -> Tensor:
        """Vectors that stand for compositions [C, d]."""
        v = self.states.index_select(0, m) + self.objects.index_select(0, n)
        return self.centre + v if self.options.space == "linear" else exp_map(self.centre, v)

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        rows = self.composed(*columns_of(self.labels, columns, self.centre.device))

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            return (self.scale * unit(inputs["cls"]) @ rows.T).softmax(-1)

        return scores
