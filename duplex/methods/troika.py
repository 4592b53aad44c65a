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
feature. Dropout in the layers is left out. `disentangler`, `score` and the training option
`word_dropout` can follow the published code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import CrossAttention, ThreePathOptions, ThreePaths, score_in_chunks
from duplex.methods.layers import CompositionIndex, unit
from duplex.methods.prompts import Prototypes
from duplex.options import Count


@dataclass(frozen=True)
class TroikaOptions(ThreePathOptions):
    layers: Count = 2  # layers N of cross-attention
    heads: Count = 4  # heads of the cross-attention
    inner: Count = 4  # hidden units of F as a multiple of the feature's width
    start: float = 0.1  # initial value of lambda, the strength of the pull


class TractionLayer(nn.Module):
    """Residual layer: prompt features attend to patch tokens, then pass a feed-forward network."""

    def __init__(self, dim: int, token_width: int, options: TroikaOptions) -> None:
        super().__init__()
        hidden = options.inner * dim
        self.attend = CrossAttention(dim, token_width, options.heads, zero_output=False)
        widen = nn.Linear(dim, hidden)
        last = nn.Linear(hidden, dim)
        self.forward_part = nn.Sequential(nn.LayerNorm(dim), widen, nn.GELU(), last)

    def forward(self, h: Tensor, tokens: Tensor) -> Tensor:
        g = h + self.attend(h, tokens)[0]
        return torch.add(g, self.forward_part(g))


class Traction(nn.Module):
    """Layers that pull text features `t` [C, d] towards each image; unit vectors [B, C, d]."""

    def __init__(self, dim: int, token_width: int, options: TroikaOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(token_width)
        layers = [TractionLayer(dim, token_width, options) for _ in range(options.layers)]
        self.layers = nn.ModuleList(layers)
        self.strength = nn.Parameter(torch.full((dim,), options.start))  # lambda [d]

    def forward(self, t: Tensor, tokens: Tensor) -> Tensor:
        h = t
        normed = self.norm(tokens)
        for layer in self.layers:
            h = layer(h, normed)
        return unit(t + self.strength * h)


class Troika(ThreePaths[TroikaOptions]):
    """Troika: three paths; each image pulls the prompts' text features towards itself."""

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "text", "patch")

    def __init__(self, context: MethodContext, options: TroikaOptions) -> None:
        super().__init__(context, options)
        self.traction = Traction(context.dim, context.inputs["patch"][1], options)

    def pulled_logits(self, z: Tensor, t: Prototypes, tokens: Tensor) -> list[Tensor]:
        """Logits of pairs, states, objects for features `z`, by texts `t` that `tokens` pull."""
        assert self.paths.factors is not None
        features = (z, *self.paths.factors(z))
        pulled = self.traction(torch.cat(tuple(t)), tokens.to(z.dtype))
        paths = zip(features, pulled.split([len(rows) for rows in t], dim=1), strict=True)
        return [self.paths.scale * (rows @ f[:, :, None])[..., 0] for f, rows in paths]

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        logits = self.pulled_logits(self.paths.adapt(batch.cls), shared, batch.inputs["patch"])
        return self.three_path_losses(logits, batch.compositions, primitives=self.options.primitives)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        def chunk_scores(cls: Tensor, tokens: Tensor) -> Tensor:
            logits = self.pulled_logits(self.paths.adapt(cls), prepared, tokens)
            return self.joined_score(logits, prepared, candidates)

        dim = self.context.dim
        patches = self.context.inputs["patch"][0]
        width = sum(map(len, prepared)) * (dim * (self.options.inner + 2) + patches)
        return score_in_chunks(chunk_scores, inputs["cls"], inputs["patch"], width)
