"""Base class of methods that extend the three paths: prompts of compositions, of states and of objects, each compared
with a part of the image feature (duplex/layers/paths.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Generic, Literal, TypeVar

from torch import Tensor

from duplex.layers.composition_index import CompositionIndex
from duplex.layers.paths import FactorPosteriors, PathOptions, Paths
from duplex.layers.prompt_paths import TEMPLATE, Prototypes
from duplex.methods.base import Batch, Inputs, Inspectable, MethodContext, inspect_paths
from duplex.methods.head import TextMethod
from duplex.options import Count, Options, Template

LOSSES = ("state", "object", "semantic")
TERMS = ("semantic", "factors")


@dataclass(frozen=True)
class ThreePathOptions(Options):
    """Options that all methods with three paths share."""

    adapter: Literal["none", "feature"] = "feature"  # feature: a bottleneck on the cached feature
    width: Count = 768  # hidden units of each disentangler
    template: Template = TEMPLATE  # words whose tokens initialise the three learned contexts


ThreePathOptionsT = TypeVar("ThreePathOptionsT", bound=ThreePathOptions)


class ThreePaths(TextMethod[ThreePathOptionsT], Generic[ThreePathOptionsT]):
    """Methods with the score `p(c^t|x) + p(s|x) p(o|x)`; subclasses add losses and score terms."""

    def __init__(self, context: MethodContext, options: ThreePathOptionsT) -> None:
        super().__init__(context, options)
        path_options = PathOptions(adapter=options.adapter, width=options.width, template=options.template)
        self.paths = Paths(context.labels, context.tower, path_options, context.world)

    def shared(self) -> Prototypes:
        return self.paths.prototypes(LOSSES, self.checkpointing)

    def path_losses(self, batch: Batch, t: Prototypes) -> tuple[Tensor, FactorPosteriors, dict[str, Tensor]]:
        """Image features [B, d] after the adapter, their factors, and three cross-entropies by name."""
        z = self.paths.adapt(batch.cls)
        losses, factors = self.paths.losses(z, batch.compositions, t, LOSSES)
        assert factors is not None
        return z, factors, losses

    def terms(self, z: Tensor, t: Prototypes, candidates: CompositionIndex) -> Iterator[Tensor]:
        """Yield the summands [B, C] of the candidates' scores; `z` [B, d] are features after the adapter."""
        yield from (term for _, term in self.paths.score_terms(z, t, candidates.states, candidates.objects, TERMS))

    def prepare(self, candidates: CompositionIndex) -> Prototypes:
        return self.paths.encode(candidates.compositions_np, TERMS)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        return reduce(Tensor.add_, self.terms(self.paths.adapt(inputs["cls"]), prepared, candidates))

    def inspectable(self) -> Inspectable:
        return inspect_paths(self.paths)
