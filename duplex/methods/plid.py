"""PLID (Bao et al., "Prompting Language-Informed Distribution for Compositional Zero-Shot Learning", ECCV 2024), over
cached features.

A composition is a normal distribution of text features. Its mean is the feature of a learned prompt, enriched by what
descriptions say, `t' = t + CrossAttention(t, D_c)`; samples of it are `normalise(t' + d)` for the features d of its
descriptions. Their covariance is kept diagonal in the channels but joins classes, whose j-th descriptions are alike.
Cross-entropy over class samples has an upper bound in closed form: every rival gains a margin,

    m_k = (1/2 tau^2) x^2 . (sigma^2_kk + sigma^2_yy - 2 sigma^2_ky),     m_y = 0

Primitives: factors z^s, z^o are compared with the means of t' over a primitive's seen compositions, whose descriptions
are means too. Stochastic logit mixup trains `l = (1 - b) l_c + b (l_s + l_o)` with b ~ Beta(1, 9), one for a batch;
inference takes its mean. With the margins of each,

    L = CE(l + m^c) + w [CE(l_s + m^s) + CE(l_o + m^o)]

The paper's descriptions are sentences that a language model wrote. Here they are `templates` that each composition's
name is put behind; the paper's enrichment of images by augmented views has no place over cached features, and its
attention has a feed-forward part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.layers.composition_index import Columns
from duplex.layers.factors import Factors, unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting
from duplex.methods.inspectable import Exhibits
from duplex.options import Options

TEMPLATES = (
    "a photo of a",
    "a photo of the",
    "a picture of",
    "a picture of a",
    "a drawing of",
    "an image of",
    "an image of a",
    "this is a",
)


@dataclass(frozen=True)
class PlidOptions(Options):
    templates: tuple[str, ...] = TEMPLATES  # descriptions
    margin: bool = True  # the covariance's part of the loss
    mix: float = 0.1  # the mean of b
    primitives: float = 0.1  # w
    width: int = 768  # hidden units of each disentangler
    template: str = TEMPLATE  # what the learned context starts from

    def rules(self) -> Iterable[tuple[object, str]]:
        yield len(self.templates) >= 2, "templates needs at least two: one has no covariance"
        yield all(text.strip() for text in (*self.templates, self.template)), "a template is empty; give it a word"
        yield self.width > 0, f"width is {self.width}; it is positive"
        yield 0 < self.mix < 1, f"mix is {self.mix}; it lies between 0 and 1"
        yield self.primitives >= 0, f"primitives is {self.primitives}; it is at least 0"


class Classes(NamedTuple):
    """Distributions of compositions, states and objects: means of unit length, and how samples deviate from theirs."""

    means: tuple[Tensor, Tensor, Tensor]  # [C, d], [M, d], [N, d]
    deviations: tuple[Tensor, Tensor, Tensor]  # [C, D, d], [M, D, d], [N, D, d]


class Enrichment(nn.Module):
    """`t + O Attention(Q t, K D, V D)` over each composition's descriptions; O starts at zero."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        nn.init.zeros_(self.out.weight)

    def forward(self, t: Tensor, described: Tensor) -> Tensor:
        """`t` [C, d], `described` [C, D, d] -> [C, d]"""
        keys, values = self.key(described), self.value(described)
        weights = ((keys @ self.query(t)[:, :, None])[..., 0] / math.sqrt(t.shape[-1])).softmax(-1)  # [C, D]
        found: Tensor = t + self.out((weights[:, None] @ values)[:, 0])
        return found


class Plid(Method[PlidOptions]):
    Options = PlidOptions
    described: Tensor

    def __init__(self, setting: Setting, options: PlidOptions) -> None:
        super().__init__(setting, options)
        labels, tower = setting.labels, setting.tower
        self.scale = math.exp(tower.logit_scale)  # 1 / tau
        self.prompts = Prompts(
            labels, tower, context="learned", vocabulary="learned", paths="c", template=options.template
        )
        self.enrich, self.factors = Enrichment(tower.dim), Factors(tower.dim, options.width, residual=False)
        self.columns = Columns(labels.pairs["train"], len(labels.objects))
        self.register_buffer("described", torch.zeros(0, len(options.templates), tower.dim), persistent=False)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"})

    def start(self, train: Batch) -> None:
        self.described = self.describe(self.labels.pairs["train"]).to(self.described)

    @torch.no_grad()
    def describe(self, compositions: Ints) -> Tensor:
        """Features of descriptions [C, D, d]."""
        prompts = (Prompts(self.labels, self.setting.tower, paths="c", template=t) for t in self.options.templates)
        return torch.stack([one.encode(compositions).compositions for one in prompts], dim=1)

    def shared(self) -> Classes:
        t = self.prompts(self.labels.pairs["train"], self.checkpointing).compositions
        return self.classes(t, self.described.to(t))

    def classes(self, t: Tensor, described: Tensor) -> Classes:
        """Of the seen compositions [C, d], [C, D, d] and of primitives."""
        enriched = self.enrich(t, described)
        rows = ((enriched, described), *zip(self.over(enriched), self.over(described), strict=True))
        c, s, o = ((unit(mean), deviating(mean, texts)) for mean, texts in rows)
        return Classes((c[0], s[0], o[0]), (c[1], s[1], o[1]))

    def over(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Means of rows [C, ...] of the seen compositions over each state and over each object."""
        return self.columns.means(rows, len(self.labels.states), len(self.labels.objects))

    def logits(self, z: tuple[Tensor, Tensor, Tensor], means: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Of compositions, states and objects."""
        return [self.scale * f @ t.T for f, t in zip(z, means, strict=True)]

    def losses(self, batch: Batch, shared: Classes) -> dict[str, Tensor]:
        own, n = batch.compositions, len(self.labels.objects)
        x = unit(batch.z)
        z, places = (x, *self.factors(x)), (self.columns.places(own), own // n, own % n)
        c, s, o = self.logits(z, shared.means)
        b = self.drawn(x) if self.training else self.options.mix
        logits = [(1 - b) * c + b * (s[:, self.columns.states] + o[:, self.columns.objects]), s, o]
        if self.options.margin:
            rows = zip(z, shared.deviations, places, strict=True)
            logits = [found + self.margins(*row) for found, row in zip(logits, rows, strict=True)]
        c, s, o = (cross_entropy(found, place) for found, place in zip(logits, places, strict=True))
        return {"c": c, "s": self.options.primitives * s, "o": self.options.primitives * o}

    def drawn(self, like: Tensor) -> Tensor:
        """`b ~ Beta(1, q)` of mean `1 / (1 + q)`, by the inverse of its distribution function."""
        q = 1 / self.options.mix - 1
        return 1 - torch.rand((), device=like.device, dtype=like.dtype) ** (1 / q)

    def margins(self, x: Tensor, deviations: Tensor, place: Tensor) -> Tensor:
        """`(1/2 tau^2) x^2 . variance of (sample of k - sample of y)` [B, C]."""
        squares = x**2
        spread = squares @ deviations.square().sum(1).T  # [B, C]
        together = (squares[:, None] * deviations[place]).flatten(1) @ deviations.flatten(1).T  # [B, C]
        apart = spread + spread.gather(1, place[:, None]) - 2 * together
        return self.scale**2 / 2 * apart / (deviations.shape[1] - 1)

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        asked = Columns(columns, len(self.labels.objects)).to(self.columns.states.device)
        seen = self.prompts.encode(self.labels.pairs["train"]).compositions
        enriched = self.enrich(seen, self.describe(self.labels.pairs["train"]).to(seen))
        states, objects = map(unit, self.over(enriched))
        t = self.prompts.encode(columns).compositions
        means = unit(self.enrich(t, self.describe(columns).to(t))), states, objects
        b = self.options.mix

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            z = unit(inputs["cls"])
            c, s, o = self.logits((z, *self.factors(z)), means)
            return ((1 - b) * c + b * (s[:, asked.states] + o[:, asked.objects])).softmax(-1)

        return scores

    def exhibits(self) -> Exhibits:
        return replace(Exhibits(), features=lambda inputs: unit(inputs["cls"]))


def deviating(mean: Tensor, described: Tensor) -> Tensor:
    """Samples `normalise(mean + d)` less their own mean: [C, d], [C, D, d] -> [C, D, d]."""
    samples = unit(mean[:, None] + described)
    return samples - samples.mean(1, keepdim=True)
