"""IVR (Zhang et al., "Learning Invariant Visual Representations for Compositional Zero-Shot Learning", ECCV 2022),
over cached features.

A composition is a domain: an object should look the same whatever its state, and a state whatever its object. An image
is embedded, `f = f(x)`, and compared with words, `d_c = cos(f, W [v_s; v_o])`; two heads on top give h_s and h_o. Each
is set beside that of a partner, an image that shares the primitive in another composition, and a classifier of its own
reads each of the two, V for the image and V' for the partner:

* channels in which the gradients of the own class's two logits, V_y and V'_y, are furthest apart, a share `discard` of
  them, are set to zero in both, and both are classified once more;
* `L_grad = |dL / dV - dL' / dV'|^2 / 2`, L and L' these last cross-entropies, punishes classifiers that each domain
  would move otherwise. With `E = softmax(logits) - onehot` the gradients are `E^T H / B`, those of biases means of E.

`L = L_c + sum over s, o of [CE + CE' + w_r (L + L') + w_g L_grad]` and `S = p(s|x) p(o|x) + d_c` with V's posteriors.
An image without a partner has no part in what is about two; partners are the batch's own. Words start at word vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.layers.composition_index import Columns, Composer, Mlp, WordTable
from duplex.layers.factors import unit
from duplex.layers.partners import next_partner
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting
from duplex.methods.head import Pairs, words_of
from duplex.options import Options


@dataclass(frozen=True)
class IvrOptions(Options):
    width: int = 512
    layers: int = 1  # hidden layers of the embedding
    dropout: float = 0.1
    scale: float = 20.0  # of cosines
    discard: float = 1 / 6  # share of channels
    again: float = 1.0  # w_r
    penalty: float = 10.0  # w_g

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.layers >= 0, "width is positive, layers at least 0"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        yield 0 <= self.discard < 1, f"discard is {self.discard}; it lies in [0, 1)"
        yield self.scale > 0 and self.penalty >= 0, "scale is positive, penalty at least 0"
        yield self.again >= 0, f"again is {self.again}; it is at least 0"


class Side(nn.Module):
    """A primitive's head `h` and its classifiers V and V'."""

    def __init__(self, width: int, count: int, options: IvrOptions) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(options.dropout))
        self.classify, self.classify_partner = nn.Linear(width, count), nn.Linear(width, count)
        self.discard = options.discard

    def kept(self, own: Tensor) -> Tensor:
        """1 for the channels that stay, 0 for the share in which V_y and V'_y are furthest apart [B, e]."""
        apart = (self.classify.weight - self.classify_partner.weight).detach().abs()  # [M, e]
        worst = apart.topk(int(self.discard * apart.shape[1]), dim=1).indices
        return torch.ones_like(apart).scatter(1, worst, 0.0).index_select(0, own)

    def forward(self, f: Tensor, own: Tensor, domain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`CE + CE'`, `L + L'` and `L_grad` of embedded images."""
        partner, paired = next_partner((own[:, None] == own) & (domain[:, None] != domain))
        share = paired.to(f) / paired.sum().clamp(min=1)  # a mean over images with a partner
        h, kept = self.head(f), self.kept(own)
        theirs = h[partner]
        plain = cross_entropy(self.classify(h), own) + mean(self.classify_partner(theirs), own, share)
        h, theirs = h * kept, theirs * kept
        logits, logits_partner = self.classify(h), self.classify_partner(theirs)
        again = mean(logits, own, share) + mean(logits_partner, own, share)
        e, e_partner = (share[:, None] * errors(rows, own) for rows in (logits, logits_partner))  # [B, M]
        apart = (e.T @ h - e_partner.T @ theirs).square().sum() + (e - e_partner).sum(0).square().sum()
        return plain, again, apart / 2


class Ivr(Method[IvrOptions]):
    Options = IvrOptions

    def __init__(self, setting: Setting, options: IvrOptions) -> None:
        super().__init__(setting, options)
        words, width = words_of(setting), options.width
        self.words = WordTable(words.states, words.objects, trained=True)
        self.columns = Columns(setting.labels.pairs["train"], len(setting.labels.objects))
        self.embed = Mlp(setting.dim, width, width, options.layers, options.dropout)
        self.composer = Composer(self.words.width, width)
        self.of_states = Side(width, len(setting.labels.states), options)
        self.of_objects = Side(width, len(setting.labels.objects), options)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "words"})

    def pairs(self, columns: Columns) -> Tensor:
        """`W [v_s; v_o]` of unit length [C, e]"""
        return unit(self.composer(self.words.states, self.words.objects, columns.states, columns.objects))

    def shared(self) -> Pairs:
        return Pairs(self.pairs(self.columns))

    def losses(self, batch: Batch, shared: Pairs) -> dict[str, Tensor]:
        f, own, n = self.embed(unit(batch.z)), batch.compositions, len(self.labels.objects)
        states, objects = own // n, own % n
        cosines = unit(f) @ shared.rows.T
        plain_s, again_s, apart_s = self.of_states(f, states, objects)
        plain_o, again_o, apart_o = self.of_objects(f, objects, states)
        return {
            "c": cross_entropy(self.options.scale * cosines, self.columns.places(own)),
            "s": plain_s,
            "o": plain_o,
            "again": self.options.again * (again_s + again_o),
            "grad": self.options.penalty * (apart_s + apart_o),
        }

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        asked = Columns(columns, len(self.labels.objects)).to(self.words.states.device)
        pairs = self.pairs(asked)

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            f = self.embed(unit(inputs["cls"]))
            p_s, p_o = (side.classify(side.head(f)).softmax(-1) for side in (self.of_states, self.of_objects))
            found: Tensor = p_s[:, asked.states] * p_o[:, asked.objects] + unit(f) @ pairs.T
            return found

        return scores


def mean(logits: Tensor, own: Tensor, share: Tensor) -> Tensor:
    """Cross-entropy of images that weigh `share` [B]."""
    return cross_entropy(logits, own, reduction="none") @ share


def errors(logits: Tensor, own: Tensor) -> Tensor:
    """`softmax(logits) - onehot(own)`"""
    return logits.softmax(-1).scatter_add(1, own[:, None], -torch.ones_like(logits[:, :1]))
