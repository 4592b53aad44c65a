"""IVR (Zhang et al., "Learning Invariant Visual Representations for Compositional Zero-Shot Learning", ECCV 2022).

A composition is a domain: an object should look the same whatever its state, and a state whatever its object. An image
x is embedded, `f = f(x)`, and compared with the word vectors v of a composition by `d_c = cos(f, W [v_s; v_o])`. Two
heads on top of f give a state feature h_s and an object feature h_o. In training, an image's state feature is paired
with that of a partner, an image of the batch with the same state and another object; likewise for objects. A linear
classifier V classifies the image's feature, another one, V', the partner's, with cross-entropies CE and CE':

* The share `discard` of the feature channels, those in which the weights V_y and V'_y of the image's label y differ
  most, is set to zero in both features. Both are classified again, with cross-entropies L and L'.
* `L_grad = |dL / dV - dL' / dV'|^2 / 2` penalises classifiers that the two domains would move differently. With
  `E = softmax(logits) - onehot` and features H, the gradients are `E^T H / B`, those of biases means of E.

The loss is `L_c + sum over s, o of [CE + CE' + w_r (L + L') + w_g L_grad]`, where L_c is the cross-entropy of d_c over
seen compositions. The score is `S = p(s|x) p(o|x) + d_c`, with the posteriors by V. An image without a partner takes no
part in the terms of pairs. Word vectors are trained further.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.layers.composition_index import CompositionIndex
from duplex.layers.factors import Mlp, unit
from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.head import Composer, WordMethod, next_allowed_partner
from duplex.options import Count, Natural, NonNegative, Options, Positive, Rate


@dataclass(frozen=True)
class IvrOptions(Options):
    width: Count = 512  # size e of all embeddings, and hidden units of f
    layers: Natural = 1  # hidden layers of the embedding f
    dropout: Rate = 0.1  # in the embedding and both heads
    scale: Positive = 20.0  # 1 / T of the cosines d_c
    discard: Rate = 1 / 6  # share of channels that are set to zero
    again: NonNegative = 1.0  # weight w_r of the cross-entropies without these channels
    penalty: NonNegative = 10.0  # weight w_g of L_grad


class PrimitiveHead(nn.Module):
    """Module that classifies states (or objects): a feature head, a linear classifier for images, and another one for
    their partners (images with the same state, or object, in another composition)."""

    def __init__(self, width: int, count: int, options: IvrOptions) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(options.dropout))
        self.classify, self.classify_partner = nn.Linear(width, count), nn.Linear(width, count)  # V, V'
        self.discard = options.discard

    def channel_mask(self, labels: Tensor) -> Tensor:
        """Return a mask of feature channels per image [B, e], 0 for channels to discard, else 1.

        They are those in which the classifiers of images and of partners differ most in the weights of the image's
        label.

        labels: states (or objects) of the images [B].
        """
        difference = (self.classify.weight - self.classify_partner.weight).detach().abs()  # [M, e]
        worst = difference.topk(int(self.discard * difference.shape[1]), dim=1).indices
        return torch.ones_like(difference).scatter(1, worst, 0.0).index_select(0, labels)

    def forward(self, f: Tensor, labels: Tensor, domains: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three losses of images and their partners in the batch.

        They are the cross-entropy, the cross-entropy without discarded feature channels, and the penalty of gradients
        that differ between the images' classifier and the partners'.

        f: image embeddings [B, e].
        labels: states (or objects) that this head classifies [B].
        domains: the other primitive of each image [B]: its object if `labels` are states, else its state.
        """
        partner, paired = next_allowed_partner((labels[:, None] == labels) & (domains[:, None] != domains))
        weights = paired.to(f) / paired.sum().clamp(min=1)  # for means over images with a partner
        h, mask = self.head(f), self.channel_mask(labels)
        h_partner = h[partner]
        plain = cross_entropy(self.classify(h), labels)
        plain = plain + weighted_cross_entropy(self.classify_partner(h_partner), labels, weights)
        h, h_partner = h * mask, h_partner * mask
        logits, logits_partner = self.classify(h), self.classify_partner(h_partner)
        again = weighted_cross_entropy(logits, labels, weights)
        again = again + weighted_cross_entropy(logits_partner, labels, weights)
        e, e_partner = (weights[:, None] * errors(rows, labels) for rows in (logits, logits_partner))  # [B, M]
        grad = (e.T @ h - e_partner.T @ h_partner).square().sum() + (e - e_partner).sum(0).square().sum()
        return plain, again, grad / 2


class Ivr(WordMethod[IvrOptions]):
    """IVR: the score is `p(s|x) p(o|x) + d_c`, d_c the cosine of image and composition embedding; state features are
    trained not to depend on the object, and object features not to depend on the state."""

    def __init__(self, context: MethodContext, options: IvrOptions) -> None:
        super().__init__(context, options, trained_words=True)
        width = options.width
        self.embed = Mlp(context.dim, width, width, options.layers, options.dropout)
        self.composer = Composer(self.words.width, width)
        self.of_states = PrimitiveHead(width, len(context.labels.states), options)
        self.of_objects = PrimitiveHead(width, len(context.labels.objects), options)

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        f = self.embed(unit(batch.cls))
        m, n = self.primitives(batch.compositions)
        d_c = unit(f) @ shared[0].T
        plain_s, again_s, grad_s = self.of_states(f, m, n)
        plain_o, again_o, grad_o = self.of_objects(f, n, m)
        target = self.train_candidates.positions(batch.compositions)
        return {
            "composition": cross_entropy(self.options.scale * d_c, target),
            "state": plain_s,
            "object": plain_o,
            "again": self.options.again * (again_s + again_o),
            "penalty": self.options.penalty * (grad_s + grad_o),
        }

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Tensor) -> Tensor:
        f = self.embed(unit(inputs["cls"]))
        p_s, p_o = (side.classify(side.head(f)).softmax(-1) for side in (self.of_states, self.of_objects))
        return torch.add(p_s[:, candidates.states] * p_o[:, candidates.objects], unit(f) @ prepared.T)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of B images' cross-entropies, each multiplied by the image's weight, as a scalar."""
    return cross_entropy(logits, labels, reduction="none") @ weights


def errors(logits: Tensor, labels: Tensor) -> Tensor:
    """Return `softmax(logits) - onehot(labels)` [B, M], the gradient of the cross-entropy by the logits."""
    return logits.softmax(-1).scatter_add(1, labels[:, None], -torch.ones_like(logits[:, :1]))
