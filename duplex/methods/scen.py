"""SCEN (Li et al., "Siamese Contrastive Embedding Network for Compositional Zero-Shot Learning", CVPR 2022), over
cached features.

Two encoders put an image into a state space and an object space, `h_s = E_s(x)`, `h_o = E_o(x)`. In the state space an
image is drawn to another one with its state and pushed from those with its object in another state, and the other way
round in the object space:

    L_ts = -log exp(h_s.h_s^+ / T) / (exp(h_s.h_s^+ / T) + sum_- exp(h_s.h_s^- / T))

Classifiers of states and objects read the two spaces, with losses that weigh 0.4 and 0.6, and a fused embedding is
compared with that of the composition's words, which is what scores. Positives and negatives are the batch's own, the
first positive after an image in the batch's order; an image without a positive or a negative has no contrastive term.
The paper's State Transition Module, a generator of made-up compositions with an adversary, is not part of this
version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.layers.composition_index import Columns, Composer, Mlp
from duplex.layers.factors import unit
from duplex.layers.partners import next_partner
from duplex.methods.base import Batch, Setting
from duplex.methods.head import PairHead, Pairs
from duplex.options import Options

OF_STATES, OF_OBJECTS = 0.4, 0.6  # weights of L_s and L_o


@dataclass(frozen=True)
class ScenOptions(Options):
    width: int = 512  # of both spaces
    layers: int = 1  # hidden layers of each encoder
    dropout: float = 0.1
    temperature: float = 0.07  # of the contrastive terms
    scale: float = 20.0  # of compared compositions
    contrast: float = 1.0  # weight of L_ts + L_to

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.layers >= 0, "width is positive, layers at least 0"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        yield self.temperature > 0 and self.scale > 0, "temperature and scale are positive"
        yield self.contrast >= 0, "contrast is at least 0"


class Scen(PairHead[ScenOptions]):
    Options = ScenOptions

    def __init__(self, setting: Setting, options: ScenOptions) -> None:
        super().__init__(setting, options, trained_words=False)
        width, layers, rate = options.width, options.layers, options.dropout
        self.encode_s, self.encode_o = (Mlp(setting.dim, width, width, layers, rate) for _ in range(2))
        self.classify_s = torch.nn.Linear(width, len(setting.labels.states))
        self.classify_o = torch.nn.Linear(width, len(setting.labels.objects))
        self.fuse = torch.nn.Linear(2 * width, width)
        self.composer = Composer(self.words.width, width)

    def spaces(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """`h_s`, `h_o` [B, e], of unit length"""
        z = unit(z)
        return unit(self.encode_s(z)), unit(self.encode_o(z))

    def image(self, z: Tensor) -> Tensor:
        return unit(self.fuse(torch.cat(self.spaces(z), dim=-1)))

    def pairs(self, columns: Columns) -> Tensor:
        return unit(self.composer(self.words.states, self.words.objects, columns.states, columns.objects))

    def logits(self, image: Tensor, pairs: Tensor) -> Tensor:
        return self.options.scale * (image @ pairs.T)

    def losses(self, batch: Batch, shared: Pairs) -> dict[str, Tensor]:
        h_s, h_o = self.spaces(batch.z)
        n, own = len(self.labels.objects), batch.compositions
        states, objects = own // n, own % n
        logits = self.logits(unit(self.fuse(torch.cat([h_s, h_o], dim=-1))), shared.rows)
        return {
            "c": cross_entropy(logits, self.columns.places(own)),
            "s": OF_STATES * cross_entropy(self.classify_s(h_s), states),
            "o": OF_OBJECTS * cross_entropy(self.classify_o(h_o), objects),
            "ts": self.options.contrast * self.contrast(h_s, states, objects),
            "to": self.options.contrast * self.contrast(h_o, objects, states),
        }

    def contrast(self, h: Tensor, same: Tensor, other: Tensor) -> Tensor:
        """Mean over images with a partner of equal `same` and a rival of equal `other` and different `same`."""
        positive, paired = next_partner(same[:, None] == same)
        rival = (other[:, None] == other) & (same[:, None] != same)  # [B, B]
        counted = paired & rival.any(1)
        cosines = (h @ h.T) / self.options.temperature
        own = cosines.gather(1, positive[:, None])[:, 0]
        against = cosines.masked_fill(~rival, -torch.inf)
        terms = torch.cat([own[:, None], against], dim=1).logsumexp(1) - own
        return torch.where(counted, terms, 0.0).sum() / counted.sum().clamp(min=1)
