"""Candidates: the compositions that the answer for an image is chosen from, with the function that scores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from duplex.errors import require_whole
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.confidence import Confidence, log_probabilities
from duplex.labels import Bools, Ints, LabelSpace
from duplex.methods.base import Inputs, Scorer, ScoreTerms
from duplex.recognition.answers import Answer, Guess, TrainedWords
from duplex.training.known_images import KnownImages

BLOCK_SCORES = 2**22  # scores in memory at once, per score term: 16 MiB


@dataclass(frozen=True)
class Candidates:
    """`C` compositions to choose from, the function that scores them, and the prior of their probabilities.

    The prior of a composition is its probability before the image is seen.
    """

    states: tuple[str, ...]  # names
    objects: tuple[str, ...]
    state_of: Ints  # [C] index in `states`
    object_of: Ints  # [C] index in `objects`
    seen: Bools  # [C]
    feasible: Bools  # [C] within the calibrated feasibility threshold; others are never answers
    confidence: Confidence  # temperature and prior of the probabilities
    scorer: Scorer
    terms: ScoreTerms | None  # computes the summands of the score; None if the score is not a sum
    probabilities: Callable[[Tensor], Tensor]  # scores [B, C] -> the method's probabilities, before the temperature
    trained_words: Mapping[int, TrainedWords]  # of compositions that the user added, by index
    known_images: KnownImages | None = None  # finds images that resemble no training image

    @classmethod
    def of(
        cls,
        labels: LabelSpace,
        compositions: Ints,
        feasible: Bools | None,
        confidence: Confidence,
        scorer: Scorer,
        terms: ScoreTerms | None,
        probabilities: Callable[[Tensor], Tensor],
    ) -> Candidates:
        """Candidates from compositions [C] of a label space; `feasible` is None if all can be answers."""
        return cls(
            states=labels.states,
            objects=labels.objects,
            state_of=labels.state_of(compositions),
            object_of=labels.object_of(compositions),
            seen=labels.is_seen(compositions),
            feasible=np.ones(len(compositions), dtype=bool) if feasible is None else feasible,
            confidence=confidence,
            scorer=scorer,
            terms=terms,
            probabilities=probabilities,
            trained_words={},
        )

    def __len__(self) -> int:
        return len(self.state_of)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Names (state, object) of each candidate."""
        rows = zip(self.state_of.tolist(), self.object_of.tolist(), strict=True)
        return [(self.states[m], self.objects[n]) for m, n in rows]

    def answers(self, inputs: Inputs, top: int) -> Iterator[Answer]:
        """Yield one answer per image, in order, each with the `top` most probable compositions."""
        top = require_whole(top, "top")
        rows = max(1, BLOCK_SCORES // len(self))
        for start in range(0, len(inputs["cls"]), rows):
            block = {name: values[start : start + rows] for name, values in inputs.items()}
            yield from self._block(block, min(top, int(self.feasible.sum())))

    def log_posteriors(self, scores: Tensor) -> Tensor:
        """Calibrated log probabilities [B, C] of the candidates, in float64, for images' scores [B, C]."""
        excluded = torch.as_tensor(~self.feasible, device=scores.device)
        log_p = log_probabilities(self.probabilities, scores.masked_fill(excluded, -torch.inf))
        prior = torch.from_numpy(self.confidence.log_prior(self.seen, self.feasible)).to(scores.device)
        return (log_p / self.confidence.temperature + prior).log_softmax(1)

    @torch.no_grad()
    def _block(self, inputs: Inputs, top: int) -> Iterator[Answer]:
        terms = [] if self.terms is None else list(self.terms(inputs))
        scores = cast(Tensor, sum(term for _, term in terms)) if terms else self.scorer(inputs)
        log_q = self.log_posteriors(scores)
        shares = log_q.exp()  # [B, C]
        best = log_q.topk(top, dim=1).indices  # [B, T]
        best_terms = {name: term.gather(1, best).cpu().numpy() for name, term in terms}
        score = scores.gather(1, best).cpu().numpy()
        share = shares.gather(1, best).cpu().numpy()
        by_state = _marginals(shares, self.state_of, len(self.states))
        by_object = _marginals(shares, self.object_of, len(self.objects))
        near = self.known_images
        distances: list[Any] = [None] * len(best) if near is None else near.distances(inputs["cls"]).tolist()
        for row, positions in enumerate(best.cpu().numpy()):
            guesses = tuple(
                Guess(
                    state=self.states[self.state_of[position]],
                    object=self.objects[self.object_of[position]],
                    score=float(score[row, rank]),
                    probability=float(share[row, rank]),
                    seen=bool(self.seen[position]),
                    score_terms={name: float(values[row, rank]) for name, values in best_terms.items()},
                    trained_words=self.trained_words.get(int(position)),
                )
                for rank, position in enumerate(positions)
            )
            yield Answer(
                top=guesses,
                states=_ranked(self.states, by_state[row]),
                objects=_ranked(self.objects, by_object[row]),
                in_distribution=near is None or distances[row] <= float(near.threshold),
                distance=distances[row],
            )


def sum_of(terms: ScoreTerms) -> Scorer:
    """A scorer that sums the terms one after another."""
    return lambda inputs: cast(Tensor, sum(term for _, term in terms(inputs)))


def _marginals(shares: Tensor, groups: Ints, count: int) -> Floats:
    """Probability [B, count] of each state (or object): the sum over the candidates [C] that have it, by `groups`."""
    index = torch.as_tensor(groups, device=shares.device)
    sums = shares.new_zeros(len(shares), count).index_add_(1, index, shares)
    return sums.cpu().numpy().astype(np.float64)


def _ranked(names: tuple[str, ...], shares: Floats) -> dict[str, float]:
    order = np.argsort(-shares, kind="stable")
    return {names[place]: float(shares[place]) for place in order}
