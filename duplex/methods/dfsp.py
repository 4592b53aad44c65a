"""DFSP (Lu et al., "Decomposed Soft Prompt Guided Fusion Enhancing for Compositional Zero-Shot Learning", CVPR 2023),
over cached features.

A soft prompt with a learned prefix and vocabulary gives text features t_c of the seen compositions. They are
*decomposed*: t_s and t_o are the means of t_c over the compositions with a state or an object. *Fusion* is a block of
cross-attention A and feed-forward F, `B(x, y) = g + F(norm(g))`, `g = x + A(norm(x), norm(y))`, between text and the
image's tokens, the CLS feature z and the patches X:

    t2i:  the image attends to the decomposed text and then to itself,
          h = B_1([z; W X], [t_s; t_o]),   x' = w z + (1 - w) B_2(h_0, h)
    i2t:  the decomposed text attends to the image and is composed anew,
          [t'_s; t'_o] = B([t_s; t_o], X),  t'_c = w t_c + (1 - w) V (t'_s * t'_o)
    bif:  both

`L = L_dfm + alpha L_st+obj + beta L_spm`: fused compositions, decomposed primitives (logits are the means of their
compositions'), and the soft prompt as it is. Scores are the fused ones. Last layers start at zero, so training starts
at the soft prompt; `fusion: none` stays there. The paper fuses the towers' tokens before they are projected, and has
blocks of self-attention for the text and for what was not fused too; those are left out.
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
from duplex.layers.attention import CrossBlock, in_blocks, silent
from duplex.layers.composition_index import Columns
from duplex.layers.factors import unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts
from duplex.methods.base import Batch, Method, Scorer, Setting
from duplex.options import Options


@dataclass(frozen=True)
class DfspOptions(Options):
    fusion: Literal["t2i", "i2t", "bif", "none"] = "t2i"
    heads: int = 4
    primitives: float = 0.01  # alpha
    plain: float = 0.1  # beta
    keep: float = 0.8  # w
    template: str = TEMPLATE  # what the prefix starts from

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.heads >= 1, f"heads is {self.heads}; it is at least 1"
        yield self.primitives >= 0 and self.plain >= 0, "primitives and plain are at least 0"
        yield 0 <= self.keep <= 1, f"keep is {self.keep}; it lies in [0, 1]"
        yield self.template.strip(), "template is empty; give at least one word such as 'a photo of'"

    @property
    def to_image(self) -> bool:
        return self.fusion in ("t2i", "bif")

    @property
    def to_text(self) -> bool:
        return self.fusion in ("i2t", "bif")


class Texts(NamedTuple):
    """Text features of compositions, of unit length, and their means over the seen ones with a primitive."""

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
        heads = options.heads
        if options.to_image:
            self.project = nn.Linear(inside, dim)  # W
            self.to_image, self.to_itself = CrossBlock(dim, dim, heads), CrossBlock(dim, dim, heads)
        if options.to_text:
            self.to_text, self.compose = CrossBlock(dim, inside, heads), silent(nn.Linear(dim, dim))  # B, V

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"} if options.fusion == "none" else {"cls", "text", "patch"})

    def decomposed(self, t: Tensor) -> Texts:
        """From the seen compositions' features: means over those with a primitive."""
        return Texts(t, *self.columns.means(t, len(self.labels.states), len(self.labels.objects)))

    def shared(self) -> Texts:
        return self.decomposed(self.prompts(self.labels.pairs["train"], self.checkpointing).compositions)

    def image(self, z: Tensor, t: Texts, tokens: Tensor) -> Tensor:
        """`x'` of unit length [B, d]"""
        whole = torch.cat([z[:, None], self.project(tokens)], dim=1)  # [B, 1 + T, d]
        h = self.to_image(whole, torch.cat([t.states, t.objects]))
        return unit(self.options.keep * z + (1 - self.options.keep) * self.to_itself(h[:, :1], h)[:, 0])

    def text(self, t: Texts, columns: Columns, tokens: Tensor) -> Tensor:
        """`t'_c` of unit length [B, C, d]"""
        pulled = self.to_text(torch.cat([t.states, t.objects]), tokens)  # [B, M + N, d]
        states, objects = pulled.split((len(t.states), len(t.objects)), dim=1)
        composed = self.compose(states.index_select(1, columns.states) * objects.index_select(1, columns.objects))
        return unit(self.options.keep * t.compositions + (1 - self.options.keep) * composed)

    def fused(self, z: Tensor, t: Texts, columns: Columns, tokens: Tensor | None) -> Tensor:
        """Logits of compositions after fusion [B, C]."""
        tokens = None if tokens is None else tokens.to(z.dtype)
        x = self.image(z, t, tokens) if self.options.to_image and tokens is not None else z
        if not self.options.to_text or tokens is None:
            return self.scale * x @ t.compositions.T
        return self.scale * (self.text(t, columns, tokens) @ x[:, :, None])[..., 0]

    def losses(self, batch: Batch, shared: Texts) -> dict[str, Tensor]:
        z, own, n = unit(batch.z), batch.compositions, len(self.labels.objects)
        place = self.columns.places(own)
        losses = {"dfm": cross_entropy(self.fused(z, shared, self.columns, batch.inputs.get("patch")), place)}
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
        asked = Columns(columns, len(self.labels.objects)).to(t.states.device)

        @torch.no_grad()
        def some(cls: Tensor, tokens: Tensor | None = None) -> Tensor:
            return self.fused(unit(cls), t, asked, tokens).softmax(-1)

        if self.options.fusion == "none":
            return lambda inputs: some(inputs["cls"])
        (patches, inside), dim = self.setting.inputs["patch"], self.setting.dim
        held = patches * (inside + 6 * dim) + (3 * len(columns) * dim if self.options.to_text else 0)
        return lambda inputs: in_blocks(some, inputs["cls"], inputs["patch"], held)
