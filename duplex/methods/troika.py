"""Troika: three paths whose text features are pulled towards each image.

Huang et al., "Troika: Multi-Path Cross-Modal Traction for Compositional Zero-Shot Learning", CVPR
2024.

    h_0 = t,   g = h_(l-1) + A_l(h_(l-1), X),   h_l = g + F_l(norm(g)),       t' = t + lambda * h_N
    L = L_c + L_s + L_o
    S = p(c|x) + p(s|x) p(o|x)

* t: text feature of a prompt of a composition, a state or an object;  X: normalised patch tokens
* A_l, F_l: cross-attention and feed-forward of N layers;  lambda: a learned factor per channel
* L_c, L_s, L_o, p: cross-entropies and posteriors by t' of compositions, states and objects

Instead of the paper's adapters in the image encoder, there is by default one after the cached
feature. `disentangler`, `score` and the training option `word_dropout` can follow the published
code, and with `form: published` so do these parts:

* X: CLS feature and patch tokens, projected; each path, in turn, normalises the result of the one
  before it again
* A_l: queries, keys and values without bias;  F_l: with QuickGELU
* the disentanglers read the feature before it is scaled to unit length
* after the first epoch, the method stays in evaluation mode: without dropout, with fixed statistics
  of batch norms. The code's adapters in the encoder lose their dropout, too; here they keep it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import CrossAttention, Form, ImageTokens, ThreePathOptions, ThreePaths, score_in_chunks
from duplex.methods.layers import CompositionIndex, QuickGelu, unit
from duplex.methods.prompts import Prototypes
from duplex.options import Count, Rate


@dataclass(frozen=True)
class TroikaOptions(ThreePathOptions):
    layers: Count = 2  # layers N of cross-attention
    heads: Count = 4  # heads of the cross-attention
    inner: Count = 4  # hidden units of F as a multiple of the feature's width
    start: float = 0.1  # initial value of lambda, the strength of the pull
    dropout: Rate = 0.0  # of the outputs of A_l and F_l, and inside F_l
    form: Form = "plain"  # published: tokens, layers and modes of the published code


class TractionLayer(nn.Module):
    """Residual layer: prompt features attend to patch tokens, then pass a feed-forward network."""

    def __init__(self, dim: int, token_width: int, options: TroikaOptions) -> None:
        super().__init__()
        hidden = options.inner * dim
        plain = options.form == "plain"
        self.rate = options.dropout
        self.attend = CrossAttention(dim, token_width, options.heads, zero_output=False, bias=plain)
        widen = nn.Linear(dim, hidden)
        last = nn.Linear(hidden, dim)
        activation = nn.Sequential(nn.GELU() if plain else QuickGelu(), nn.Dropout(self.rate))
        self.forward_part = nn.Sequential(nn.LayerNorm(dim), widen, activation, last)

    def forward(self, h: Tensor, tokens: Tensor) -> Tensor:
        g = h + dropout(self.attend(h, tokens)[0], self.rate, self.training)
        return torch.add(g, dropout(self.forward_part(g), self.rate, self.training))


class Traction(nn.Module):
    """Layers that pull text features `t` [C, d] towards each image; unit vectors [B, C, d]."""

    def __init__(self, dim: int, token_width: int, options: TroikaOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(token_width)
        layers = [TractionLayer(dim, token_width, options) for _ in range(options.layers)]
        self.layers = nn.ModuleList(layers)
        self.strength = nn.Parameter(torch.full((dim,), options.start))  # lambda [d]

    def forward(self, t: Tensor, normed: Tensor) -> Tensor:
        """Pull `t` by tokens [B, T, w] that `norm` has normalised."""
        h = t
        for layer in self.layers:
            h = layer(h, normed)
        return unit(t + self.strength * h)


class Troika(ThreePaths[TroikaOptions]):
    """Troika: three paths; each image pulls the prompts' text features towards itself."""

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "text", "patch")
    settled: Tensor

    def __init__(self, context: MethodContext, options: TroikaOptions) -> None:
        super().__init__(context, options)
        self.is_published = options.form == "published"
        token_width = context.dim if self.is_published else context.inputs["patch"][1]
        self.traction = Traction(context.dim, token_width, options)
        if self.is_published:
            self.tokens = ImageTokens(context)
            self.register_buffer("settled", torch.tensor(False))  # whether an epoch has passed

    def train(self, mode: bool = True) -> Troika:
        stays = self.is_published and bool(self.settled)
        return super().train(mode and not stays)

    def after_epoch(self, epoch: int) -> None:
        if self.is_published:
            self.settled.fill_(True)

    def pulled_texts(self, t: Prototypes, cls: Tensor, patch: Tensor) -> list[Tensor]:
        """Texts of pairs, states and objects [B, C, d], pulled by an image's tokens."""
        if not self.is_published:
            pulled = self.traction(torch.cat(tuple(t)), self.traction.norm(patch))
            return list(pulled.split([len(rows) for rows in t], dim=1))
        tokens = self.tokens(cls, patch)
        texts = []
        for rows in t:
            tokens = self.traction.norm(tokens)
            texts.append(self.traction(rows, tokens))
        return texts

    def pulled_logits(self, cls: Tensor, t: Prototypes, patch: Tensor) -> list[Tensor]:
        """Logits of pairs, states, objects for CLS features, by texts `t` that `patch` tokens pull."""
        assert self.paths.factors is not None
        z = self.paths.adapt(cls)
        whole = self.unscaled(cls, z) if self.is_published else z
        features = (z, *self.paths.factors(whole))
        paths = zip(features, self.pulled_texts(t, whole, patch.to(z.dtype)), strict=True)
        return [self.paths.scale * (rows @ f[:, :, None])[..., 0] for f, rows in paths]

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        logits = self.pulled_logits(batch.cls, shared, batch.inputs["patch"])
        return self.three_path_losses(logits, batch.compositions, primitives=self.options.primitives)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        def chunk_scores(cls: Tensor, tokens: Tensor) -> Tensor:
            logits = self.pulled_logits(cls, prepared, tokens)
            return self.joined_score(logits, prepared, candidates)

        dim = self.context.dim
        patches = self.context.inputs["patch"][0]
        width = sum(map(len, prepared)) * (dim * (self.options.inner + 2) + patches)
        return score_in_chunks(chunk_scores, inputs["cls"], inputs["patch"], width)
