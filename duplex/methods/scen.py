"""SCEN: images are embedded in a state space and an object space, trained by contrast of images.

Li et al., "Siamese Contrastive Embedding Network for Compositional Zero-Shot Learning", CVPR 2022.

    h_s = E_s(x),    h_o = E_o(x)
    L_ts = -log exp(h_s.h_s^+ / T) / (exp(h_s.h_s^+ / T) + sum_- exp(h_s.h_s^- / T)),    L_to likewise
    L = L_c + 0.4 L_s + 0.6 L_o + L_ts + L_to
    S = cos(fuse(h_s, h_o), embedding of the composition's words)

* E_s, E_o: perceptrons;  h_s^+: embedding of the positive, the batch's next image with the same state
* h_s^-: embedding of a negative, an image with the same object in another state; L_to: vice versa
* L_c, L_s, L_o: cross-entropies of compositions, of states by h_s and of objects by h_o

An image without a positive or without negatives has no contrastive term. The paper's State
Transition Module, an adversarial generator of artificial compositions, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Batch, MethodContext
from duplex.methods.families import Composer, EmbeddingHead, WordOptions, next_partner_in_batch
from duplex.methods.layers import Mlp, unit
from duplex.options import Count, Natural, NonNegative, Positive, Rate

STATE_WEIGHT = 0.4  # of L_s
OBJECT_WEIGHT = 0.6  # of L_o


@dataclass(frozen=True)
class ScenOptions(WordOptions):
    width: Count = 512  # size of both spaces, and hidden units of both encoders
    layers: Natural = 1  # hidden layers of each encoder
    dropout: Rate = 0.1  # in both encoders
    temperature: Positive = 0.07  # T of L_ts and L_to
    scale: Positive = 20.0  # 1 / T of cosines with compositions
    contrast: NonNegative = 1.0  # weight of L_ts + L_to
    train_words: bool = False  # whether word vectors are trained, as in the published code


class Scen(EmbeddingHead[ScenOptions]):
    """SCEN: cosine of a composition's embedding with fused state and object embeddings."""

    def __init__(self, context: MethodContext, options: ScenOptions) -> None:
        super().__init__(context, options, trained_words=options.train_words, scale=options.scale)
        width = options.width
        self.encode_s = Mlp(context.dim, width, width, options.layers, options.dropout)
        self.encode_o = Mlp(context.dim, width, width, options.layers, options.dropout)
        self.classify_s = nn.Linear(width, len(context.labels.states))
        self.classify_o = nn.Linear(width, len(context.labels.objects))
        self.fuse = nn.Linear(2 * width, width)
        self.composer = Composer(self.words.width, width)

    def spaces(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors [B, e] of features `z` in the state space and in the object space."""
        z = unit(z)
        return unit(self.encode_s(z)), unit(self.encode_o(z))

    def embed_images(self, z: Tensor) -> Tensor:
        return unit(self.fuse(torch.cat(self.spaces(z), dim=-1)))

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        h_s, h_o = self.spaces(batch.cls)
        m, n = self.primitives(batch.compositions)
        logits = self.logits(unit(self.fuse(torch.cat([h_s, h_o], dim=-1))), shared[0])
        return {
            "composition": cross_entropy(logits, self.train_candidates.positions_of_listed(batch.compositions)),
            "state": STATE_WEIGHT * cross_entropy(self.classify_s(h_s), m),
            "object": OBJECT_WEIGHT * cross_entropy(self.classify_o(h_o), n),
            "state_contrast": self.options.contrast * self.contrast(h_s, m, n),
            "object_contrast": self.options.contrast * self.contrast(h_o, n, m),
        }

    def contrast(self, h: Tensor, same: Tensor, other: Tensor) -> Tensor:
        """Pull `h` [B, e] towards images equal in `same`, away from those equal in `other`."""
        positive, paired = next_partner_in_batch(same[:, None] == same)
        negative = (other[:, None] == other) & (same[:, None] != same)  # [B, B]
        counted = paired & negative.any(1)
        cosines = (h @ h.T) / self.options.temperature
        to_positive = cosines.gather(1, positive[:, None])[:, 0]
        to_negatives = cosines.masked_fill(~negative, -torch.inf)
        terms = torch.cat([to_positive[:, None], to_negatives], dim=1).logsumexp(1) - to_positive
        return torch.where(counted, terms, 0.0).sum() / counted.sum().clamp(min=1)
