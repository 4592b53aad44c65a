"""Product of finished runs (trained models): adds their log probabilities, without any training.

    log S(c|x) = sum_k log p_k(c|x) / T_k - log Z

* k: the members, the runs that are combined;  p_k(c|x): probability that run k gives to candidate c
* T_k: the temperature that calibrates these probabilities on validation images;  Z normalises

The checkpoint of a product only refers to its members: it holds their paths, fingerprints and
temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.methods.base import Inputs, Method, MethodContext, ScoreTerms
from duplex.methods.portable import joined_members
from duplex.methods.score_formula import LEAST
from duplex.options import CombinedRunsOptions


class ProductMethod(Method[CombinedRunsOptions]):
    """Sum of the log probabilities of finished runs, the members of the product."""

    combines_runs: ClassVar[bool] = True
    reads_joined: ClassVar[bool] = True
    temperatures: Tensor  # [K], one per member

    def __init__(self, context: MethodContext, options: CombinedRunsOptions) -> None:
        super().__init__(context, options)
        if not context.members:
            raise UsageError(
                f"a product of runs ({', '.join(options.of)}) is not trained itself; train these and, in params.yaml, "
                "list the product under run.products, not run.methods"
            )
        self._members = context.members  # no submodules: checkpoints of their own
        for member in self._members:
            member.requires_grad_(False)
        temperatures = [float(member["temperature"]) for member in options.members]
        self.register_buffer("temperatures", torch.tensor(temperatures, dtype=torch.float64))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # moves members too
        for member in self._members:
            member._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls"}).union(*(member["needs"] for member in options.members))

    @classmethod
    def scores_new_words(cls, options: Any) -> bool:
        return not any({"text", "words"}.isdisjoint(member["needs"]) for member in options.members)

    @classmethod
    def accepts_partial_labels(cls, options: Any) -> bool:
        return True

    def groups(self) -> list[dict[str, Any]]:
        return []

    @torch.no_grad()
    def score_terms(self, candidates: Ints) -> ScoreTerms:
        pairs = zip(self.options.members, self._members, strict=True)
        members = [(record["method"], method.eval()) for record, method in pairs]
        scorers = [method.scorer(candidates) for _, method in members]

        @torch.no_grad()
        def named_terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            for name in self.options.of:
                total: Any = 0.0
                for place, (own, method) in enumerate(members):
                    if own == name:
                        p = method.probabilities(scorers[place](inputs).double())
                        total = total + p.clamp(min=LEAST).log() / self.temperatures[place]
                yield name, total.float()

        return named_terms

    @torch.no_grad()
    def portable(self, candidates: Ints) -> dict[str, Tensor] | None:
        tensors = [member.portable(candidates) for member in self._members]
        frozen = all(not member["finetuned"] for member in self.options.members)
        if not frozen or any(each is None for each in tensors):
            return None
        return joined_members([t for t in tensors if t is not None], (1 / self.temperatures).float())
