"""CAILA: bottleneck adapters learn state, object and composition features of images and of texts.

Zheng et al., "CAILA: Concept-Aware Intra-Layer Adapters for Compositional Zero-Shot Learning",
WACV 2024.

    z^s = normalise(z + a A_s(z)),   z^o = normalise(z + a A_o(z))
    z^c = normalise(z + a (A_s(z) + A_o(z) + A_c(z)) / 3)                                the mixture of adapters
    t^c = normalise(t_c + a A_c(t_c) + t_s + a A_s(t_s) + t_o + a A_o(t_o))
    L   = L_s + L_o + L_c + L_shift
    S   = p(c|x) = softmax_c cos(z^c, t^c) / tau

* z: image feature;  t_s, t_o, t_c: text features of fixed prompts of state, object, composition
* A_s, A_o, A_c: adapters, separate for images and texts;  a: their weight;  tau: temperature
* L_s, L_o, L_c: cross-entropies of states, objects and compositions
* L_shift: cross-entropy of artificial images: an image's z^s plus the next one's z^o, if seen

In the paper, adapters are part of every encoder layer; here, they follow the final features. With
`adapter: blocks`, z and t of each concept come from towers fine-tuned with the adapters `concepts`
instead, and each concept has a trained tau. In the paper, artificial images replace a tenth of the
images; here, they have a loss of their own. With `form: published`, t_s, t_o and t_c keep the length
that the text tower gives them, as in the code; otherwise, they have unit length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from duplex.errors import UsageError
from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import Form, TextMethod, TextOptions
from duplex.methods.layers import Adapter, CompositionIndex, unit
from duplex.methods.prompts import TEMPLATE, Prompts, Prototypes
from duplex.options import Count, Positive, Rate, Template, refuse

PRIMITIVE_SCALE = 20  # of states and objects relative to compositions, in the published code


@dataclass(frozen=True)
class CailaOptions(TextOptions):
    adapter: Literal["feature", "blocks"] = "feature"  # blocks: in the towers' (`finetune`)
    width: Count = 64  # hidden units of each adapter
    dropout: Rate = 0.1  # inside each adapter
    scale: Positive = 0.1  # weight a of the adapters' outputs
    feature_dropout: Rate = 0.0  # of an image's unit feature for compositions, in the losses
    shift: bool = True  # whether to train on artificial images (L_shift)
    template: Template = TEMPLATE  # words before the names in the prompts
    state_end: str = ""  # words after the name in the prompts of states
    form: Form = "plain"  # published: means of text features that have the tower's length

    def rules(self) -> Iterable[tuple[object, str]]:
        for name in ("width", "dropout", "scale"):
            is_set = getattr(self, name) != getattr(type(self), name)
            message = f"adapter: blocks has no {name}; leave {name} out"
            yield refuse(self.adapter == "blocks" and is_set, message)


class ConceptAdapters(nn.Module):
    """Residual adapters for features of compositions, states, objects; none with `blocks`."""

    def __init__(self, dim: int, options: CailaOptions) -> None:
        super().__init__()

        def adapter() -> nn.Module:
            if options.adapter == "blocks":
                return nn.Identity()
            return Adapter(dim, options.width, options.dropout, options.scale)

        self.state = adapter()
        self.object = adapter()
        self.whole = adapter()

    def images(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state, object = self.state(z), self.object(z)
        return unit(state + object + self.whole(z)), unit(state), unit(object)

    def texts(self, t: Prototypes, candidates: CompositionIndex) -> Prototypes:
        states, objects = self.state(t.states), self.object(t.objects)
        own = states.index_select(0, candidates.states)
        own = own + objects.index_select(0, candidates.objects)
        whole = self.whole(t.compositions) + own
        return Prototypes(unit(whole), unit(states), unit(objects))


class Caila(TextMethod[CailaOptions]):
    """CAILA: adapters change features of images and prompts; `shift` also trains on mixed ones."""

    is_seen: Tensor

    def __init__(self, context: MethodContext, options: CailaOptions) -> None:
        super().__init__(context, options)
        labels = context.labels
        tower = context.tower
        ends = options.state_end
        raw = options.form == "published"
        self.prompts = Prompts(labels, tower, template=options.template, state_end=ends, unscaled=raw)
        self.images = ConceptAdapters(context.dim, options)
        self.texts = ConceptAdapters(context.dim, options)
        self.register_buffer("is_seen", torch.as_tensor(labels.seen), persistent=False)
        if options.adapter == "blocks":
            larger = tower.logit_scale + math.log(PRIMITIVE_SCALE)
            self.log_scales = nn.Parameter(torch.tensor([tower.logit_scale, larger, larger]))

    def scales(self) -> Any:
        """Factors that turn cosines into logits: of compositions, states and objects."""
        return self.log_scales.exp() if self.options.adapter == "blocks" else 3 * (self.scale,)

    def features(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Unit features of images [B, d], one each for compositions, states and objects."""
        if self.options.adapter == "feature":
            return self.images.images(unit(inputs["cls"]))
        state = inputs.get("cls_state")
        object = inputs.get("cls_object")
        if state is None or object is None:
            raise UsageError("`adapter: blocks` needs fine-tuning; set `finetune: {adapter: concepts, text: concepts}`")
        return unit(inputs["cls"]), unit(state), unit(object)

    def shared(self) -> Prototypes:
        t = self.prompts(self.labels.pairs["train"], self.checkpointing)
        return self.texts.texts(t, self.train_candidates)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z_c, z_s, z_o = self.features(batch.inputs)
        z = (dropout(z_c, self.options.feature_dropout, self.training), z_s, z_o)
        logits = (scale * f @ t.T for scale, f, t in zip(self.scales(), z, shared, strict=True))
        names = ("composition", "state", "object")
        losses = self.three_path_losses(logits, batch.compositions, names)
        if self.options.shift:
            losses["shift"] = self.shift_loss(z_s, z_o, batch.compositions, shared.compositions)
        return losses

    def shift_loss(self, z_s: Tensor, z_o: Tensor, compositions: Tensor, t: Tensor) -> Tensor:
        """Mean cross-entropy of artificial images of seen pairs, with text features `t`."""
        images = unit(z_s + z_o.roll(-1, 0))
        m, n = self.primitives(compositions)
        label = m * len(self.labels.objects) + n.roll(-1, 0)
        seen = self.is_seen[label]
        own = self.train_candidates.positions_of_listed(label)
        target = torch.where(seen, own, 0).clamp(max=len(t) - 1)
        terms = cross_entropy(self.scales()[0] * images @ t.T, target, reduction="none")
        return torch.where(seen, terms, 0.0).sum() / seen.sum().clamp(min=1)

    def prepare(self, candidates: CompositionIndex) -> Tensor:
        return self.texts.texts(self.prompts.encode(candidates.compositions_np), candidates).compositions

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Tensor) -> Tensor:
        z_c, _, _ = self.features(inputs)
        return self.scored(self.scales()[0] * z_c @ prepared.T)
