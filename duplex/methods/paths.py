"""Three paths: posteriors of compositions, states and objects by prompts (Eq. 1-9, 11, 21).

On each path, an image feature is compared with text features of prompts (semantic prototypes): the
adapted feature `z^c` with compositions, the state factor `z^s` with states, the object factor
`z^o` with objects. The posteriors give the losses `L_c^t`, `L_s`, `L_o` and the summands
`p(c^t|x)` and `p(s|x) p(o|x)` of the score.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from duplex.encoders.base import TextTower
from duplex.labels import Ints, LabelSpace, World
from duplex.methods.base import Inspectable
from duplex.methods.layers import Adapter, FactorNetworks, unit
from duplex.methods.prompts import TEMPLATE, Prompts, Prototypes
from duplex.options import Count, Options, Rate, Template, refuse

EXCLUDED = -1e4  # a logit whose probability is 0
ADAPTER_WIDTH = 64  # hidden units of the bottleneck
ADAPTER_SCALE = 0.1  # factor of its output


@dataclass(frozen=True)
class PathOptions(Options):
    """Options of the prompts, the feature adapter and the disentanglers, which compute factors."""

    # prompts (Eq. 1-2, 6-7)
    context: Literal["learned", "fixed"] = "learned"  # vectors before the names in a prompt
    vocabulary: Literal["learned", "fixed"] = "learned"  # vectors of the names
    paths: Literal["composition", "three"] = "three"  # three: also states, objects
    template: Template = TEMPLATE  # the K context tokens, or their initial values

    # visual factors (Eq. 3-5, 8-9)
    adapter: Literal["none", "feature"] = "feature"  # feature: a residual bottleneck
    adapter_dropout: Rate = 0.1
    width: Count = 768  # hidden units of each disentangler

    # the classes of the semantic loss L_c^t: the training compositions, or all candidates
    semantic_negatives: Literal["seen", "target"] = "seen"

    def path_rules(self, losses: Sequence[str], inference: Sequence[str]) -> Iterable[tuple[object, str]]:
        """Rules, as of `rules`, on the terms `losses` of the loss and `inference` of the score."""
        if self.paths != "three":
            needs_three = {"state", "object"} & set(losses)
            yield refuse(needs_three, "the losses state and object need paths: three")
            yield refuse("factors" in inference, "the score term factors needs paths: three")
        yield refuse(not inference, "inference needs at least one term")
        for key, names in (("losses", losses), ("inference", inference)):
            yield refuse(len(set(names)) < len(names), f"{key} lists a term twice; remove one")
        message = f"with these options, the losses {list(losses)} have no parameter to train; "
        message += "set losses to []"
        yield refuse(losses and not self.trained_losses() & set(losses), message)

    def trained_losses(self) -> set[str]:
        learned = self.context == "learned" or self.vocabulary == "learned"
        names = {"state", "object"} if self.paths == "three" else set[str]()
        return names | ({"semantic"} if learned or self.adapted else set())

    @property
    def adapted(self) -> bool:
        return self.adapter == "feature"


class FactorPosteriors(NamedTuple):
    z_s: Tensor  # [B, d]
    z_o: Tensor  # [B, d]
    log_s: Tensor  # log p(s|x) [B, M]
    log_o: Tensor  # log p(o|x) [B, N]


class Paths(nn.Module):
    """Prompts, adapter and disentanglers, which compute posteriors on the three paths."""

    negatives: Tensor
    new_states: Tensor  # mask [M] of the states without training images
    new_objects: Tensor  # mask [N]

    def __init__(
        self, labels: LabelSpace, tower: TextTower, options: PathOptions, world: World, negatives: Ints | None = None
    ) -> None:
        """`negatives`: the compositions that the semantic loss compares; None: those of `semantic_negatives`."""
        super().__init__()
        self.scale = math.exp(tower.logit_scale)  # 1 / tau
        self.objects = len(labels.objects)
        self.prompts = Prompts(
            labels,
            tower,
            context=options.context,
            vocabulary=options.vocabulary,
            paths=options.paths,
            template=options.template,
        )
        self.adapter: Adapter | None = None
        if options.adapted:
            self.adapter = Adapter(tower.dim, ADAPTER_WIDTH, options.adapter_dropout, ADAPTER_SCALE)
        self.factors: FactorNetworks | None = None
        if options.paths == "three":
            self.factors = FactorNetworks(tower.dim, options.width)
        if negatives is None:
            seen = options.semantic_negatives == "seen"
            negatives = labels.pairs["train"] if seen else labels.candidates(world, "train")
        self._negatives = negatives
        self.register_buffer("negatives", torch.as_tensor(negatives), persistent=False)
        for name, trained in zip(("new_states", "new_objects"), labels.trained_words, strict=True):
            self.register_buffer(name, torch.from_numpy(~trained), persistent=False)

    def adapt(self, z: Tensor) -> Tensor:
        """Unit features `z` [B, d], after the adapter if there is one."""
        z = unit(z)
        return unit(self.adapter(z)) if self.adapter is not None else z

    def prototypes(self, losses: Collection[str], checkpointing: bool) -> Prototypes:
        """Encode the semantic prototypes that the given losses need, with gradients."""
        encoded = self._negatives if "semantic" in losses else self._negatives[:0]
        return Prototypes(*self.prompts(encoded, checkpointing))

    def logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        return self.scale * (z @ prototypes.T)

    def factor_posteriors(self, z: Tensor, t: Prototypes) -> FactorPosteriors:
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        return FactorPosteriors(z_s, z_o, *self.log_posteriors(z_s, z_o, t))

    def log_posteriors(self, z_s: Tensor, z_o: Tensor, t: Prototypes) -> tuple[Tensor, Tensor]:
        """Log probabilities of states [B, M], objects [B, N]; -inf without training images."""
        of_states = self.logits(z_s, t.states).masked_fill(self.new_states, EXCLUDED)
        of_objects = self.logits(z_o, t.objects).masked_fill(self.new_objects, EXCLUDED)
        return of_states.log_softmax(-1), of_objects.log_softmax(-1)

    def losses(
        self, z: Tensor, compositions: Tensor, t: Prototypes, names: Collection[str], with_factors: bool = False
    ) -> tuple[dict[str, Tensor], FactorPosteriors | None]:
        """Losses in `names` (`semantic`, `state`, `object`), and factors if needed."""
        losses: dict[str, Tensor] = {}
        if "semantic" in names:
            positions = torch.searchsorted(self.negatives, compositions)
            losses["semantic"] = cross_entropy(self.logits(z, t.compositions), positions)
        if self.factors is None or not (with_factors or {"state", "object"} & set(names)):
            return losses, None
        factors = self.factor_posteriors(z, t)
        if "state" in names:
            losses["state"] = nll_loss(factors.log_s, compositions // self.objects)
        if "object" in names:
            losses["object"] = nll_loss(factors.log_o, compositions % self.objects)
        return losses, factors

    def score_terms(
        self, z: Tensor, t: Prototypes, states: Tensor, objects: Tensor, names: Collection[str], logits: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values [B, C]) of `names`: `semantic` by pairs, `factors` p(s|x) p(o|x)."""
        if "semantic" in names:
            c = self.logits(z, t.compositions)
            yield "semantic", c if logits else c.softmax(-1)
        if "factors" in names and self.factors is not None:
            z_s, z_o = self.factors(z)
            p_s = self.logits(z_s, t.states).softmax(-1)
            p_o = self.logits(z_o, t.objects).softmax(-1)
            yield "factors", p_s[:, states] * p_o[:, objects]

    def encode(self, candidates: Ints, names: Collection[str]) -> Prototypes:
        """Encode, without gradients, the prompts that score terms `names` need."""
        return self.prompts.encode(candidates if "semantic" in names else candidates[:0])

    @torch.no_grad()
    def semantic(self, compositions: Ints) -> Tensor:
        return self.prompts.encode(np.asarray(compositions)).compositions


def inspect_paths(paths: Paths) -> Inspectable:
    """Features, semantic prototypes and factors of a method with prompts, for reports."""
    factors = paths.factors
    return Inspectable(
        features=lambda inputs: paths.adapt(inputs["cls"]),
        semantic=paths.semantic,
        factors=None if factors is None else lambda inputs: factors(paths.adapt(inputs["cls"])),
    )
