"""PLID (Bao et al., "Prompting Language-Informed Distribution for Compositional Zero-Shot Learning", ECCV 2024).

A composition c is a normal distribution of text features. Its mean is the feature t of a learned prompt, enriched by
the features D_c of descriptions of c, `t' = t + CrossAttention(t, D_c)`; samples of the distribution are
`normalise(t' + d)` for each d in D_c. Their covariance sigma^2 is diagonal in the channels but not between classes,
whose j-th descriptions are alike. The cross-entropy of an image x with label y over class samples has an upper bound in
closed form: the logit of every other class k gains a margin, with CLIP's temperature tau,

    m_k = (1/2 tau^2) x^2 . (sigma^2_kk + sigma^2_yy - 2 sigma^2_ky),     m_y = 0

States and objects: an image's state factor z^s and object factor z^o are compared with the means of t' over the seen
compositions with a state (object), whose descriptions are means too. Stochastic logit mixup trains
`l = (1 - b) l_c + b (l_s + l_o)`, from the logits of composition, state and object, with b ~ Beta(1, 9), drawn once per
batch; inference uses the mean of b. With the margins m of each kind of class,

    L = CE(l + m^c) + w [CE(l_s + m^s) + CE(l_o + m^o)]

The paper's descriptions are sentences by a language model. Here they are `templates` followed by the composition's
name. The paper's enrichment of images by augmented views is left out, as features are cached, and so is the
feed-forward part of its attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.layers.composition_index import CompositionIndex
from duplex.layers.factors import Factors, unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts
from duplex.methods.base import Batch, Inputs, Inspectable, MethodContext
from duplex.methods.head import TextMethod
from duplex.options import Count, NonNegative, Options, Template

Templates = Annotated[tuple[Template, ...], Field(min_length=2)]
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
    templates: Templates = TEMPLATES  # words before the names in the descriptions
    margin: bool = True  # whether the losses have margins m from the covariance
    mix: Annotated[float, Field(gt=0, lt=1)] = 0.1  # mean of b, the weight of primitives' logits
    primitives: NonNegative = 0.1  # weight w of the primitives' losses
    width: Count = 768  # hidden units of each disentangler
    template: Template = TEMPLATE  # words whose tokens initialise the learned context


class Classes(NamedTuple):
    """Distributions of text features per composition, state and object: unit means and deviations of D samples."""

    means: tuple[Tensor, Tensor, Tensor]  # [C, d], [M, d], [N, d]
    deviations: tuple[Tensor, Tensor, Tensor]  # [C, D, d], [M, D, d], [N, D, d]


class Enrichment(nn.Module):
    """Module that updates each composition's text feature by attention to its descriptions; initially the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        nn.init.zeros_(self.out.weight)

    def forward(self, t: Tensor, described: Tensor) -> Tensor:
        """Return the text features of compositions [C, d] after attention to those of their descriptions.

        t: text features of compositions [C, d].
        described: text features of D descriptions of each composition [C, D, d].
        """
        keys, values = self.key(described), self.value(described)
        weights = ((keys @ self.query(t)[:, :, None])[..., 0] / math.sqrt(t.shape[-1])).softmax(-1)  # [C, D]
        return torch.add(t, self.out((weights[:, None] @ values)[:, 0]))


class Plid(TextMethod[PlidOptions]):
    """PLID: compositions, states and objects are distributions of text features, of learned prompts and descriptions;
    the score mixes the logits of a composition, its state and its object."""

    described: Tensor

    def __init__(self, context: MethodContext, options: PlidOptions) -> None:
        super().__init__(context, options)
        dim = context.tower.dim
        self.prompts = self.soft_prompts(options.template)
        self.enrich, self.factors = Enrichment(dim), Factors(dim, options.width, residual=False)
        self.register_buffer("described", torch.zeros(0, len(options.templates), dim), persistent=False)

    def start(self, train: Batch) -> None:
        self.described = self.describe(self.labels.pairs["train"]).to(self.described)

    @torch.no_grad()
    def describe(self, compositions: Ints) -> Tensor:
        """Return the text features [C, D, d] of D descriptions per composition: each template with the pair's name."""
        labels, tower = self.labels, self.context.tower
        prompts = (Prompts(labels, tower, paths="composition", template=t) for t in self.options.templates)
        return torch.stack([descriptions.encode(compositions).compositions for descriptions in prompts], dim=1)

    def shared(self) -> Classes:
        t = self.prompts(self.labels.pairs["train"], self.checkpointing).compositions  # [C, d]
        described = self.described.to(t)  # [C, D, d]
        enriched = self.enrich(t, described)
        pairs = (
            (enriched, described),
            *zip(self.primitive_means(enriched), self.primitive_means(described), strict=True),
        )
        c, s, o = ((unit(mean), deviations(mean, descriptions)) for mean, descriptions in pairs)
        return Classes((c[0], s[0], o[0]), (c[1], s[1], o[1]))

    def primitive_means(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return means of the values `rows` [C, ...] of seen compositions, by state [M, ...] and by object [N, ...]."""
        return self.train_candidates.means(rows, len(self.labels.states), len(self.labels.objects))

    def path_logits(self, z: tuple[Tensor, Tensor, Tensor], means: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Return composition, state and object logits [B, C], [B, M], [B, N], as scaled dot products.

        z: composition, state and object features of images [B, d].
        means: text features of compositions [C, d], states [M, d] and objects [N, d].
        """
        return [self.scale * f @ t.T for f, t in zip(z, means, strict=True)]

    def losses(self, batch: Batch, shared: Classes) -> dict[str, Tensor]:
        x, index = unit(batch.cls), self.train_candidates
        z = (x, *self.factors(x))
        targets = (index.positions(batch.compositions), *self.primitives(batch.compositions))
        c, s, o = self.path_logits(z, shared.means)
        b = self.draw_mix(x) if self.training else self.options.mix
        logits = [(1 - b) * c + b * (s[:, index.states] + o[:, index.objects]), s, o]
        if self.options.margin:
            margins = (self.margins(*paths) for paths in zip(z, shared.deviations, targets, strict=True))
            logits = [path + margin for path, margin in zip(logits, margins, strict=True)]
        c, s, o = (cross_entropy(path, target) for path, target in zip(logits, targets, strict=True))
        return {"composition": c, "state": self.options.primitives * s, "object": self.options.primitives * o}

    def draw_mix(self, like: Tensor) -> Tensor:
        """Return a random weight b ~ Beta(1, q) for mixing state and object logits into those of compositions.

        Its mean, `1 / (1 + q)`, is the option `mix`; its device and type are those of `like`.
        """
        q = 1 / self.options.mix - 1
        return 1 - torch.rand((), device=like.device, dtype=like.dtype) ** (1 / q)

    def margins(self, x: Tensor, deviations: Tensor, target: Tensor) -> Tensor:
        """Return the margin [B, C] that the loss adds to each class's logit: half the variance of the difference
        between this logit and that of the image's label.

        x: unit image features [B, d].
        deviations: deviations of D samples per class from the samples' mean [C, D, d].
        target: label of each image [B].
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
        z, b = unit(inputs["cls"]), self.options.mix
        c, s, o = self.path_logits((z, *self.factors(z)), prepared)
        return ((1 - b) * c + b * (s[:, candidates.states] + o[:, candidates.objects])).softmax(-1)

    def inspectable(self) -> Inspectable:
        return Inspectable(features=lambda inputs: unit(inputs["cls"]))


def deviations(mean: Tensor, described: Tensor) -> Tensor:
    """Return the deviations [C, D, d] of D samples per class, `normalise(mean + described)`, from the samples' mean.

    mean: text feature of each class [C, d].
    described: text features of D descriptions of each class [C, D, d].
    """
    samples = unit(mean[:, None] + described)
    return samples - samples.mean(1, keepdim=True)
