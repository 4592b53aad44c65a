"""PLID: every composition is a normal distribution of text features.

Bao et al., "Prompting Language-Informed Distribution for Compositional Zero-Shot Learning", ECCV
2024.

    t' = t + CrossAttention(t, D_c),    samples: normalise(t' + d) for each d in D_c
    m_k = (1/2 tau^2) x^2 . (sigma^2_kk + sigma^2_yy - 2 sigma^2_ky),     m_y = 0
    l = (1 - b) l_c + b (l_s + l_o),    b ~ Beta(1, 9)
    L = CE(l + m^c) + w [CE(l_s + m^s) + CE(l_o + m^o)]

* t: text feature of the learned prompt of composition c;  D_c: text features of descriptions of c
* sigma^2: covariances of the samples: channels are independent, classes are not
* m_k: margin of class k for an image x with label y; the loss bounds the expected cross-entropy
* l_c, l_s, l_o: logits of composition, state, object; l_s and l_o compare z^s and z^o with means
  of t' over the seen compositions that have the state (object); descriptions are averaged in the same way
* b: drawn once per batch; inference uses its mean;  tau: CLIP's temperature

In the paper, a language model writes the descriptions. Here they are `templates` followed by the
composition's name. The paper's enrichment of images by augmented views is left out, as features
are cached; so is the feed-forward part of its attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.methods.base import Batch, Inputs, Inspectable, MethodContext
from duplex.methods.families import TextMethod, TextOptions
from duplex.methods.layers import CompositionIndex, FactorNetworks, unit
from duplex.methods.prompts import TEMPLATE, Prompts
from duplex.options import Count, NonNegative, Share, Template

Templates = Annotated[tuple[Template, ...], Field(min_length=2)]
TEMPLATES = (
    "a photo of a", "a photo of the", "a picture of", "a picture of a", "a drawing of", "an image of", "an image of a",
    "this is a",
)  # fmt: skip


@dataclass(frozen=True)
class PlidOptions(TextOptions):
    templates: Templates = TEMPLATES  # words before the names in the descriptions
    margin: bool = True  # whether the losses have margins m from the covariance
    mix: Annotated[float, Field(gt=0, lt=1)] = 0.1  # mean of b, the weight of primitives' logits
    smoothing: Share = 0.0  # target weight of pairs with the label's state
    primitives: NonNegative = 0.1  # weight w of the primitives' losses
    width: Count = 768  # hidden units of each disentangler
    template: Template = TEMPLATE  # words whose tokens initialise the learned context


class Enrichment(nn.Module):
    """Attention of text features [C, d] to their D descriptions [C, D, d], added to these."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, t: Tensor, described: Tensor) -> Tensor:
        keys = self.key(described)
        values = self.value(described)
        weights = ((keys @ self.query(t)[:, :, None])[..., 0] / math.sqrt(t.shape[-1])).softmax(-1)  # [C, D]
        return torch.add(t, self.out((weights[:, None] @ values)[:, 0]))


class Plid(TextMethod[PlidOptions]):
    """PLID: classes are distributions of text features; logits of pair and words are mixed."""

    described: Tensor

    def __init__(self, context: MethodContext, options: PlidOptions) -> None:
        super().__init__(context, options)
        dim = context.tower.dim
        self.prompts = self.soft_prompts(options.template)
        self.enrich = Enrichment(dim)
        self.factors = FactorNetworks(dim, options.width)
        self.register_buffer("described", torch.zeros(0, len(options.templates), dim), persistent=False)

    def start(self, train: Batch) -> None:
        self.described = self.describe(self.labels.pairs["train"]).to(self.described)

    @torch.no_grad()
    def describe(self, compositions: Ints) -> Tensor:
        """Text features [C, D, d] of D templates, each followed by the composition's name."""
        described = []
        for words in self.options.templates:
            tower = self.context.tower
            prompts = Prompts(self.labels, tower, paths="composition", template=words)
            described.append(prompts.encode(compositions).compositions)
        return torch.stack(described, dim=1)

    def shared(self) -> tuple[Tensor, ...]:
        """Mean text features of compositions, states, objects; then `differences_from_mean` of each."""
        t = self.prompts(self.labels.pairs["train"], self.checkpointing).compositions  # [C, d]
        is_trained = getattr(self.context.tower, "is_trained", False)
        described = self.describe(self.labels.pairs["train"]) if is_trained else self.described
        described = described.to(t)  # [C, D, d]
        means = [self.enrich(t, described)]
        means += self.primitive_means(means[0])
        described_by_path = (described, *self.primitive_means(described))
        spread = [differences_from_mean(mean, rows) for mean, rows in zip(means, described_by_path, strict=True)]
        return (*map(unit, means), *spread)

    def primitive_means(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.train_candidates.means(rows, len(self.labels.states), len(self.labels.objects))

    def path_logits(self, z: tuple[Tensor, Tensor, Tensor], means: tuple[Tensor, ...]) -> list[Tensor]:
        return [self.scale * f @ t.T for f, t in zip(z, means, strict=True)]

    def losses(self, batch: Batch, shared: tuple[Tensor, ...]) -> dict[str, Tensor]:
        x = unit(batch.cls)
        index = self.train_candidates
        z = (x, *self.factors(x))
        targets = (index.positions_of_listed(batch.compositions), *self.primitives(batch.compositions))
        c, s, o = self.path_logits(z, shared[:3])
        b = self.draw_mix(x) if self.training else self.options.mix
        logits = [(1 - b) * c + b * (s[:, index.states] + o[:, index.objects]), s, o]
        if self.options.margin:
            margins = (self.margins(*paths) for paths in zip(z, shared[3:], targets, strict=True))
            logits = [path + margin for path, margin in zip(logits, margins, strict=True)]
        names = ("composition", "state", "object")
        weights = (1.0, self.options.primitives, self.options.primitives)
        if self.options.smoothing:
            targets = (self.smoothed(targets[0]).to(x.dtype), *targets[1:])
        terms = zip(names, weights, logits, targets, strict=True)
        return {name: weight * cross_entropy(path, target) for name, weight, path, target in terms}

    def smoothed(self, target: Tensor) -> Tensor:
        """Targets [B, C]: `1 - smoothing` for the label, the rest for its state's pairs."""
        m = self.train_candidates.states
        n = self.train_candidates.objects
        related = (m[target][:, None] == m) & (n[target][:, None] != n)
        shares = self.options.smoothing * related.double() / related.sum(1, keepdim=True).clamp(min=1)
        return shares.scatter(1, target[:, None], 1 - shares.sum(1, keepdim=True))

    def draw_mix(self, like: Tensor) -> Tensor:
        """Draw a weight (a scalar like `like`) from a Beta distribution of mean `options.mix`."""
        q = 1 / self.options.mix - 1
        return 1 - torch.rand((), device=like.device, dtype=like.dtype) ** (1 / q)

    def margins(self, x: Tensor, deviations: Tensor, target: Tensor) -> Tensor:
        """Margins [B, C]: half the variance of the difference of a class's logit from the label's.

        deviations: how far each class's D samples are from their mean [C, D, d]; target: labels
            [B].
        """
        squares = x**2
        spread = squares @ deviations.square().sum(1).T  # [B, C]
        together = (squares[:, None] * deviations[target]).flatten(1) @ deviations.flatten(1).T  # [B, C]
        apart = spread + spread.gather(1, target[:, None]) - 2 * together
        return self.scale**2 / 2 * apart / (deviations.shape[1] - 1)

    def prepare(self, candidates: CompositionIndex) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.prompts.encode(self.labels.pairs["train"]).compositions
        enriched = self.enrich(seen, self.describe(self.labels.pairs["train"]).to(seen))
        states, objects = map(unit, self.primitive_means(enriched))
        t = self.prompts.encode(candidates.compositions_np).compositions
        return unit(self.enrich(t, self.describe(candidates.compositions_np).to(t))), states, objects

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        z = unit(inputs["cls"])
        b = self.options.mix
        c, s, o = self.path_logits((z, *self.factors(z)), prepared)
        return self.scored((1 - b) * c + b * (s[:, candidates.states] + o[:, candidates.objects]))

    def inspectable(self) -> Inspectable:
        return Inspectable(features=lambda inputs: unit(inputs["cls"]))


def differences_from_mean(mean: Tensor, described: Tensor) -> Tensor:
    """Samples `normalise(mean + described)` minus their mean [C, D, d], for each class."""
    samples = unit(mean[:, None] + described)
    return samples - samples.mean(1, keepdim=True)
