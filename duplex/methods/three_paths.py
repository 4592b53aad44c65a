"""What methods with a composition, a state and an object path share: learned prompts, factors, losses, scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from duplex.labels import Ints
from duplex.layers.composition_index import Columns
from duplex.layers.paths import Factored, PathOptions, Paths
from duplex.layers.prompt_paths import TEMPLATE, Prototypes
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting
from duplex.methods.inspectable import Exhibits, of_paths
from duplex.options import Options

TERMS = ("s", "o", "ct")


@dataclass(frozen=True)
class ThreePathOptions(Options):
    adapter: Literal["none", "feature"] = "feature"  # a bottleneck on the cached feature
    width: int = 768  # hidden units of each disentangler
    template: str = TEMPLATE  # what the three contexts start from

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0, f"width is {self.width}; it is positive"
        yield self.template.strip(), "template is empty; give at least one word such as 'a photo of'"


Row = TypeVar("Row", bound=ThreePathOptions)


class Seen(NamedTuple):
    """A training batch on the three paths."""

    z: Tensor  # z^c [B, d]
    factored: Factored
    losses: dict[str, Tensor]  # L_s, L_o, L_c^t


class ThreePaths(Method[Row], Generic[Row]):
    """`L = L_s + L_o + L_c^t + ...`, `S(c|x) = p(c^t|x) + p(s|x) p(o|x) + ...`; a subclass adds what it is about."""

    def __init__(self, setting: Setting, options: Row) -> None:
        super().__init__(setting, options)
        row = PathOptions(adapter=options.adapter, width=options.width, template=options.template)
        self.paths = Paths(setting.labels, setting.tower, row, setting.world)
        self.columns = Columns(setting.labels.pairs["train"], len(setting.labels.objects))

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"})

    def shared(self) -> Prototypes:
        return self.paths.prototypes(TERMS, self.checkpointing)

    def seen(self, batch: Batch, t: Prototypes) -> Seen:
        """A batch's features, factors and the three losses."""
        z = self.paths.features(batch.z)
        losses, factored = self.paths.losses(z, batch.compositions, t, TERMS)
        assert factored is not None
        return Seen(z, factored, losses)

    def primitives(self, compositions: Tensor) -> tuple[Tensor, Tensor]:
        """States and objects of compositions."""
        return compositions // len(self.labels.objects), compositions % len(self.labels.objects)

    def terms(self, z: Tensor, t: Prototypes, columns: Columns) -> Iterator[Tensor]:
        """What a score adds up over `columns` [B, C]; `z` is z^c."""
        for _, term in self.paths.terms(z, t, columns.states, columns.objects, ("ct", "so")):
            yield term

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        t = self.paths.encode(columns, ("ct", "so"))
        asked = Columns(columns, len(self.labels.objects)).to(self.paths.negatives.device)

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            z = self.paths.features(inputs["cls"])
            total = z.new_zeros(len(z), len(columns))
            for term in self.terms(z, t, asked):
                total += term
            return total

        return scores

    def exhibits(self) -> Exhibits:
        return of_paths(self.paths)
