"""PLID (Bao et al., "Prompting Language-Informed Distribution for Compositional Zero-Shot Learning", ECCV 2024), over
cached features.

A composition is a normal distribution of text features. Its mean is the feature of a learned prompt, enriched by what
descriptions say, `t' = t + CrossAttention(t, D_c)`; its covariance, kept diagonal, is that of the descriptions'
features D_c. Cross-entropy over class samples has an upper bound in closed form: every rival gains a margin,

    l_k = x.t'_k / tau + (1/2 tau^2) x^2.(sigma^2_k + sigma^2_y)   k != y,      l_y = x.t'_y / tau

Primitives: factors z^s, z^o are compared with the mean of t' over a primitive's seen compositions, and stochastic
logit mixup trains `(1 - b) l_c + b (l_s + l_o)` with b ~ U(0, 1); inference takes b = 1/2.

The paper's descriptions are sentences that a language model wrote. Here they are `templates` that each composition's
name is put behind; the paper's enrichment of images by augmented views has no place over cached features.
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
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting
from duplex.methods.exhibits import Exhibits
from duplex.options import Options
from duplex.parts.factors import Factors, unit
from duplex.parts.heads import Columns
from duplex.parts.prompts import TEMPLATE, Prompts

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
    width: int = 768  # hidden units of each disentangler
    template: str = TEMPLATE  # what the learned context starts from

    def rules(self) -> Iterable[tuple[object, str]]:
        yield len(self.templates) >= 2, "templates needs at least two: one has no covariance"
        yield all(text.strip() for text in (*self.templates, self.template)), "a template is empty; give it a word"
        yield self.width > 0, f"width is {self.width}; it is positive"


class Classes(NamedTuple):
    """Distributions of compositions, and what primitives are compared with."""

    means: Tensor  # t' [C, d]
    variances: Tensor  # sigma^2 [C, d]
    states: Tensor  # [M, d]
    objects: Tensor  # [N, d]


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

    def classes(self, t: Tensor, described: Tensor) -> tuple[Tensor, Tensor]:
        """Means of unit length and variances [C, d]."""
        return unit(self.enrich(t, described)), described.var(1)

    def shared(self) -> Classes:
        t = self.prompts(self.labels.pairs["train"], self.checkpointing).compositions
        means, variances = self.classes(t, self.described.to(t))
        return Classes(means, variances, *self.primitives(means))

    def primitives(self, means: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of t' over the seen compositions of each primitive, of unit length."""
        sizes = len(self.labels.states), len(self.labels.objects)
        groups = zip(sizes, (self.columns.states, self.columns.objects), strict=True)
        states, objects = (means.new_zeros(k, means.shape[1]).index_add(0, group, means) for k, group in groups)
        return unit(states), unit(objects)

    def logits(self, z: Tensor, found: Classes) -> tuple[Tensor, Tensor, Tensor]:
        """Of compositions, states and objects; `z` of unit length."""
        z_s, z_o = self.factors(z)
        rows = ((z, found.means), (z_s, found.states), (z_o, found.objects))
        c, s, o = (self.scale * f @ t.T for f, t in rows)
        return c, s, o

    def losses(self, batch: Batch, shared: Classes) -> dict[str, Tensor]:
        z, own, n = unit(batch.z), batch.compositions, len(self.labels.objects)
        c, s, o = self.logits(z, shared)
        place = self.columns.places(own)
        share = torch.rand(len(z), 1, device=z.device, dtype=z.dtype) if self.training else 0.5
        bounded = c + self.margins(z, shared.variances, place) if self.options.margin else c
        mixed = (1 - share) * bounded + share * (s[:, self.columns.states] + o[:, self.columns.objects])
        return {
            "c": cross_entropy(bounded, place),
            "mix": cross_entropy(mixed, place),
            "s": cross_entropy(s, own // n),
            "o": cross_entropy(o, own % n),
        }

    def margins(self, z: Tensor, variances: Tensor, place: Tensor) -> Tensor:
        """`(1/2 tau^2) x^2.(sigma^2_k + sigma^2_y)`, nothing for y itself [B, C]."""
        spread = z**2 @ variances.T  # [B, C]
        margins = self.scale**2 / 2 * (spread + spread.gather(1, place[:, None]))
        return margins.scatter(1, place[:, None], 0.0)

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        asked = Columns(columns, len(self.labels.objects)).to(self.columns.states.device)
        seen = self.prompts.encode(self.labels.pairs["train"]).compositions
        means, _ = self.classes(seen, self.describe(self.labels.pairs["train"]).to(seen))
        states, objects = self.primitives(means)
        t = self.prompts.encode(columns).compositions
        found = Classes(*self.classes(t, self.describe(columns).to(t)), states, objects)

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            c, s, o = self.logits(unit(inputs["cls"]), found)
            return (0.5 * c + 0.5 * (s[:, asked.states] + o[:, asked.objects])).softmax(-1)

        return scores

    def exhibits(self) -> Exhibits:
        return replace(Exhibits(), features=lambda inputs: unit(inputs["cls"]))
