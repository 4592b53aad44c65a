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

With `form: published`, the networks are those of the code: a perceptron f, shared by both spaces,
precedes E_s and E_o, which have 1,024 hidden units and end with relu; x and what is fused are not scaled
to unit length; L_s and L_o compare h_s and h_o with word vectors at temperature 1 / `scale`. The code
then has triplet losses with ten negatives from all training images instead of L_ts and L_to, and takes
the words of L_s once for each seen pair, which looks like a mistake; neither is followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Batch, MethodContext
from duplex.methods.families import Composer, EmbeddingHead, Form, WordOptions, next_partner_in_batch
from duplex.methods.layers import Mlp, unit
from duplex.options import Count, Natural, NonNegative, Positive, Rate, refuse

STATE_WEIGHT = 0.4  # of L_s
OBJECT_WEIGHT = 0.6  # of L_o
SHARED_WIDTH = 768  # hidden units of f in the published code
ENCODER_WIDTH = 1024  # and of E_s and E_o


@dataclass(frozen=True)
class ScenOptions(WordOptions):
    width: Count = 512  # size of both spaces, and hidden units of both encoders; published: the words' size
    layers: Natural = 1  # hidden layers of each encoder
    dropout: Rate = 0.1  # in both encoders
    temperature: Positive = 0.07  # T of L_ts and L_to
    scale: Positive = 20.0  # 1 / T of cosines with compositions
    contrast: NonNegative = 1.0  # weight of L_ts + L_to
    auxiliary: NonNegative = 1.0  # weight of 0.4 L_s + 0.6 L_o
    train_words: bool = False  # whether word vectors are trained, as in the published code
    form: Form = "plain"  # published: networks of the published code

    def rules(self) -> Iterable[tuple[object, str]]:
        is_set = self.form == "published" and self.width != type(self).width
        yield refuse(is_set, "form: published has the width of the words; leave width out")


class Scen(EmbeddingHead[ScenOptions]):
    """SCEN: cosine of a composition's embedding with fused state and object embeddings."""

    def __init__(self, context: MethodContext, options: ScenOptions) -> None:
        super().__init__(context, options, trained_words=options.train_words, scale=options.scale)
        self.is_published = options.form == "published"
        width = self.words.width if self.is_published else options.width
        inside = context.dim
        hidden = options.width
        if self.is_published:
            inside = width
            hidden = ENCODER_WIDTH
            self.embed = Mlp(context.dim, SHARED_WIDTH, width, options.layers, options.dropout)  # f
        self.encode_s = Mlp(inside, hidden, width, options.layers, options.dropout)
        self.encode_o = Mlp(inside, hidden, width, options.layers, options.dropout)
        if self.is_published:
            self.encode_s.append(nn.ReLU())
            self.encode_o.append(nn.ReLU())
        else:
            self.classify_s = nn.Linear(width, len(context.labels.states))
            self.classify_o = nn.Linear(width, len(context.labels.objects))
        self.fuse = nn.Linear(2 * width, width)
        self.composer = Composer(self.words.width, width)

    def spaces(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit vectors [B, e] of features `z` in the state and the object space, and both fused."""
        x = self.embed(z.to(self.words.states.dtype)) if self.is_published else unit(z)
        states, objects = self.encode_s(x), self.encode_o(x)
        h_s, h_o = unit(states), unit(objects)
        joined = torch.cat([states, objects] if self.is_published else [h_s, h_o], dim=-1)
        return h_s, h_o, unit(self.fuse(joined))

    def embed_images(self, z: Tensor) -> Tensor:
        return self.spaces(z)[2]

    def primitive_logits(self, h_s: Tensor, h_o: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of states [B, M] and objects [B, N]."""
        if self.is_published:
            return self.logits(h_s, self.words.states), self.logits(h_o, self.words.objects)
        return self.classify_s(h_s), self.classify_o(h_o)

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        h_s, h_o, fused = self.spaces(batch.cls)
        m, n = self.primitives(batch.compositions)
        logits = self.logits(fused, shared[0])
        states, objects = self.primitive_logits(h_s, h_o)
        auxiliary = self.options.auxiliary
        return {
            "composition": cross_entropy(logits, self.train_candidates.positions_of_listed(batch.compositions)),
            "state": auxiliary * STATE_WEIGHT * cross_entropy(states, m),
            "object": auxiliary * OBJECT_WEIGHT * cross_entropy(objects, n),
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
