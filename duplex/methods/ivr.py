"""IVR (Zhang et al., "Learning Invariant Visual Representations for Compositional Zero-Shot Learning", ECCV 2022),
over cached features.

A composition is a domain: an object should look the same whatever its state, and a state whatever its object. Two
heads give `h_s`, `h_o`; each is classified linearly and compared with the words of compositions. An image is set
beside one that shares the primitive in another composition, and with `g_i = dCE_i / dh_i` of the two

* channels in which `|g_i - g_j|` is largest, a share `discard` of them, are set to zero in both before classification;
* `L_grad = |dCE_i / dW - dCE_j / dW|^2` punishes classifiers that each domain would move otherwise.

A linear classifier has both in closed form: with `e_i = softmax(W h_i + b) - onehot`, `g_i = W^T e_i` and `dCE_i / dW
= e_i h_i^T`, so `|e_i h_i^T - e_j h_j^T|^2 = |e_i|^2 |h_i|^2 + |e_j|^2 |h_j|^2 - 2 (e_i.e_j)(h_i.h_j)`. An image
without a partner keeps all channels and has no penalty. `f(x, c) = cos([h_s; h_o], [v_s; v_o])`, plus the classifiers'
log-posteriors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, columns_of
from duplex.methods.head import words_of
from duplex.options import Options
from duplex.parts.factors import unit
from duplex.parts.heads import Columns, Mlp, WordTable
from duplex.parts.partners import next_partner


@dataclass(frozen=True)
class IvrOptions(Options):
    width: int = 512
    layers: int = 1  # hidden layers of each head
    dropout: float = 0.1
    scale: float = 20.0  # of cosines
    discard: float = 0.1  # share of channels
    penalty: float = 1.0  # weight of L_grad

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.layers >= 0, "width is positive, layers at least 0"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        yield 0 <= self.discard < 1, f"discard is {self.discard}; it lies in [0, 1)"
        yield self.scale > 0 and self.penalty >= 0, "scale is positive, penalty at least 0"


class Ivr(Method[IvrOptions]):
    Options = IvrOptions

    def __init__(self, setting: Setting, options: IvrOptions) -> None:
        super().__init__(setting, options)
        words, width = words_of(setting), options.width
        self.words = WordTable(words.states, words.objects, trained=False)
        self.columns = Columns(setting.labels.pairs["train"], len(setting.labels.objects))
        self.see_s, self.see_o = (Mlp(setting.dim, width, width, options.layers, options.dropout) for _ in range(2))
        self.classify_s = nn.Linear(width, len(setting.labels.states))
        self.classify_o = nn.Linear(width, len(setting.labels.objects))
        self.embed_s, self.embed_o = (nn.Linear(self.words.width, width) for _ in range(2))

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "words"})

    def heads(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = unit(z)
        return unit(self.see_s(z)), unit(self.see_o(z))

    def cosines(self, h_s: Tensor, h_o: Tensor, m: Tensor, n: Tensor) -> Tensor:
        """Scaled cosines of concatenated unit halves: the mean of the halves' own [B, C]."""
        v_s, v_o = unit(self.embed_s(self.words.states)), unit(self.embed_o(self.words.objects))
        return self.options.scale * ((h_s @ v_s.T)[:, m] + (h_o @ v_o.T)[:, n]) / 2

    def losses(self, batch: Batch, shared: tuple[()]) -> dict[str, Tensor]:
        h_s, h_o = self.heads(batch.z)
        n, own = len(self.labels.objects), batch.compositions
        states, objects = own // n, own % n
        pairs = self.cosines(h_s, h_o, self.columns.states, self.columns.objects)
        loss_s, grad_s = self.invariant(h_s, self.classify_s, states, objects)
        loss_o, grad_o = self.invariant(h_o, self.classify_o, objects, states)
        penalty = self.options.penalty * (grad_s + grad_o)
        return {"c": cross_entropy(pairs, self.columns.places(own)), "s": loss_s, "o": loss_o, "grad": penalty}

    def invariant(self, h: Tensor, classify: nn.Linear, own: Tensor, domain: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the kept channels, and the penalty on gradients that two domains disagree about."""
        partner, paired = next_partner((own[:, None] == own) & (domain[:, None] != domain))
        kept = self.kept(h, classify, own, partner, paired)  # [B, e]
        mine, theirs = h * kept, h[partner] * kept
        loss = cross_entropy(classify(mine), own)
        e_i, e_j = errors(classify(mine), own), errors(classify(theirs), own)
        squares = (e_i**2).sum(1) * (mine**2).sum(1) + (e_j**2).sum(1) * (theirs**2).sum(1)
        crossed = (e_i * e_j).sum(1) * (mine * theirs).sum(1)
        return loss, torch.where(paired, squares - 2 * crossed, 0.0).sum() / paired.sum().clamp(min=1)

    @torch.no_grad()
    def kept(self, h: Tensor, classify: nn.Linear, own: Tensor, partner: Tensor, paired: Tensor) -> Tensor:
        """1 for the channels that stay, 0 for the share in which the two gradients are furthest apart [B, e]."""
        g = errors(classify(h), own) @ classify.weight
        count = int(self.options.discard * h.shape[1])
        worst = (g - g[partner]).abs().topk(count, dim=1).indices
        kept = torch.ones_like(h).scatter(1, worst, 0.0)
        return torch.where(paired[:, None], kept, 1.0)

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        m, n = columns_of(self.labels, columns, self.words.states.device)

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            h_s, h_o = self.heads(inputs["cls"])
            p_s, p_o = self.classify_s(h_s).log_softmax(-1), self.classify_o(h_o).log_softmax(-1)
            found: Tensor = self.cosines(h_s, h_o, m, n) + p_s[:, m] + p_o[:, n]
            return found

        return scores


def errors(logits: Tensor, own: Tensor) -> Tensor:
    """`softmax(logits) - onehot(own)`"""
    return logits.softmax(-1).scatter_add(1, own[:, None], -torch.ones_like(logits[:, :1]))
