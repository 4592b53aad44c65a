"""CAILA (Zheng et al., "CAILA: Concept-Aware Intra-Layer Adapters for Compositional Zero-Shot Learning", WACV 2024).

Bottleneck adapters A_s, A_o and A_c learn state, object and composition features of images and of texts. In the paper
they are part of every encoder layer. Here encoder outputs are cached, so they follow the final features: z of an image,
and t_s, t_o, t_c of fixed prompts of a state, an object and a composition. With a weight a,

    z^s = normalise(z + a A_s(z)),   z^o = normalise(z + a A_o(z))
    z^c = normalise(z + a (A_s(z) + A_o(z) + A_c(z)) / 3)        the mixture of adapters

and likewise, with separate adapters, for texts of states and objects. The text feature of a composition is the mean of
those of its prompt and of its primitives: `t^c = normalise(t_c + a A_c(t_c) + t_s + a A_s(t_s) + t_o + a A_o(t_o))`.
The loss is `L = L_s + L_o + L_c + L_shift`: cross-entropies of states, objects and compositions, and primitive concept
shift. For the latter, the state feature of an image and the object feature of the batch's next image, added and
normalised, are an artificial image of the composition of both, if it is a seen one. In the paper a tenth of the images
are replaced by artificial ones instead of a separate loss. The score is `S = p(c|x)`, the softmax of cosines of z^c and
t^c at CLIP's temperature, which all losses use too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.layers.composition_index import CompositionIndex
from duplex.layers.factors import Adapter, unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts, Prototypes
from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.head import TextMethod
from duplex.options import Count, Options, Positive, Rate, Template


@dataclass(frozen=True)
class CailaOptions(Options):
    width: Count = 64  # hidden units of each adapter
    dropout: Rate = 0.1  # inside each adapter
    scale: Positive = 0.1  # weight a of the adapters' outputs
    mixture: bool = True  # whether composition features use all three adapters, or their own alone
    shift: bool = True  # whether to train on artificial images (L_shift)
    template: Template = TEMPLATE  # words before the names in the prompts


class ConceptAdapters(nn.Module):
    """Three residual adapters, for composition, state and object features, of images or of texts."""

    def __init__(self, dim: int, options: CailaOptions) -> None:
        super().__init__()
        width, rate, scale = options.width, options.dropout, options.scale
        self.state, self.object, self.whole = (Adapter(dim, width, rate, scale) for _ in range(3))
        self.mixture = options.mixture

    def images(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return composition, state and object features [B, d]: image features `z` after adapters, of unit length."""
        state, object, whole = self.state(z), self.object(z), self.whole(z)
        return unit(state + object + whole if self.mixture else whole), unit(state), unit(object)

    def texts(self, t: Prototypes, candidates: CompositionIndex) -> Prototypes:
        """Return unit text features of compositions, states and objects: the prompts' features `t` after the adapters.

        candidates: the compositions of `t`, whose features are mixed with those of their states and objects.
        """
        whole, states, objects = self.whole(t.compositions), self.state(t.states), self.object(t.objects)
        if self.mixture:
            both = states.index_select(0, candidates.states) + objects.index_select(0, candidates.objects)
            whole = whole + both
        return Prototypes(unit(whole), unit(states), unit(objects))


class Caila(TextMethod[CailaOptions]):
    """CAILA: adapters on frozen CLIP features, trained on artificial images too; the score is `p(c|x)`."""

    is_seen: Tensor

    def __init__(self, context: MethodContext, options: CailaOptions) -> None:
        super().__init__(context, options)
        self.prompts = Prompts(context.labels, context.tower, template=options.template)
        self.images, self.texts = ConceptAdapters(context.dim, options), ConceptAdapters(context.dim, options)
        self.register_buffer("is_seen", torch.as_tensor(context.labels.seen), persistent=False)

    def shared(self) -> Prototypes:
        return self.texts.texts(self.prompts(self.labels.pairs["train"]), self.train_candidates)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z = self.images.images(unit(batch.cls))
        logits = (self.scale * f @ t.T for f, t in zip(z, shared, strict=True))
        losses = self.cross_entropies(("composition", "state", "object"), logits, batch.compositions)
        if self.options.shift:
            losses["shift"] = self.shift_loss(*z[1:], batch.compositions, shared.compositions)
        return losses

    def shift_loss(self, z_s: Tensor, z_o: Tensor, compositions: Tensor, t: Tensor) -> Tensor:
        """Return the mean cross-entropy of artificial images whose composition is seen; 0 if there are none.

        An artificial image is the sum of an image's state features and the next image's object features, normalised.

        z_s, z_o: state and object features of the batch [B, d].
        compositions: labels of the batch [B].
        t: text features of the training candidates [C, d].
        """
        images = unit(z_s + z_o.roll(-1, 0))
        m, n = self.primitives(compositions)
        label = m * len(self.labels.objects) + n.roll(-1, 0)
        seen = self.is_seen[label]
        target = torch.where(seen, self.train_candidates.positions(label), 0).clamp(max=len(t) - 1)
        terms = cross_entropy(self.scale * images @ t.T, target, reduction="none")
        return torch.where(seen, terms, 0.0).sum() / seen.sum().clamp(min=1)

    def prepare(self, candidates: CompositionIndex) -> Tensor:
        return self.texts.texts(self.prompts.encode(candidates.compositions_np), candidates).compositions

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Tensor) -> Tensor:
        z_c, _, _ = self.images.images(unit(inputs["cls"]))
        return (self.scale * z_c @ prepared.T).softmax(-1)
