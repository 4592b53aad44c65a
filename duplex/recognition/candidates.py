"""The compositions that an answer is chosen from, and what scores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats
from duplex.labels import Bools, Ints, LabelSpace
from duplex.methods.base import Inputs, Scorer, Terms
from duplex.recognition.answers import Answer, Guess, Known

BLOCK_SCORES = 2**22  # scores of one kind held at once: 16 MiB


@dataclass(frozen=True)
class Panel:
    """`C` columns. The bias is added to the scores of those that are not seen, before they are ranked."""

    states: tuple[str, ...]
    objects: tuple[str, ...]
    state_of: Ints  # [C]
    object_of: Ints  # [C]
    seen: Bools  # [C]
    live: Bools  # [C] the calibration lets it through
    bias: float
    scorer: Scorer
    terms: Terms | None  # parts of the score, where it is a sum
    probabilities: Callable[[Tensor], Tensor]
    known: Mapping[int, Known]  # of columns that were added

    @classmethod
    def of(
        cls,
        labels: LabelSpace,
        columns: Ints,
        live: Bools,
        bias: float,
        scorer: Scorer,
        terms: Terms | None,
        probabilities: Callable[[Tensor], Tensor],
    ) -> Panel:
        """Columns of a label space."""
        return cls(
            labels.states,
            labels.objects,
            labels.state_of(columns),
            labels.object_of(columns),
            labels.is_seen(columns),
            live,
            bias,
            scorer,
            terms,
            probabilities,
            {},
        )

    def __len__(self) -> int:
        return len(self.state_of)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """State and object of each column."""
        rows = zip(self.state_of.tolist(), self.object_of.tolist(), strict=True)
        return [(self.states[m], self.objects[n]) for m, n in rows]

    def answers(self, inputs: Inputs, top: int, bias: float | None = None) -> Iterator[Answer]:
        """One for each image, in order."""
        if top < 1:
            raise UsageError(f"top is {top}; ask for at least one composition")
        images, rows = len(inputs["cls"]), max(1, BLOCK_SCORES // len(self))
        for start in range(0, images, rows):
            block = {name: values[start : start + rows] for name, values in inputs.items()}
            yield from self._block(block, min(top, int(self.live.sum())), self.bias if bias is None else bias)

    @torch.no_grad()
    def _block(self, inputs: Inputs, top: int, bias: float) -> Iterator[Answer]:
        parts = dict(self.terms(inputs)) if self.terms is not None else {}
        scores = _total(parts) if parts else self.scorer(inputs)
        dead = torch.as_tensor(~self.live, device=scores.device)
        shift = torch.as_tensor(np.where(self.seen, 0.0, bias), dtype=torch.float32, device=scores.device)
        shares = self.probabilities(scores.masked_fill(dead, -torch.inf))  # [B, C]
        best = (scores + shift).masked_fill(dead, -torch.inf).topk(top, dim=1).indices  # [B, T]
        chosen = {name: part.gather(1, best).cpu().numpy() for name, part in parts.items()}
        score, share = (values.gather(1, best).cpu().numpy() for values in (scores, shares))
        by_state = _gathered(shares, self.state_of, len(self.states))
        by_object = _gathered(shares, self.object_of, len(self.objects))
        for row, columns in enumerate(best.cpu().numpy()):
            guesses = tuple(
                Guess(
                    self.states[self.state_of[column]],
                    self.objects[self.object_of[column]],
                    float(score[row, place]),
                    float(share[row, place]),
                    bool(self.seen[column]),
                    {name: float(values[row, place]) for name, values in chosen.items()},
                    self.known.get(int(column)),
                )
                for place, column in enumerate(columns)
            )
            yield Answer(guesses, _ranked(self.states, by_state[row]), _ranked(self.objects, by_object[row]))


def _total(parts: Mapping[str, Tensor]) -> Tensor:
    """Summed as `Method.scorer` sums, so that no bit differs."""
    total = torch.zeros_like(next(iter(parts.values())))
    for part in parts.values():
        total += part
    return total


def _gathered(shares: Tensor, groups: Ints, count: int) -> Floats:
    """Shares [B, C] summed over the columns of each group [B, count]."""
    index = torch.as_tensor(groups, device=shares.device)
    found = shares.new_zeros(len(shares), count).index_add_(1, index, shares)
    return found.cpu().numpy().astype(np.float64)


def _ranked(names: tuple[str, ...], shares: Floats) -> dict[str, float]:
    order = np.argsort(-shares, kind="stable")
    return {names[place]: float(shares[place]) for place in order}
