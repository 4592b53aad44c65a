"""KG-SP: independent classifiers of states and of objects.

Karthik et al., "KG-SP: Knowledge Guided Simple Primitives for Open World Compositional Zero-Shot
Learning", CVPR 2022.

    L = L_s + L_o,    S = p(s|x) p(o|x)

* L_s, L_o, p(s|x), p(o|x): cross-entropies and posteriors of two perceptrons

For training images with only a state or only an object, the loss of this label counts. With
`pseudo_labels`, an image of object o without a state also has the cross-entropy of a state drawn
as in the authors' code; likewise for objects:

    argmax_s f(s, o) l_s + g_s,    f(s, o) = max(0, cos(v_s, v_o)),    l: outputs before the softmax,    g ~ Gumbel

* v: word vectors (evaluation.word_vectors); the paper uses those of ConceptNet

The paper then excludes compositions whose words have a low similarity in ConceptNet. Here, as for
every method, the evaluation excludes compositions by a threshold on feasibility from word vectors
(evaluation.word_vectors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.methods.base import UNKNOWN, Batch, Inputs, MethodContext
from duplex.methods.families import SeenMethod
from duplex.methods.layers import CompositionIndex, Mlp, unit
from duplex.methods.portable import normalise_posterior_sums
from duplex.options import Count, Natural, Options, Rate


@dataclass(frozen=True)
class KgSpOptions(Options):
    layers: Natural = 2  # hidden layers of each classifier
    width: Count = 768  # hidden units of each classifier
    dropout: Rate = 0.5  # in each classifier
    pseudo_labels: bool = False  # a loss for unknown words too, by word vectors


class KgSp(SeenMethod[KgSpOptions]):
    """KG-SP: the score is the state's posterior times the object's posterior."""

    f: Tensor

    def __init__(self, context: MethodContext, options: KgSpOptions) -> None:
        super().__init__(context, options)
        labels = context.labels
        width = options.width
        self.states = Mlp(context.dim, width, len(labels.states), options.layers, options.dropout)
        self.objects = Mlp(context.dim, width, len(labels.objects), options.layers, options.dropout)
        if options.pseudo_labels:
            assert context.words is not None
            cosines = unit(context.words.states) @ unit(context.words.objects).T
            self.register_buffer("f", cosines.clamp(min=0), persistent=False)

    @classmethod
    def needs(cls, options: KgSpOptions) -> frozenset[str]:
        return frozenset({"cls", "words"} if options.pseudo_labels else {"cls"})

    @classmethod
    def scores_new_words(cls, options: KgSpOptions) -> bool:
        return False

    @classmethod
    def accepts_partial_labels(cls, options: KgSpOptions) -> bool:
        return True

    def losses(self, batch: Batch, shared: tuple[()]) -> dict[str, Tensor]:
        z = unit(batch.cls)
        m, n = self.known_primitives(batch.compositions)
        states, objects = self.states(z), self.objects(z)
        losses = {"state": _known_loss(states, m), "object": _known_loss(objects, n)}
        if self.options.pseudo_labels:
            losses["pseudo_state"] = _pseudo_loss(states, self.f.T[n.clamp(min=0)], m)
            losses["pseudo_object"] = _pseudo_loss(objects, self.f[m.clamp(min=0)], n)
        return losses

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: None) -> Tensor:
        z = unit(inputs["cls"])
        p_s, p_o = self.states(z).softmax(-1), self.objects(z).softmax(-1)
        return torch.mul(p_s[:, candidates.states], p_o[:, candidates.objects])

    def probabilities(self, scores: Tensor) -> Tensor:
        return normalise_posterior_sums(scores)


def _known_loss(logits: Tensor, targets: Tensor) -> Tensor:
    # the mean over images with a known target; 0 without any
    return cross_entropy(logits, targets, reduction="sum") / (targets >= 0).sum().clamp(min=1)


def _pseudo_loss(logits: Tensor, f: Tensor, targets: Tensor) -> Tensor:
    gumbel = -torch.empty_like(logits).exponential_().log()
    drawn = (f * logits + gumbel).argmax(-1)
    return _known_loss(logits, torch.where(targets < 0, drawn, UNKNOWN))
