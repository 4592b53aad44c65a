"""The compositions that an answer is chosen from, and the function that scores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats
from duplex.labels import Bools, Ints, LabelSpace
from duplex.methods.base import Inputs, Scorer, ScoreTerms
from duplex.recognition.answers import Answer, Guess, KnownWords

BLOCK_SCORES = 2**22  # scores in memory at once, per score term: 16 MiB


@dataclass(frozen=True)
class Candidates:
    """`C` compositions. The bias is added to the scores of the unseen ones before they are ranked."""

    states: tuple[str, ...]
    objects: tuple[str, ...]
    state_of: Ints  # [C]
    object_of: Ints  # [C]
    seen: Bools  # [C]
    feasible: Bools  # [C] within the calibrated feasibility threshold; others are never answers
    bias: float
    scorer: Scorer
    terms: ScoreTerms | None  # summands of the score, where it is a sum
    probabilities: Callable[[Tensor], Tensor]
    known: Mapping[int, KnownWords]  # by position, of added compositions

    @classmethod
    def of(
        cls,
        labels: LabelSpace,
        compositions: Ints,
        feasible: Bools,
        bias: float,
        scorer: Scorer,
        terms: ScoreTerms | None,
        probabilities: Callable[[Tensor], Tensor],
    ) -> Candidates:
        """Build candidates from compositions [C] of a label space."""
        state_of, object_of = labels.state_of(compositions), labels.object_of(compositions)
        seen = labels.is_seen(compositions)
        names = labels.states, labels.objects
        return cls(*names, state_of, object_of, seen, feasible, bias, scorer, terms, probabilities, {})

    def __len__(self) -> int:
        return len(self.state_of)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """State and object of each candidate."""
        rows = zip(self.state_of.tolist(), self.object_of.tolist(), strict=True)
        return [(self.states[m], self.objects[n]) for m, n in rows]

    def answers(self, inputs: Inputs, top: int, bias: float | None = None) -> Iterator[Answer]:
        """Yield one answer with `top` compositions per image, in order; `bias` replaces the calibrated one."""
        if top < 1:
            raise UsageError(f"top is {top}; expected at least 1")
        images, rows = len(inputs["cls"]), max(1, BLOCK_SCORES // len(self))
        for start in range(0, images, rows):
            block = {name: values[start : start + rows] for name, values in inputs.items()}
            yield from self._block(block, min(top, int(self.feasible.sum())), self.bias if bias is None else bias)

    @torch.no_grad()
    def _block(self, inputs: Inputs, top: int, bias: float) -> Iterator[Answer]:
        terms = dict(self.terms(inputs)) if self.terms is not None else {}
        scores = _total(terms) if terms else self.scorer(inputs)
        excluded = torch.as_tensor(~self.feasible, device=scores.device)
        shift = torch.as_tensor(np.where(self.seen, 0.0, bias), dtype=torch.float32, device=scores.device)
        shares = self.probabilities(scores.masked_fill(excluded, -torch.inf))  # [B, C]
        best = (scores + shift).masked_fill(excluded, -torch.inf).topk(top, dim=1).indices  # [B, T]
        best_terms = {name: term.gather(1, best).cpu().numpy() for name, term in terms.items()}
        score, share = (values.gather(1, best).cpu().numpy() for values in (scores, shares))
        by_state = _marginals(shares, self.state_of, len(self.states))
        by_object = _marginals(shares, self.object_of, len(self.objects))
        for row, positions in enumerate(best.cpu().numpy()):
            guesses = tuple(
                Guess(
                    self.states[self.state_of[position]],
                    self.objects[self.object_of[position]],
                    float(score[row, rank]),
                    float(share[row, rank]),
                    bool(self.seen[position]),
                    {name: float(values[row, rank]) for name, values in best_terms.items()},
                    self.known.get(int(position)),
                )
                for rank, position in enumerate(positions)
            )
            yield Answer(guesses, _ranked(self.states, by_state[row]), _ranked(self.objects, by_object[row]))


def _total(terms: Mapping[str, Tensor]) -> Tensor:
    """Add up the terms in the order of `Method.scorer`, so that no bit differs."""
    total = torch.zeros_like(next(iter(terms.values())))
    for term in terms.values():
        total += term
    return total


def _marginals(shares: Tensor, groups: Ints, count: int) -> Floats:
    """Sum shares [B, C] over the candidates of each group: [B, count]."""
    index = torch.as_tensor(groups, device=shares.device)
    sums = shares.new_zeros(len(shares), count).index_add_(1, index, shares)
    return sums.cpu().numpy().astype(np.float64)


def _ranked(names: tuple[str, ...], shares: Floats) -> dict[str, float]:
    order = np.argsort(-shares, kind="stable")
    return {names[place]: float(shares[place]) for place in order}
