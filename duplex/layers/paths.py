"""The three paths from a cached feature to posteriors over compositions, states and objects (Eq. 1-9, 21).

`z^c` is the (adapted) feature, `z^s` and `z^o` its factors; each is compared with its prompts' semantic prototypes.
Methods that share these paths share their losses `L_c^t`, `L_s`, `L_o` and the terms `p(c^t|x)`, `p(s|x) p(o|x)` too.
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

from duplex.encoders.text import TextTower
from duplex.labels import Ints, LabelSpace, World
from duplex.layers.factors import Adapter, Factors, unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts, Prototypes
from duplex.options import Options


@dataclass(frozen=True)
class PathOptions(Options):
    """What the paths are made of."""

    # prompts (Eq. 1-2, 6-7)
    context: Literal["learned", "fixed"] = "learned"
    vocabulary: Literal["learned", "fixed"] = "learned"
    paths: Literal["c", "cso"] = "cso"  # composition prompt alone, or composition, state and object prompts
    template: str = TEMPLATE  # the K context tokens, or what they start from

    # visual factors (Eq. 3-5, 8-9)
    adapter: Literal["none", "feature"] = "feature"
    adapter_width: int = 64
    adapter_dropout: float = 0.1
    adapter_scale: float = 0.1
    disentangler: Literal["plain", "residual"] = "plain"
    width: int = 768  # hidden units of each disentangler

    # what L_c^t tells a composition from
    semantic_negatives: Literal["seen", "target"] = "seen"

    def rules(self) -> Iterable[tuple[object, str]]:
        yield 0 <= self.adapter_dropout < 1, f"adapter_dropout is {self.adapter_dropout}; it lies in [0, 1)"
        yield self.width > 0 and self.adapter_width > 0, "width and adapter_width are positive"
        yield self.template.strip(), "template is empty; give at least one word such as 'a photo of'"

    def path_rules(self, losses: Sequence[str], inference: Sequence[str]) -> Iterable[tuple[object, str]]:
        """What the terms of an objective and of a score ask of the paths."""
        three = self.paths == "cso"
        yield three or not {"s", "o"} & set(losses), "losses s and o need paths: cso"
        yield three or "so" not in inference, "inference so needs paths: cso"
        yield inference, "inference needs at least one term"
        for key, names in (("losses", losses), ("inference", inference)):
            yield len(set(names)) == len(names), f"{key} names a term twice"

    def reached(self) -> set[str]:
        """The losses among s, o, ct that reach something trained."""
        learned = self.context == "learned" or self.vocabulary == "learned"
        return ({"s", "o"} if self.paths == "cso" else set()) | ({"ct"} if learned or self.adapted else set())

    @property
    def adapted(self) -> bool:
        return self.adapter == "feature"


class Factored(NamedTuple):
    """A batch's factors and what they say."""

    z_s: Tensor  # [B, d]
    z_o: Tensor  # [B, d]
    log_s: Tensor  # log p(s|x) [B, M]
    log_o: Tensor  # log p(o|x) [B, N]


class Paths(nn.Module):
    """Prompts, adapter and disentanglers. `tau = exp(-logit_scale)` is CLIP's own."""

    negatives: Tensor

    def __init__(self, labels: LabelSpace, tower: TextTower, options: PathOptions, world: World) -> None:
        """`world` is that whose C_tgt training is over."""
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
        self.factors = Factors(tower.dim, options.width, residual) if options.paths == "cso" else None
        seen = options.semantic_negatives == "seen"
        self._negatives = labels.pairs["train"] if seen else labels.target(world, "train")
        self.register_buffer("negatives", torch.as_tensor(self._negatives), persistent=False)

    def features(self, z: Tensor) -> Tensor:
        """`z^c`: the cached feature, adapted, of unit length [B, d]."""
        z = unit(z)
        return unit(self.adapter(z)) if self.adapter is not None else z

    def prototypes(self, losses: Collection[str], checkpointing: bool) -> Prototypes:
        """Semantic prototypes of training: encoded once an optimiser step, whatever the number of batches."""
        encoded = self._negatives if "ct" in losses else self._negatives[:0]
        found: Prototypes = self.prompts(encoded, checkpointing)
        return found

    def logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        """`z . t / tau` [B, C]"""
        return self.scale * (z @ prototypes.T)

    def factored(self, z: Tensor, t: Prototypes) -> Factored:
        """Factors of `z^c` and their posteriors."""
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        return Factored(
            z_s, z_o, self.logits(z_s, t.states).log_softmax(-1), self.logits(z_o, t.objects).log_softmax(-1)
        )

    def losses(
        self, z: Tensor, compositions: Tensor, t: Prototypes, wanted: Collection[str], ask: bool = False
    ) -> tuple[dict[str, Tensor], Factored | None]:
        """`L_c^t`, `L_s`, `L_o` of a batch, those that are wanted; and its factors where they or the caller `ask`."""
        losses: dict[str, Tensor] = {}
        if "ct" in wanted:
            own = torch.searchsorted(self.negatives, compositions)
            losses["ct"] = cross_entropy(self.logits(z, t.compositions), own)
        if self.factors is None or not (ask or {"s", "o"} & set(wanted)):
            return losses, None
        found = self.factored(z, t)
        if "s" in wanted:
            losses["s"] = nll_loss(found.log_s, compositions // self.objects)
        if "o" in wanted:
            losses["o"] = nll_loss(found.log_o, compositions % self.objects)
        return losses, found

    def terms(
        self, z: Tensor, t: Prototypes, states: Tensor, objects: Tensor, names: Collection[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """`p(c^t|x)` and `p(s|x) p(o|x)` [B, C] over columns with these `states` and `objects`, of those named."""
        if "ct" in names:
            yield "semantic", self.logits(z, t.compositions).softmax(-1)
        if "so" in names and self.factors is not None:
            p_s, p_o = self.primitives(z, t)
            yield "factors", p_s[:, states] * p_o[:, objects]

    def primitives(self, z: Tensor, t: Prototypes) -> tuple[Tensor, Tensor]:
        """`p(s|x)` [B, M] and `p(o|x)` [B, N]"""
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        return self.logits(z_s, t.states).softmax(-1), self.logits(z_o, t.objects).softmax(-1)

    def encode(self, columns: Ints, names: Collection[str]) -> Prototypes:
        """Semantic prototypes for scoring some columns, without gradients."""
        return self.prompts.encode(columns if "ct" in names else columns[:0])

    @torch.no_grad()
    def semantic(self, compositions: Ints) -> Tensor:
        """t^c [C, d]"""
        return self.prompts.encode(np.asarray(compositions)).compositions
