"""DFSP (Lu et al., "Decomposed Soft Prompt Guided Fusion Enhancing for Compositional Zero-Shot Learning", CVPR 2023),
over cached features.

A soft prompt with a learned prefix and vocabulary gives text features t_c of the seen compositions. They are
*decomposed*: t_s and t_o are the means of t_c over the compositions with a state or an object. *Fusion* is
cross-attention between text and the image's patch tokens X:

    t2i:  the image attends to the decomposed text,   x' = z + A((z + mean W X) / 2, [t_s; t_o]),  z the CLS feature
    i2t:  the text attends to the image,               t'_c = t_c + A(t_c, X)
    bif:  both

`L = L_dfm + alpha L_st+obj + beta L_spm`: fused compositions, decomposed primitives, and the soft prompt as it is.
Scores are the fused ones. Attention's last layer starts at zero, so training starts at the soft prompt; `fusion: none`
stays there. The paper's blocks of self-attention after the fusion are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.methods.base import Batch, Method, Scorer, Setting
from duplex.options import Options
from duplex.parts.attention import CrossAttention, in_blocks
from duplex.parts.factors import unit
from duplex.parts.heads import Columns
from duplex.parts.prompts import TEMPLATE, Prompts


@dataclass(frozen=True)
class DfspOptions(Options):
    fusion: Literal["t2i", "i2t", "bif", "none"] = "t2i"
    heads: int = 4
    primitives: float = 0.01  # alpha
    plain: float = 0.1  # beta
    template: str = TEMPLATE  # what the prefix starts from

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.heads >= 1, f"heads is {self.heads}; it is at least 1"
        yield self.primitives >= 0 and self.plain >= 0, "primitives and plain are at least 0"
        yield self.template.strip(), "template is empty; give at least one word such as 'a photo of'"

    @property
    def to_image(self) -> bool:
        return self.fusion in ("t2i", "bif")

    @property
    def to_text(self) -> bool:
        return self.fusion in ("i2t", "bif")


class Texts(NamedTuple):
    """Text features of compositions and their decomposition over the seen ones, of unit length."""

    compositions: Tensor  # t_c [C, d]
    states: Tensor  # t_s [M, d]
    objects: Tensor  # t_o [N, d]


class Dfsp(Method[DfspOptions]):
    Options = DfspOptions

    def __init__(self, setting: Setting, options: DfspOptions) -> None:
        super().__init__(setting, options)
        labels, tower, dim = setting.labels, setting.tower, setting.dim
        if options.fusion != "none" and dim % options.heads:
            raise UsageError(f"heads is {options.heads}; the feature's width {dim} is no multiple of it")
        self.scale = math.exp(tower.logit_scale)  # 1 / tau
        self.prompts = Prompts(
            labels, tower, context="learned", vocabulary="learned", paths="c", template=options.template
        )
        self.columns = Columns(labels.pairs["train"], len(labels.objects))
        inside = setting.inputs["patch"][1] if options.fusion != "none" else 0
        self.project = nn.Linear(inside, dim) if options.to_image else None
        self.to_image = CrossAttention(dim, dim, options.heads, quiet=True) if options.to_image else None
        self.to_text = CrossAttention(dim, inside, options.heads, quiet=True) if options.to_text else None

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"} if options.fusion == "none" else {"cls", "text", "patch"})

    def decomposed(self, t: Tensor) -> Texts:
        """From the seen compositions' features: means over those with a primitive."""
        sizes = len(self.labels.states), len(self.labels.objects)
        groups = zip(sizes, (self.columns.states, self.columns.objects), strict=True)
        states, objects = (unit(t.new_zeros(k, t.shape[1]).index_add(0, group, t)) for k, group in groups)
        return Texts(t, states, objects)

    def shared(self) -> Texts:
        return self.decomposed(self.prompts(self.labels.pairs["train"], self.checkpointing).compositions)

    def image(self, z: Tensor, t: Texts, tokens: Tensor | None) -> Tensor:
        """`x'` of unit length [B, d]"""
        if self.to_image is None or tokens is None:
            return z
        assert self.project is not None
        read = self.project(tokens.to(z.dtype)).mean(1)  # [B, d]
        x = z + self.to_image((z + read) / 2, torch.cat([t.states, t.objects]))
        return unit(x)

    def fused(self, z: Tensor, t: Texts, tokens: Tensor | None) -> Tensor:
        """Logits of compositions after fusion [B, C]."""
        x = self.image(z, t, tokens)
        if self.to_text is None or tokens is None:
            return self.scale * x @ t.compositions.T
        pulled = unit(t.compositions + self.to_text(t.compositions, tokens.to(z.dtype)))  # [B, C, d]
        return self.scale * (pulled @ x[:, :, None])[..., 0]

    def losses(self, batch: Batch, shared: Texts) -> dict[str, Tensor]:
        z, own, n = unit(batch.z), batch.compositions, len(self.labels.objects)
        place = self.columns.places(own)
        losses = {"dfm": cross_entropy(self.fused(z, shared, batch.inputs.get("patch")), place)}
        if self.options.primitives:
            of_states, of_objects = (self.scale * z @ rows.T for rows in (shared.states, shared.objects))
            both = cross_entropy(of_states, own // n) + cross_entropy(of_objects, own % n)
            losses["primitives"] = self.options.primitives * both
        if self.options.plain:
            losses["spm"] = self.options.plain * cross_entropy(self.scale * z @ shared.compositions.T, place)
        return losses

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        seen = self.decomposed(self.prompts.encode(self.labels.pairs["train"]).compositions)
        t = seen._replace(compositions=self.prompts.encode(columns).compositions)
        if self.options.fusion == "none":
            return lambda inputs: self.plain(unit(inputs["cls"]), t)
        patches, inside = self.setting.inputs["patch"]
        width = patches * (inside + self.setting.dim)
        width += len(columns) * (2 * self.setting.dim + self.options.heads * patches) if self.options.to_text else 0

        @torch.no_grad()
        def some(cls: Tensor, tokens: Tensor) -> Tensor:
            return self.fused(unit(cls), t, tokens).softmax(-1)

        return lambda inputs: in_blocks(some, inputs["cls"], inputs["patch"], width)

    @torch.no_grad()
    def plain(self, z: Tensor, t: Texts) -> Tensor:
        return self.fused(z, t, None).softmax(-1)
