"""CAILA (Zheng et al., "CAILA: Concept-Aware Intra-Layer Adapters for Compositional Zero-Shot Learning", WACV 2024),
over cached features.

Bottleneck adapters learn a state, an object and a composition side of both encoders. In the paper they sit in every
layer; over a cache they sit on the features that the frozen towers end with (the three prompts have fixed words):

    z^s = normalise(z + a A_s(z)),   z^o = normalise(z + a A_o(z))
    z^c = normalise(z + a (A_s(z) + A_o(z) + A_c(z)) / 3)        the mixture of adapters

and likewise, with adapters of their own, for texts of states and objects; that of a composition is the mean of its own
prompt's and of its primitives': `t^c = normalise(t_c + a A_c(t_c) + t_s + a A_s(t_s) + t_o + a A_o(t_o))`. The loss is
`L = L_s + L_o + L_c + L_shift`. The last is primitive concept shift: the state side of an image and the object side of
the next one of the batch, added and of unit length, are an image of the composition of both where that is a seen one;
in the paper a tenth of the images are shifted in place of a loss of their own. `S = p(c|x)`; all losses have CLIP's
scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.layers.composition_index import Columns
from duplex.layers.factors import Adapter, unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts, Prototypes
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting
from duplex.options import Options


@dataclass(frozen=True)
class CailaOptions(Options):
    width: int = 64  # of each adapter's bottleneck
    dropout: float = 0.1
    scale: float = 0.1  # a
    mixture: bool = True  # composition features mix three sides; without it they have one
    shift: bool = True  # primitive concept shift
    template: str = TEMPLATE

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.scale > 0, "width and scale are positive"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        yield self.template.strip(), "template is empty; give at least one word such as 'a photo of'"


class ConceptAdapters(nn.Module):
    """Adapters of one modality: features to their composition, state and object sides, of unit length."""

    def __init__(self, dim: int, options: CailaOptions) -> None:
        super().__init__()
        width, rate, scale = options.width, options.dropout, options.scale
        self.state, self.object, self.whole = (Adapter(dim, width, rate, scale) for _ in range(3))
        self.mixture = options.mixture

    def images(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An adapter adds `a A(z)` to z, so the mean of three adapted features is the mixture."""
        state, object, whole = self.state(z), self.object(z), self.whole(z)
        return unit(state + object + whole if self.mixture else whole), unit(state), unit(object)

    def texts(self, t: Prototypes, columns: Columns) -> Prototypes:
        whole, states, objects = self.whole(t.compositions), self.state(t.states), self.object(t.objects)
        if self.mixture:
            both = states.index_select(0, columns.states) + objects.index_select(0, columns.objects)
            whole = whole + both
        return Prototypes(unit(whole), unit(states), unit(objects))


class Caila(Method[CailaOptions]):
    Options = CailaOptions

    def __init__(self, setting: Setting, options: CailaOptions) -> None:
        super().__init__(setting, options)
        self.scale = math.exp(setting.tower.logit_scale)  # 1 / tau
        self.prompts = Prompts(setting.labels, setting.tower, template=options.template)
        self.images, self.texts = ConceptAdapters(setting.dim, options), ConceptAdapters(setting.dim, options)
        self.columns = Columns(setting.labels.pairs["train"], len(setting.labels.objects))
        seen = torch.as_tensor(setting.labels.seen)
        self.register_buffer("is_seen", seen, persistent=False)
        self.is_seen: Tensor

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"})

    def shared(self) -> Prototypes:
        return self.texts.texts(self.prompts(self.labels.pairs["train"]), self.columns)

    def sides(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.images.images(unit(z))

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z_c, z_s, z_o = self.sides(batch.z)
        own, n = batch.compositions, len(self.labels.objects)
        losses = {
            "c": cross_entropy(self.scale * z_c @ shared.compositions.T, self.columns.places(own)),
            "s": cross_entropy(self.scale * z_s @ shared.states.T, own // n),
            "o": cross_entropy(self.scale * z_o @ shared.objects.T, own % n),
        }
        if self.options.shift:
            losses["shift"] = self.shifted(z_s, z_o, own, shared.compositions)
        return losses

    def shifted(self, z_s: Tensor, z_o: Tensor, own: Tensor, t: Tensor) -> Tensor:
        """Cross-entropy of the made-up images whose composition is seen."""
        n = len(self.labels.objects)
        made = unit(z_s + z_o.roll(-1, 0))
        label = own // n * n + own.roll(-1, 0) % n
        there = self.is_seen[label]
        place = torch.where(there, self.columns.places(label), 0).clamp(max=len(t) - 1)
        terms = cross_entropy(self.scale * made @ t.T, place, reduction="none")
        return torch.where(there, terms, 0.0).sum() / there.sum().clamp(min=1)

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        asked = Columns(columns, len(self.labels.objects)).to(self.is_seen.device)
        t = self.texts.texts(self.prompts.encode(columns), asked).compositions

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            z_c, _, _ = self.sides(inputs["cls"])
            return (self.scale * z_c @ t.T).softmax(-1)

        return scores
