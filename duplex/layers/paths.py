"""Posteriors over compositions, states and objects, from a cached feature and three kinds of prompts (three paths).

The Duplex paper's Eq. 1-9, 21. `z^c` is the (adapted) feature, `z^s` and `z^o` are its parts for the state and the
object (factors); each is compared with the text features of its prompts (semantic prototypes). The posteriors give
the losses `L_c^t`, `L_s`, `L_o` (of compositions, states, objects) and the score's summands `p(c^t|x)` and
`p(s|x) p(o|x)`.
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
    """Options of the methods that use `Paths`: prompts, feature adapter, and disentanglers.

    Disentanglers are the two networks that extract the state factor and the object factor of a feature.
    """

    # prompts (Eq. 1-2, 6-7)
    context: Literal["learned", "fixed"] = "learned"  # vectors before the names in a prompt
    vocabulary: Literal["learned", "fixed"] = "learned"  # vectors of the names of states and objects
    paths: Literal["composition", "three"] = "three"  # prompts of compositions alone, or of states and objects as well
    template: Template = TEMPLATE  # the K context tokens, or their initial values

    # visual factors (Eq. 3-5, 8-9)
    adapter: Literal["none", "feature"] = "feature"  # feature: a residual bottleneck after the cached feature
    adapter_width: Count = 64  # hidden units of the bottleneck
    adapter_dropout: Rate = 0.1
    adapter_scale: float = 0.1  # factor of the bottleneck's output
    disentangler: Literal["plain", "residual"] = "plain"  # residual: a disentangler adds its input to its output
    width: Count = 768  # hidden units of each disentangler

    # the classes of the semantic loss L_c^t: the training compositions, or all candidates
    semantic_negatives: Literal["seen", "target"] = "seen"

    def path_rules(self, losses: Sequence[str], inference: Sequence[str]) -> Iterable[tuple[object, str]]:
        """Yield (condition that must hold, error message): these options must fit the terms of loss and score."""
        three = self.paths == "three"
        yield three or not {"state", "object"} & set(losses), "the losses state and object need paths: three"
        yield three or "factors" not in inference, "factors in inference needs paths: three"
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
    """State and object factors of a batch, and the log-posteriors over states and over objects."""

    z_s: Tensor  # [B, d]
    z_o: Tensor  # [B, d]
    log_s: Tensor  # log p(s|x) [B, M]
    log_o: Tensor  # log p(o|x) [B, N]


class Paths(nn.Module):
    """Prompts, feature adapter and disentanglers that give posteriors over compositions, states and objects.

    Logits are divided by CLIP's temperature `tau = exp(-logit_scale)`. With `semantic_negatives: target`, the
    candidates of `world` are the classes of the semantic loss.
    """

    negatives: Tensor

    def __init__(self, labels: LabelSpace, tower: TextTower, options: PathOptions, world: World) -> None:
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
            width, rate, scale = options.adapter_width, options.adapter_dropout, options.adapter_scale
            self.adapter = Adapter(tower.dim, width, rate, scale)
        self.factors: Factors | None = None
        if options.paths == "three":
            self.factors = Factors(tower.dim, options.width, residual=options.disentangler == "residual")
        seen = options.semantic_negatives == "seen"
        self._negatives = labels.pairs["train"] if seen else labels.candidates(world, "train")
        self.register_buffer("negatives", torch.as_tensor(self._negatives), persistent=False)

    def adapt(self, z: Tensor) -> Tensor:
        """Composition features `z^c` [B, d]: cached features after the adapter, if any, with unit length."""
        z = unit(z)
        return unit(self.adapter(z)) if self.adapter is not None else z

    def prototypes(self, losses: Collection[str], checkpointing: bool) -> Prototypes:
        """Semantic prototypes that the named losses need, with gradients, once per optimiser step."""
        encoded = self._negatives if "semantic" in losses else self._negatives[:0]
        prototypes: Prototypes = self.prompts(encoded, checkpointing)
        return prototypes

    def logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        """Products [B, C] of features [B, d] and prototypes [C, d], divided by the temperature."""
        return self.scale * (z @ prototypes.T)

    def factor_posteriors(self, z: Tensor, t: Prototypes) -> FactorPosteriors:
        """State and object factors of composition features `z` [B, d], and log-posteriors by their prompts."""
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        log_s = self.logits(z_s, t.states).log_softmax(-1)
        log_o = self.logits(z_o, t.objects).log_softmax(-1)
        return FactorPosteriors(z_s, z_o, log_s, log_o)

    def losses(
        self, z: Tensor, compositions: Tensor, t: Prototypes, names: Collection[str], with_factors: bool = False
    ) -> tuple[dict[str, Tensor], FactorPosteriors | None]:
        """Losses of a batch by name, and the factors of its images' features.

        names: losses to compute: `semantic` (the Duplex paper's L_c^t), `state` (L_s), `object` (L_o).
        with_factors: return the factors in any case; by default they are None unless a loss needs them.
        """
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
        """Yield those of the candidates' score terms that `names` lists.

        `semantic` is p(c^t|x), `factors` is p(s|x) p(o|x); states, objects: indices of each candidate [C].
        """
        if "semantic" in names:
            yield "semantic", self.logits(z, t.compositions).softmax(-1)
        if "factors" in names and self.factors is not None:
            p_s, p_o = self.primitive_posteriors(z, t)
            yield "factors", p_s[:, states] * p_o[:, objects]

    def primitive_posteriors(self, z: Tensor, t: Prototypes) -> tuple[Tensor, Tensor]:
        """Posteriors over states [B, M] and over objects [B, N] of composition features `z` [B, d]."""
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        return self.logits(z_s, t.states).softmax(-1), self.logits(z_o, t.objects).softmax(-1)

    def encode(self, candidates: Ints, names: Collection[str]) -> Prototypes:
        """Text features of the candidates' prompts that the score's summands `names` need, without gradients."""
        return self.prompts.encode(candidates if "semantic" in names else candidates[:0])

    @torch.no_grad()
    def semantic(self, compositions: Ints) -> Tensor:
        """Semantic prototypes of `compositions` [C, d]."""
        return self.prompts.encode(np.asarray(compositions)).compositions
