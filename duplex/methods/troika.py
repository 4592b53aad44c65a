"""Troika (Huang et al., "Troika: Multi-Path Cross-Modal Traction for Compositional Zero-Shot Learning", CVPR 2024),
over cached features.

Three paths with prompts of their own. Cross-modal traction pulls every prompt's feature towards the image it is
compared with: with the image's normalised patch tokens X, a few layers of cross-attention A and feed-forward F,

    h_0 = t,   g = h_(l-1) + A_l(h_(l-1), X),   h_l = g + F_l(norm(g)),       t' = t + lambda * h_N

for compositions, states and objects alike; the layers and `lambda`, one number a channel, are learned and shared by
the paths. `L = L_c + L_s + L_o` and `S = p(c|x) + p(s|x) p(o|x)`. The paper's adapters inside the image encoder are the
feature's adapter here, and its dropout in traction and in words is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.layers.attention import CrossAttention, in_blocks
from duplex.layers.composition_index import Columns
from duplex.layers.factors import unit
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch, Scorer, Setting
from duplex.methods.three_paths import ThreePathOptions, ThreePaths


@dataclass(frozen=True)
class TroikaOptions(ThreePathOptions):
    traction: bool = True  # without it these are the three paths
    layers: int = 2  # N
    heads: int = 4
    inner: int = 4  # hidden units of F, in widths of the feature
    start: float = 0.1  # of lambda

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield min(self.layers, self.heads, self.inner) >= 1, "layers, heads and inner are at least 1"


class TractionLayer(nn.Module):
    """`h -> g + F(norm(g))`, `g = h + A(h, X)`"""

    def __init__(self, dim: int, inside: int, options: TroikaOptions) -> None:
        super().__init__()
        hidden = options.inner * dim
        self.attend = CrossAttention(dim, inside, options.heads, quiet=False)
        self.forward_part = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, h: Tensor, tokens: Tensor) -> Tensor:
        """[C, d] or [B, C, d], [B, T, w] -> [B, C, d]"""
        g = h + self.attend(h, tokens)
        found: Tensor = g + self.forward_part(g)
        return found


class Traction(nn.Module):
    """`t' = t + lambda * h_N` for every image."""

    def __init__(self, dim: int, inside: int, options: TroikaOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inside)
        self.layers = nn.ModuleList(TractionLayer(dim, inside, options) for _ in range(options.layers))
        self.strength = nn.Parameter(torch.full((dim,), options.start))  # lambda [d]

    def forward(self, t: Tensor, tokens: Tensor) -> Tensor:
        """Prototypes `t` [C, d], tokens [B, T, w] -> [B, C, d], of unit length"""
        h, tokens = t, self.norm(tokens)
        for layer in self.layers:
            h = layer(h, tokens)
        return unit(t + self.strength * h)


class Troika(ThreePaths[TroikaOptions]):
    Options = TroikaOptions

    def __init__(self, setting: Setting, options: TroikaOptions) -> None:
        super().__init__(setting, options)
        self.traction: Traction | None = None
        if options.traction:
            heads = options.heads
            if setting.dim % heads:
                raise UsageError(f"heads is {heads}; the feature's width {setting.dim} is no multiple of it")
            self.traction = Traction(setting.dim, setting.inputs["patch"][1], options)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text", "patch"} if options.traction else {"cls", "text"})

    def three(self, z: Tensor, t: Prototypes, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of compositions, states and objects [B, C], [B, M], [B, N]."""
        assert self.paths.factors is not None
        features = (z, *self.paths.factors(z))
        if self.traction is None or tokens is None:
            c, s, o = (self.paths.logits(f, rows) for f, rows in zip(features, t, strict=True))
            return c, s, o
        pulled = self.traction(torch.cat(tuple(t)), tokens.to(z.dtype)).split([len(rows) for rows in t], dim=1)
        c, s, o = (self.paths.scale * (rows @ f[:, :, None])[..., 0] for f, rows in zip(features, pulled, strict=True))
        return c, s, o

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        tokens = batch.inputs["patch"] if self.traction is not None else None
        c, s, o = self.three(self.paths.features(batch.z), shared, tokens)
        m, n = self.primitives(batch.compositions)
        return {
            "ct": cross_entropy(c, self.columns.places(batch.compositions)),
            "s": cross_entropy(s, m),
            "o": cross_entropy(o, n),
        }

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        if self.traction is None:
            return super().scorer(columns)
        t = self.paths.encode(columns, ("ct", "so"))
        asked = Columns(columns, len(self.labels.objects)).to(self.paths.negatives.device)
        held = sum(map(len, t)) * (t.states.shape[1] * (self.options.inner + 2) + self.setting.inputs["patch"][0])

        @torch.no_grad()
        def some(cls: Tensor, tokens: Tensor) -> Tensor:
            c, s, o = self.three(self.paths.features(cls), t, tokens)
            return c.softmax(-1) + s.softmax(-1)[:, asked.states] * o.softmax(-1)[:, asked.objects]

        return lambda inputs: in_blocks(some, inputs["cls"], inputs["patch"], held)
