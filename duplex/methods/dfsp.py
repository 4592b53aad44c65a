"""DFSP: a soft prompt's text features are split into states and objects, and fused with tokens.

Lu et al., "Decomposed Soft Prompt Guided Fusion Enhancing for Compositional Zero-Shot Learning",
CVPR 2023.

    B(x, y) = g + F(norm(g)),   g = x + A(norm(x), norm(y))                 fusion of x with y
    t2i:  h = B_1([z; W X], [t_s; t_o]),   x' = w z + (1 - w) B_2(h_0, h)
    i2t:  [t'_s; t'_o] = B([t_s; t_o], X),  t'_c = w t_c + (1 - w) V (t'_s * t'_o)
    bif:  both
    L = L_dfm + alpha L_st+obj + beta L_spm,    S = p(c|x) after fusion

* t_c: text features of the soft prompt;  t_s, t_o: means over seen pairs with the state (object)
* z, X: CLS feature and patch tokens;  h_0: the first vector of h
* A, F: cross-attention and feed-forward;  W, V: linear maps;  w: weight
* L_dfm: cross-entropy of compositions after fusion;  L_st+obj: of states, objects by t_s, t_o;  L_spm: of
  compositions without fusion

With t2i, the image attends to the decomposed text, then to itself. With i2t, the decomposed text
attends to the image and is composed again. The last layers of fusion blocks start at zero, so
training starts without an effect of fusion; with `fusion: none` it stays so. The paper fuses the
towers' tokens before they are projected, and has blocks of self-attention for the text and for the
unfused tokens, too; these are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import CrossBlock, TextMethod, TextOptions, score_in_chunks
from duplex.methods.layers import CompositionIndex, unit, zero_initialised
from duplex.methods.prompts import TEMPLATE, Prototypes
from duplex.options import Count, NonNegative, Share, Template


@dataclass(frozen=True)
class DfspOptions(TextOptions):
    fusion: Literal["t2i", "i2t", "bif", "none"] = "t2i"  # text to image, image to text, both
    heads: Count = 4  # heads of the cross-attention
    primitives: NonNegative = 0.01  # weight alpha of L_st+obj
    plain: NonNegative = 0.1  # weight beta of L_spm
    keep: Share = 0.8  # weight w of the features before fusion
    template: Template = TEMPLATE  # words whose tokens initialise the prefix

    @property
    def fuses_images(self) -> bool:
        return self.fusion in ("t2i", "bif")

    @property
    def fuses_text(self) -> bool:
        return self.fusion in ("i2t", "bif")


class Dfsp(TextMethod[DfspOptions]):
    """DFSP: prompts with a learned prefix; attention fuses text and image features (`fusion`)."""

    def __init__(self, context: MethodContext, options: DfspOptions) -> None:
        super().__init__(context, options)
        dim = context.dim
        heads = options.heads
        self.prompts = self.soft_prompts(options.template)
        token_width = context.inputs["patch"][1] if options.fusion != "none" else 0
        if options.fuses_images:
            self.project = nn.Linear(token_width, dim)  # W
            self.to_image = CrossBlock(dim, dim, heads)  # B_1
            self.to_itself = CrossBlock(dim, dim, heads)  # B_2
        if options.fuses_text:
            self.to_text = CrossBlock(dim, token_width, heads)
            self.compose = zero_initialised(nn.Linear(dim, dim))

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"} if options.fusion == "none" else {"cls", "text", "patch"})

    def decompose(self, t: Tensor) -> Prototypes:
        """Seen pairs' features `t` [C, d], with means per state [M, d] and object [N, d]."""
        return Prototypes(t, *self.train_candidates.means(t, len(self.labels.states), len(self.labels.objects)))

    def shared(self) -> Prototypes:
        return self.decompose(self.prompts(self.labels.pairs["train"], self.checkpointing).compositions)

    def fused_images(self, z: Tensor, t: Prototypes, tokens: Tensor) -> Tensor:
        x = torch.cat([z[:, None], self.project(tokens)], dim=1)  # [B, 1 + T, d]
        h, _ = self.to_image(x, torch.cat([t.states, t.objects]))
        return unit(self.options.keep * z + (1 - self.options.keep) * self.to_itself(h[:, :1], h)[0][:, 0])

    def fused_texts(self, t: Prototypes, candidates: CompositionIndex, tokens: Tensor) -> Tensor:
        primitives, _ = self.to_text(torch.cat([t.states, t.objects]), tokens)  # [B, M + N, d]
        states, objects = primitives.split((len(t.states), len(t.objects)), dim=1)
        by_state = states.index_select(1, candidates.states)
        composed = self.compose(by_state * objects.index_select(1, candidates.objects))
        return unit(self.options.keep * t.compositions + (1 - self.options.keep) * composed)

    def fused_logits(self, z: Tensor, t: Prototypes, candidates: CompositionIndex, tokens: Tensor | None) -> Tensor:
        """Logits [B, C] of the candidates, after fusion with `tokens` if they are given."""
        tokens = None if tokens is None else tokens.to(z.dtype)
        x = self.fused_images(z, t, tokens) if self.options.fuses_images and tokens is not None else z
        if not self.options.fuses_text or tokens is None:
            return self.scale * x @ t.compositions.T
        return self.scale * (self.fused_texts(t, candidates, tokens) @ x[:, :, None])[..., 0]

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z = unit(batch.cls)
        m, n = self.primitives(batch.compositions)
        target = self.train_candidates.positions_of_listed(batch.compositions)
        logits = self.fused_logits(z, shared, self.train_candidates, batch.inputs.get("patch"))
        losses = {"fused": cross_entropy(logits, target)}
        if self.options.primitives:
            loss_s = cross_entropy(self.scale * z @ shared.states.T, m)
            loss_o = cross_entropy(self.scale * z @ shared.objects.T, n)
            losses["primitives"] = self.options.primitives * (loss_s + loss_o)
        if self.options.plain:
            losses["plain"] = self.options.plain * cross_entropy(self.scale * z @ shared.compositions.T, target)
        return losses

    def prepare(self, candidates: CompositionIndex) -> Prototypes:
        seen = self.decompose(self.prompts.encode(self.labels.pairs["train"]).compositions)
        return seen._replace(compositions=self.prompts.encode(candidates.compositions_np).compositions)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        def chunk_scores(cls: Tensor, tokens: Tensor | None = None) -> Tensor:
            return self.scored(self.fused_logits(unit(cls), prepared, candidates, tokens))

        if self.options.fusion == "none":
            return chunk_scores(inputs["cls"])
        patches, token_width = self.context.inputs["patch"]
        dim = self.context.dim
        fused_texts = len(prepared.compositions) if self.options.fuses_text else 0
        width = patches * (token_width + 6 * dim) + 3 * fused_texts * dim
        return score_in_chunks(chunk_scores, inputs["cls"], inputs["patch"], width)
