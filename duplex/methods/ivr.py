"""IVR: state features are trained not to depend on the object, and object features vice versa.

Zhang et al., "Learning Invariant Visual Representations for Compositional Zero-Shot Learning",
ECCV 2022.

    d_c = cos(f, W [v_s; v_o])
    L = L_c + sum over s, o of [CE + CE' + w_r (L_d + L_d') + w_g L_grad]
    L_grad = |dL_d / dV - dL_d' / dV'|^2 / 2,    dL_d / dV = E^T H / B,    E = softmax(logits) - onehot
    S = p(s|x) p(o|x) + d_c

* f: image embedding;  v: word vectors, trained further;  W: linear map
* L_c: cross-entropy of d_c over seen compositions
* H: state (or object) features, by a head on f
* V, V': linear classifiers of states (likewise objects): V for an image, V' for its partner
  with the same state and another object;  CE, CE': their cross-entropies;  p: posteriors by V
* L_d, L_d': CE and CE' without the share `discard` of channels, those in which V_y and V'_y of the
  label y differ most
* L_grad: penalises different gradients of V and V', so that both move alike; biases': means of E

An image without a partner has no part in the terms that need one. With `form: published`, as in the
code, words start at random, f has 1,024 hidden units and reads x without scaling it to unit length,
H has batch norm, and partners have more losses of their own:

    L = ... + CE(d_c of the partner with its state) + CE(d_c of the one with its object)
            + CE of the object-sharing partner's state + CE of the state-sharing partner's object

The code draws partners from all training images, here they are those of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import (
    Composer,
    Form,
    WordMethod,
    WordOptions,
    WordTable,
    new_words,
    next_partner_in_batch,
)
from duplex.methods.layers import BatchNormHead, CompositionIndex, Mlp, unit
from duplex.options import Count, Natural, NonNegative, Positive, Rate

HIDDEN = 1024  # hidden units of f in the published code


@dataclass(frozen=True)
class IvrOptions(WordOptions):
    width: Count = 512  # size e of all embeddings, and hidden units of f
    layers: Natural = 1  # hidden layers of the embedding f
    dropout: Rate = 0.1  # in the embedding and both heads
    scale: Positive = 20.0  # 1 / T of the cosines d_c
    discard: Rate = 1 / 6  # share of channels that are set to zero
    again: NonNegative = 1.0  # weight w_r of the cross-entropies without these channels
    penalty: NonNegative = 10.0  # weight w_g of L_grad
    form: Form = "plain"  # published: networks, words and losses of the published code


class PrimitiveHead(nn.Module):
    """Classifier of states (or objects): a network, then a linear map V, or V' for partners."""

    def __init__(self, width: int, count: int, options: IvrOptions) -> None:
        super().__init__()
        norm = nn.LayerNorm(width)
        self.head: nn.Module = nn.Sequential(nn.Linear(width, width), norm, nn.ReLU(), nn.Dropout(options.dropout))
        if options.form == "published":
            self.head = BatchNormHead(width)
        self.classify = nn.Linear(width, count)  # V
        self.classify_partner = nn.Linear(width, count)  # V'
        self.discard = options.discard

    def channel_mask(self, labels: Tensor) -> Tensor:
        """Mask [B, e] of channels by `labels` [B]: 0 where the classifiers differ most, else 1."""
        difference = (self.classify.weight - self.classify_partner.weight).detach().abs()  # [M, e]
        worst = difference.topk(int(self.discard * difference.shape[1]), dim=1).indices
        return torch.ones_like(difference).scatter(1, worst, 0.0).index_select(0, labels)

    def forward(self, f: Tensor, labels: Tensor, domains: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of `f` [B, e]; partners share one of `labels` [B] and differ in `domains` [B]."""
        partner, weights = find_partners(labels, domains, f)
        h = self.head(f)
        mask = self.channel_mask(labels)
        h_partner = h[partner]
        plain = cross_entropy(self.classify(h), labels)
        plain = plain + cross_entropy_sum(self.classify_partner(h_partner), labels, weights)
        h = h * mask
        h_partner = h_partner * mask
        logits = self.classify(h)
        logits_partner = self.classify_partner(h_partner)
        again = cross_entropy_sum(logits, labels, weights)
        again = again + cross_entropy_sum(logits_partner, labels, weights)
        e = weights[:, None] * probability_errors(logits, labels)  # [B, M]
        e_partner = weights[:, None] * probability_errors(logits_partner, labels)
        grad = (e.T @ h - e_partner.T @ h_partner).square().sum() + (e - e_partner).sum(0).square().sum()
        return plain, again, grad / 2


class Ivr(WordMethod[IvrOptions]):
    """IVR: the product of state and object posteriors, plus a cosine of embeddings."""

    def __init__(self, context: MethodContext, options: IvrOptions) -> None:
        super().__init__(context, options, trained_words=True)
        width = options.width
        self.is_published = options.form == "published"
        if self.is_published:
            words = (torch.randn(len(names), width) for names in (context.labels.states, context.labels.objects))
            self.words = WordTable(*words, trained=True, unit_words=False)
            self.words.fixed_rows = new_words(context.labels)
        hidden = HIDDEN if self.is_published else width
        self.embed = Mlp(context.dim, hidden, width, options.layers, options.dropout)
        self.composer = Composer(self.words.width, width)
        self.of_states = PrimitiveHead(width, len(context.labels.states), options)
        self.of_objects = PrimitiveHead(width, len(context.labels.objects), options)

    @classmethod
    def scores_new_words(cls, options: IvrOptions) -> bool:
        return False  # two classifiers are in the score

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        f = self.embed(self.read(batch.cls))
        m, n = self.primitives(batch.compositions)
        d_c = unit(f) @ shared[0].T
        plain_s, again_s, grad_s = self.of_states(f, m, n)
        plain_o, again_o, grad_o = self.of_objects(f, n, m)
        target = self.train_candidates.positions_of_listed(batch.compositions)
        losses = {
            "composition": cross_entropy(self.options.scale * d_c, target),
            "state": plain_s,
            "object": plain_o,
            "again": self.options.again * (again_s + again_o),
            "penalty": self.options.penalty * (grad_s + grad_o),
        }
        return losses | self.partner_losses(f, d_c, target, m, n) if self.is_published else losses

    def partner_losses(self, f: Tensor, d_c: Tensor, target: Tensor, m: Tensor, n: Tensor) -> dict[str, Tensor]:
        """Losses of partners by their own labels, of which the code has four more."""
        with_state, by_state = find_partners(m, n, f)
        with_object, by_object = find_partners(n, m, f)
        logits = self.options.scale * d_c
        pairs = cross_entropy_sum(logits[with_state], target[with_state], by_state)
        pairs = pairs + cross_entropy_sum(logits[with_object], target[with_object], by_object)
        states = self.of_states.classify(self.of_states.head(f[with_object]))
        objects = self.of_objects.classify(self.of_objects.head(f[with_state]))
        words = cross_entropy_sum(states, m[with_object], by_object)
        words = words + cross_entropy_sum(objects, n[with_state], by_state)
        return {"partner_composition": pairs, "partner_words": words}

    def read(self, cls: Tensor) -> Tensor:
        return cls.to(self.words.states.dtype) if self.is_published else unit(cls)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Tensor) -> Tensor:
        f = self.embed(self.read(inputs["cls"]))
        p_s = self.of_states.classify(self.of_states.head(f)).softmax(-1)
        p_o = self.of_objects.classify(self.of_objects.head(f)).softmax(-1)
        return torch.add(p_s[:, candidates.states] * p_o[:, candidates.objects], unit(f) @ prepared.T)


def find_partners(labels: Tensor, domains: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Partners [B] of equal label in another domain, and weights [B] for means over images with one."""
    partner, paired = next_partner_in_batch((labels[:, None] == labels) & (domains[:, None] != domains))
    return partner, paired.to(like) / paired.sum().clamp(min=1)


def cross_entropy_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the images' cross-entropies."""
    return cross_entropy(logits, labels, reduction="none") @ weights


def probability_errors(logits: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the cross-entropy for the logits: `softmax(logits) - onehot(labels)`."""
    return logits.softmax(-1).scatter_add(1, labels[:, None], -torch.ones_like(logits[:, :1]))
