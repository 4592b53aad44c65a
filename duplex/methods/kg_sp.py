"""KG-SP (Karthik et al., "KG-SP: Knowledge Guided Simple Primitives for Open World Compositional Zero-Shot Learning",
CVPR 2022), over cached features.

Two independent perceptrons classify states and objects, `L = L_s + L_o`, and `f(x, s, o) = p(s|x) p(o|x)`. The paper
then masks compositions to which ConceptNet gives less than a threshold; here the evaluation's feasibility threshold
does that, for every method alike, from word vectors (params.yaml, evaluation.word_vectors).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.layers.composition_index import Mlp
from duplex.layers.factors import unit
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, columns_of
from duplex.options import Options


@dataclass(frozen=True)
class KgSpOptions(Options):
    layers: int = 2  # hidden layers of each classifier
    width: int = 768
    dropout: float = 0.5

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.layers >= 0, "width is positive, layers at least 0"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"


class KgSp(Method[KgSpOptions]):
    Options = KgSpOptions

    def __init__(self, setting: Setting, options: KgSpOptions) -> None:
        super().__init__(setting, options)
        layers, width, rate = options.layers, options.width, options.dropout
        self.states = Mlp(setting.dim, width, len(setting.labels.states), layers, rate)
        self.objects = Mlp(setting.dim, width, len(setting.labels.objects), layers, rate)

    def losses(self, batch: Batch, shared: tuple[()]) -> dict[str, Tensor]:
        z, n = unit(batch.z), len(self.labels.objects)
        return {
            "s": cross_entropy(self.states(z), batch.compositions // n),
            "o": cross_entropy(self.objects(z), batch.compositions % n),
        }

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        m, n = columns_of(self.labels, columns, next(self.parameters()).device)

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            z = unit(inputs["cls"])
            found: Tensor = self.states(z).softmax(-1)[:, m] * self.objects(z).softmax(-1)[:, n]
            return found

        return scores
