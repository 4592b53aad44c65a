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
training starts without an effect of fusion. With `form: published`, the fusion is the one of the
code, which starts at random and drops out 0.3 of its values:

    t2i:  x' = w z + (1 - w) I(B([z; X], P_t W_t [t_s; t_o]))_0,   t'_c = w t_c + (1 - w) T(t_c)
    i2t:  [t'_s; t'_o] = T(B([t_s; t_o], P_x W_x [z; X])),   x' = w z + (1 - w) I([z; X])_0

* P_t, P_x: linear maps that mix tokens: as many as the image has out of one per state and object, or
  vice versa. A state (object) then attends to its own token;  W_t, W_x: linear maps
* I, T: blocks of self-attention, for images and for texts;  t_s, t_o: in scores, means over candidates

Two differences remain. The code fuses the towers' tokens before they are projected, and all eight
of a prompt, of which only the last is here, so T attends to a single token. In the code's i2t, texts
also attend to those of the batch's other images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import CrossBlock, Form, ImageTokens, TextMethod, TextOptions, score_in_chunks
from duplex.methods.layers import CompositionIndex, unit, zero_initialised
from duplex.methods.prompts import TEMPLATE, Prototypes
from duplex.options import Count, NonNegative, Share, Template

DROPOUT = 0.3  # of the published code's fusion


@dataclass(frozen=True)
class DfspOptions(TextOptions):
    fusion: Literal["t2i", "i2t", "bif"] = "t2i"  # text to image, image to text, both
    heads: Count = 4  # heads of the cross-attention
    primitives: NonNegative = 0.01  # weight alpha of L_st+obj
    plain: NonNegative = 0.1  # weight beta of L_spm
    keep: Share = 0.8  # weight w of the features before fusion
    template: Template = TEMPLATE  # words whose tokens initialise the prefix
    form: Form = "plain"  # published: the published code's fusion

    @property
    def fuses_images(self) -> bool:
        return self.fusion in ("t2i", "bif")

    @property
    def fuses_text(self) -> bool:
        return self.fusion in ("i2t", "bif")


class SelfBlock(CrossBlock):
    """Residual block in which `x` [..., T, d] attends to itself."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, dim, heads, "published", DROPOUT)
        del self.norm_y

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.norm_x(x)
        g = x + self.attend(y, y)[0]
        return torch.add(g, self.forward_part(g))


class PublishedFusion(nn.Module):
    """The published code's fusion of an image's tokens [B, 1 + T, d] with text features."""

    def __init__(self, context: MethodContext, options: DfspOptions) -> None:
        super().__init__()
        dim = context.dim
        heads = options.heads
        tokens = 1 + context.inputs["patch"][0]
        primitives = len(context.labels.states) + len(context.labels.objects)
        self.tokens = ImageTokens(context)
        if options.fuses_images:
            self.map_texts = nn.Linear(dim, dim)  # W_t
            self.mix_texts = nn.Linear(primitives, tokens)  # P_t
            self.to_image = CrossBlock(dim, dim, heads, "published")
        if options.fuses_text:
            self.map_images = nn.Linear(dim, dim)  # W_x
            self.mix_images = nn.Linear(tokens, primitives)  # P_x
            self.to_text = CrossBlock(dim, dim, heads, "published")
            self.compose = nn.Linear(dim, dim)  # V
        self.images = SelfBlock(dim, heads)  # I
        self.texts = SelfBlock(dim, heads)  # T

    def fused_images(self, x: Tensor, primitives: Tensor) -> Tensor:
        """Image features [B, d] by the tokens `x`, fused with those of states and objects [M + N, d]."""
        if hasattr(self, "to_image"):
            mixed = self.mix_texts(self.map_texts(primitives).T).T  # [1 + T, d]
            x, _ = self.to_image(x, dropout(mixed, DROPOUT, self.training))
        return torch.select(self.images(x), 1, 0)

    def fused_texts(self, t: Prototypes, candidates: CompositionIndex, x: Tensor) -> Tensor:
        """Text features of the candidates: [C, d], or [B, C, d] if fused with the tokens `x`."""
        if not hasattr(self, "to_text"):
            return torch.select(self.texts(t.compositions[:, None]), 1, 0)
        mixed = self.mix_images(self.map_images(x).transpose(1, 2)).transpose(1, 2)  # [B, M + N, d]
        mixed = dropout(mixed, DROPOUT, self.training)
        rows = torch.cat([t.states, t.objects]).expand_as(mixed)
        primitives = self.texts(self.to_text(rows[:, :, None], mixed[:, :, None])[0])[:, :, 0]
        states, objects = primitives.split((len(t.states), len(t.objects)), dim=1)
        product = states.index_select(1, candidates.states) * objects.index_select(1, candidates.objects)
        composed: Tensor = self.compose(product)
        return composed


class Dfsp(TextMethod[DfspOptions]):
    """DFSP: prompts with a learned prefix; attention fuses text and image features (`fusion`)."""

    required_inputs = ("cls", "patch", "text")

    def __init__(self, context: MethodContext, options: DfspOptions) -> None:
        super().__init__(context, options)
        dim = context.dim
        heads = options.heads
        self.prompts = self.soft_prompts(options.template)
        self.published: PublishedFusion | None = None
        if options.form == "published":
            self.published = PublishedFusion(context, options)
            return
        token_width = context.inputs["patch"][1]
        if options.fuses_images:
            self.project = nn.Linear(token_width, dim)  # W
            self.to_image = CrossBlock(dim, dim, heads)  # B_1
            self.to_itself = CrossBlock(dim, dim, heads)  # B_2
        if options.fuses_text:
            self.to_text = CrossBlock(dim, token_width, heads)
            self.compose = zero_initialised(nn.Linear(dim, dim))

    @classmethod
    def scores_new_words(cls, options: Any) -> bool:
        return bool(options.form == "plain")  # the published code mixes a fixed number of tokens

    def decompose(self, t: Tensor, index: CompositionIndex | None = None) -> Prototypes:
        """Features `t` [C, d] of pairs (None: the seen ones), with means per state [M, d] and object [N, d]."""
        index = index or self.train_candidates
        return Prototypes(t, *index.means(t, len(self.labels.states), len(self.labels.objects)))

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

    def published_logits(self, cls: Tensor, t: Prototypes, candidates: CompositionIndex, patch: Tensor) -> Tensor:
        """Logits [B, C] of the candidates by the published code's fusion."""
        assert self.published is not None
        w = self.options.keep
        tokens = self.published.tokens(cls, patch)
        x = unit(w * cls + (1 - w) * self.published.fused_images(tokens, torch.cat([t.states, t.objects])))
        pulled = unit(w * t.compositions + (1 - w) * self.published.fused_texts(t, candidates, tokens))
        if pulled.ndim == 2:
            return self.scale * x @ pulled.T
        return self.scale * (pulled @ x[:, :, None])[..., 0]

    def fused_logits(self, cls: Tensor, t: Prototypes, candidates: CompositionIndex, tokens: Tensor) -> Tensor:
        """Logits [B, C] of the candidates, after fusion with `tokens`."""
        z = unit(cls)
        tokens = tokens.to(z.dtype)
        if self.published is not None:
            return self.published_logits(cls.to(z.dtype), t, candidates, tokens)
        x = self.fused_images(z, t, tokens) if self.options.fuses_images else z
        if not self.options.fuses_text:
            return self.scale * x @ t.compositions.T
        return self.scale * (self.fused_texts(t, candidates, tokens) @ x[:, :, None])[..., 0]

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z = unit(batch.cls)
        m, n = self.primitives(batch.compositions)
        target = self.train_candidates.positions_of_listed(batch.compositions)
        logits = self.fused_logits(batch.cls, shared, self.train_candidates, batch.inputs["patch"])
        losses = {"fused": cross_entropy(logits, target)}
        if self.options.primitives:
            loss_s = cross_entropy(self.scale * z @ shared.states.T, m)
            loss_o = cross_entropy(self.scale * z @ shared.objects.T, n)
            losses["primitives"] = self.options.primitives * (loss_s + loss_o)
        if self.options.plain:
            losses["plain"] = self.options.plain * cross_entropy(self.scale * z @ shared.compositions.T, target)
        return losses

    def prepare(self, candidates: CompositionIndex) -> Prototypes:
        t = self.prompts.encode(candidates.compositions_np).compositions
        if self.published is not None:
            return self.decompose(t, candidates)
        seen = self.decompose(self.prompts.encode(self.labels.pairs["train"]).compositions)
        return seen._replace(compositions=t)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        def chunk_scores(cls: Tensor, tokens: Tensor) -> Tensor:
            return self.scored(self.fused_logits(cls, prepared, candidates, tokens))

        patches, token_width = self.context.inputs["patch"]
        dim = self.context.dim
        fused_texts = len(prepared.compositions) if self.options.fuses_text else 0
        if self.published is not None and self.options.fuses_text:
            fused_texts += 8 * (len(prepared.states) + len(prepared.objects))
        width = patches * (token_width + 6 * dim) + 3 * fused_texts * dim
        return score_in_chunks(chunk_scores, inputs["cls"], inputs["patch"], width)
