"""Prompts over a frozen text tower, without visual prototypes: CLIP, CoOp, CSP and three paths are rows of one kind.

CLIP (Radford et al., 2021) scores with hand-written prompts; CoOp (Zhou et al., 2022) learns the context, CSP (Nayak et
al., 2023) the vocabulary; three paths add state and object prompts with disentangled factors (the paper's c-s-o
baseline; Troika, Huang et al., 2024, has the same form without its traction).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from duplex.labels import Ints
from duplex.layers.paths import PathOptions, Paths
from duplex.layers.portable import portable_paths, shares
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, Terms, columns_of, summed
from duplex.methods.inspectable import Exhibits, of_paths


@dataclass(frozen=True)
class PromptOptions(PathOptions):
    """The defaults are the three paths."""

    losses: tuple[Literal["s", "o", "ct"], ...] = ("s", "o", "ct")
    inference: tuple[Literal["ct", "so"], ...] = ("ct", "so")

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield from self.path_rules(self.losses, self.inference)
        reach = f"losses {list(self.losses)} reach nothing that can be trained here"
        yield not self.losses or self.reached() & set(self.losses), reach


class PromptMethod(Method[PromptOptions]):
    """`L = L_s + L_o + L_c^t`, `S(c|x) = p(c^t|x) + p(s|x) p(o|x)`, of the terms that are switched on."""

    Options = PromptOptions

    def __init__(self, setting: Setting, options: PromptOptions) -> None:
        super().__init__(setting, options)
        self.paths = Paths(setting.labels, setting.tower, options, setting.world)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"})

    def groups(self) -> list[dict[str, Any]]:
        return super().groups() if self.options.losses else []

    def shared(self) -> Prototypes:
        return self.paths.prototypes(self.options.losses, self.checkpointing)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        wanted = self.options.losses
        found, _ = self.paths.losses(self.paths.features(batch.z), batch.compositions, shared, wanted)
        return {name: found[name] for name in wanted}

    @torch.no_grad()
    def evidence(self, columns: Ints) -> Terms:
        terms, device = self.options.inference, self.paths.negatives.device
        prototypes = self.paths.encode(columns, terms)
        states, objects = columns_of(self.labels, columns, device)

        @torch.no_grad()
        def parts(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            yield from self.paths.terms(self.paths.features(inputs["cls"]), prototypes, states, objects, terms)

        return parts

    def scorer(self, columns: Ints) -> Scorer:
        return summed(self.evidence(columns), len(columns), self.paths.negatives.device)

    def probabilities(self, scores: Tensor) -> Tensor:
        return shares(scores)

    @torch.no_grad()
    def portable(self, columns: Ints) -> dict[str, Tensor]:
        return portable_paths(self.paths, columns, self.options.inference)

    def exhibits(self) -> Exhibits:
        return of_paths(self.paths)
