"""KG-SP: independent classifiers of states and of objects.

Karthik et al., "KG-SP: Knowledge Guided Simple Primitives for Open World Compositional Zero-Shot Learning", CVPR 2022.

    L = L_s + L_o,    S = p(s|x) p(o|x)

* L_s, L_o, p(s|x), p(o|x): cross-entropies and posteriors of two perceptrons

Of training images without a state or without an object, the known label's loss counts; the authors' code adds a loss
for a pseudo label of the other.

The paper then excludes compositions whose words have a low similarity in ConceptNet. Here, as for every method, the
evaluation excludes compositions by a threshold on feasibility from word vectors (evaluation.word_vectors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import SeenMethod
from duplex.methods.layers import CompositionIndex, Mlp, unit
from duplex.options import Count, Natural, Options, Rate


@dataclass(frozen=True)
class KgSpOptions(Options):
    layers: Natural = 2  # hidden layers of each classifier
    width: Count = 768  # hidden units of each classifier
    dropout: Rate = 0.5  # in each classifier


class KgSp(SeenMethod[KgSpOptions]):
    """KG-SP: the score is the posterior of the state times that of the object."""

    def __init__(self, context: MethodContext, options: KgSpOptions) -> None:
        super().__init__(context, options)
        labels, width = context.labels, options.width
        self.states = Mlp(context.dim, width, len(labels.states), options.layers, options.dropout)
        self.objects = Mlp(context.dim, width, len(labels.objects), options.layers, options.dropout)

    @classmethod
    def accepts_partial_labels(cls, options: KgSpOptions) -> bool:
        return True

    def losses(self, batch: Batch, shared: tuple[()]) -> dict[str, Tensor]:
        z = unit(batch.cls)
        m, n = self.known_primitives(batch.compositions)
        return {"state": _known_loss(self.states(z), m), "object": _known_loss(self.objects(z), n)}

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: None) -> Tensor:
        z = unit(inputs["cls"])
        p_s, p_o = self.states(z).softmax(-1), self.objects(z).softmax(-1)
        return torch.mul(p_s[:, candidates.states], p_o[:, candidates.objects])


def _known_loss(logits: Tensor, targets: Tensor) -> Tensor:
    # the mean over images with a known target; 0 without any
    return cross_entropy(logits, targets, reduction="sum") / (targets >= 0).sum().clamp(min=1)
