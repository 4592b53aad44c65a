"""The three paths from a cached feature to posteriors over compositions, states and objects (Eq. 1-9, 21).

`z^c` is the (adapted) feature, `z^s` and `z^o` are its factors; each is compared with the semantic prototypes of its
prompts. The losses `L_c^t`, `L_s`, `L_o` and the score terms `p(c^t|x)`, `p(s|x) p(o|x)` follow.
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

from duplex.encoders.text_tower import TextTower
from duplex.labels import Ints, LabelSpace, World
from duplex.layers.factors import Adapter, Factors, unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts, Prototypes
from duplex.options import Count, Options, Rate, Template


@dataclass(frozen=True)
class PathOptions(Options):
    """Options of prompts, adapter and disentanglers, shared by the methods that use `Paths`."""

    # prompts (Eq. 1-2, 6-7)
    context: Literal["learned", "fixed"] = "learned"
    vocabulary: Literal["learned", "fixed"] = "learned"
    paths: Literal["composition", "three"] = "three"  # prompts of compositions alone, or of states and objects as well
    template: Template = TEMPLATE  # the K context tokens, or their initial values

    # visual factors (Eq. 3-5, 8-9)
    adapter: Literal["none", "feature"] = "feature"
    adapter_width: Count = 64
    adapter_dropout: Rate = 0.1
    adapter_scale: float = 0.1
    disentangler: Literal["plain", "residual"] = "plain"
    width: Count = 768  # hidden units of each disentangler

    # L_c^t is over the training compositions, or over all candidates
    semantic_negatives: Literal["seen", "target"] = "seen"

    def path_rules(self, losses: Sequence[str], inference: Sequence[str]) -> Iterable[tuple[object, str]]:
        """Yield rules, with messages, for these options and a method's losses and score terms."""
        three = self.paths == "three"
        yield three or not {"state", "object"} & set(losses), "losses state and object need paths: three"
        yield three or "factors" not in inference, "inference factors needs paths: three"
        yield inference, "inference needs at least one term"
        for key, names in (("losses", losses), ("inference", inference)):
            yield len(set(names)) == len(names), f"{key} names a term twice"
        message = f"losses {list(losses)} have no trained parameter with these options; set losses to []"
        yield not losses or self.trained_losses() & set(losses), message

    def trained_losses(self) -> set[str]:
        """Names of the losses that have trained parameters with these options."""
        learned = self.context == "learned" or self.vocabulary == "learned"
        names = {"state", "object"} if self.paths == "three" else set[str]()
        return names | ({"semantic"} if learned or self.adapted else set())

    @property
    def adapted(self) -> bool:
        return self.adapter == "feature"


class FactorPosteriors(NamedTuple):
    """The factors of a batch and their log-posteriors over states and objects."""

    z_s: Tensor  # [B, d]
    z_o: Tensor  # [B, d]
    log_s: Tensor  # log p(s|x) [B, M]
    log_o: Tensor  # log p(o|x) [B, N]


class Paths(nn.Module):
    """Prompts, adapter and disentanglers, with the temperature `tau = exp(-logit_scale)` of CLIP."""

    negatives: Tensor

    def __init__(self, labels: LabelSpace, tower: TextTower, options: PathOptions, world: World) -> None:
        """Build the modules; `world` decides the candidates of `L_c^t` for `semantic_negatives: target`."""
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
        width, rate, scale = options.adapter_width, options.adapter_dropout, options.adapter_scale
        self.adapter = Adapter(tower.dim, width, rate, scale) if options.adapted else None
        residual = options.disentangler == "residual"
        self.factors = Factors(tower.dim, options.width, residual) if options.paths == "three" else None
        seen = options.semantic_negatives == "seen"
        self._negatives = labels.pairs["train"] if seen else labels.candidates(world, "train")
        self.register_buffer("negatives", torch.as_tensor(self._negatives), persistent=False)

    def adapt(self, z: Tensor) -> Tensor:
        """Return `z^c`: the cached feature, adapted, of unit length [B, d]."""
        z = unit(z)
        return unit(self.adapter(z)) if self.adapter is not None else z

    def prototypes(self, losses: Collection[str], checkpointing: bool) -> Prototypes:
        """Return the semantic prototypes that `losses` need: encoded once per optimiser step, for all its batches."""
        encoded = self._negatives if "semantic" in losses else self._negatives[:0]
        prototypes: Prototypes = self.prompts(encoded, checkpointing)
        return prototypes

    def logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        """Return logits of features and prototypes, `z . t / tau` [B, C]."""
        return self.scale * (z @ prototypes.T)

    def factor_posteriors(self, z: Tensor, t: Prototypes) -> FactorPosteriors:
        """Return the factors of `z^c` [B, d] and their log-posteriors."""
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        log_s = self.logits(z_s, t.states).log_softmax(-1)
        log_o = self.logits(z_o, t.objects).log_softmax(-1)
        return FactorPosteriors(z_s, z_o, log_s, log_o)

    def losses(
        self, z: Tensor, compositions: Tensor, t: Prototypes, names: Collection[str], with_factors: bool = False
    ) -> tuple[dict[str, Tensor], FactorPosteriors | None]:
        """Return the named losses of a batch: `semantic` is L_c^t, `state` L_s, `object` L_o. The second value holds
        the factors, if a loss needs them or `with_factors` is set."""
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
        self, z: Tensor, t: Prototypes, states: Tensor, objects: Tensor, names: Collection[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the named terms among `semantic`, p(c^t|x), and `factors`, p(s|x) p(o|x), over candidates with these
        `states` and `objects` [B, C]."""
        if "semantic" in names:
            yield "semantic", self.logits(z, t.compositions).softmax(-1)
        if "factors" in names and self.factors is not None:
            p_s, p_o = self.primitive_posteriors(z, t)
            yield "factors", p_s[:, states] * p_o[:, objects]

    def primitive_posteriors(self, z: Tensor, t: Prototypes) -> tuple[Tensor, Tensor]:
        """Return posteriors of states [B, M] and objects [B, N]."""
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        return self.logits(z_s, t.states).softmax(-1), self.logits(z_o, t.objects).softmax(-1)

    def encode(self, columns: Ints, names: Collection[str]) -> Prototypes:
        """Return the semantic prototypes that score terms of these candidates need, without gradients."""
        return self.prompts.encode(columns if "semantic" in names else columns[:0])

    @torch.no_grad()
    def semantic(self, compositions: Ints) -> Tensor:
        """Return semantic prototypes of some compositions [C, d]."""
        return self.prompts.encode(np.asarray(compositions)).compositions
