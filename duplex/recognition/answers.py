"""Answers to images: the compositions to choose from, the compositions chosen, and similar training images.

Candidates are the compositions that an answer is chosen from, with the function that scores them and the prior of their
probabilities, the probability of each before the image is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.data.images import thumbnail
from duplex.errors import require_whole
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.probabilities import AnsweredImages, Confidence, log_probabilities
from duplex.evaluation.retrieval import most_similar
from duplex.features.tokens import Examples
from duplex.labels import Bools, Ints, LabelSpace, World
from duplex.methods.base import Inputs, Method, Scorer, ScoreTerms
from duplex.training.scoring import NoveltyDetector, ScoringTask

DIGITS = 6  # of numbers in JSON; scores are float32
BLOCK_SCORES = 2**22  # scores in memory at once, per score term: 16 MiB
cached_thumbnail = lru_cache(maxsize=512)(thumbnail)


@dataclass(frozen=True)
class TrainedWords:
    """Whether the words of an added composition occurred in training."""

    state: bool
    object: bool


@dataclass(frozen=True)
class Guess:
    """A composition proposed for an image, with its score and its probability among the candidates."""

    state: str
    object: str
    score: float
    probability: float
    seen: bool  # it labels training images
    score_terms: Mapping[str, float]  # summands of the score: visual, semantic, ...; empty where the method has none
    trained_words: TrainedWords | None = None  # None unless the user added the composition

    @property
    def name(self) -> str:
        return f"{self.state} {self.object}"

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        record |= {name: round(record[name], DIGITS) for name in ("score", "probability")}
        record["score_terms"] = _rounded(self.score_terms, None)
        return {key: value for key, value in record.items() if value is not None}


@dataclass(frozen=True)
class Answer:
    """Answer for one image: its best compositions, best first, and marginal probabilities of states and objects."""

    top: tuple[Guess, ...]
    states: Mapping[str, float]  # probability of every state, most likely first; they sum to 1
    objects: Mapping[str, float]  # the same of every object
    in_distribution: bool = True  # False: the image resembles no training image; perhaps it shows none of the pairs
    distance: float | None = None  # Mahalanobis distance to the nearest pair (`NoveltyDetector`)

    @property
    def best(self) -> Guess:
        return self.top[0]

    def to_dict(self, marginals: int | None = None) -> dict[str, Any]:
        """The answer for JSON; `marginals`: number of states and of objects listed; None: all."""
        return {
            "top": [guess.to_dict() for guess in self.top],
            "states": _rounded(self.states, marginals),
            "objects": _rounded(self.objects, marginals),
            "in_distribution": self.in_distribution,
            "distance": None if self.distance is None else round(self.distance, DIGITS),
        }


@dataclass(frozen=True)
class UnreadableImage:
    """Result for a file that cannot be read as an image."""

    reason: str

    def to_dict(self, marginals: int | None = None) -> dict[str, Any]:
        return {"error": self.reason}


def _rounded(shares: Mapping[str, float], limit: int | None) -> dict[str, float]:
    return {name: round(share, DIGITS) for name, share in list(shares.items())[:limit]}


@dataclass(frozen=True)
class Candidates:
    """`C` compositions to choose from."""

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
    novelty: NoveltyDetector | None = None  # finds images that resemble no training image

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
        """One answer per image, in order, with the `top` most probable compositions."""
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
        near = self.novelty
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
    # [B, count] for each state (or object), the sum over the candidates [C] that have it
    index = torch.as_tensor(groups, device=shares.device)
    sums = shares.new_zeros(len(shares), count).index_add_(1, index, shares)
    return sums.cpu().numpy().astype(np.float64)


def _ranked(names: tuple[str, ...], shares: Floats) -> dict[str, float]:
    order = np.argsort(-shares, kind="stable")
    return {names[place]: float(shares[place]) for place in order}


@torch.no_grad()
def listed_answers(
    method: Method[Any], examples: Examples, labels: LabelSpace, confidence: Confidence, world: World
) -> AnsweredImages:
    """The most probable composition of each labelled image, with its probability and the image's label."""
    compositions = labels.candidates(world, "train")
    task = ScoringTask.of(method, compositions)
    candidates = Candidates.of(labels, compositions, None, confidence, task.scorer, None, method.probabilities)
    answers = []
    shares = []
    for _, scores in task.blocks(examples.inputs):
        share, best = candidates.log_posteriors(scores).exp().max(1)
        answers.append(best.cpu().numpy())
        shares.append(share.cpu().numpy())
    target = examples.compositions.cpu().numpy()
    answer = compositions[np.concatenate(answers)]
    return AnsweredImages(labels, examples.rows, target, answer, np.concatenate(shares), confidence.new_share)


@dataclass(frozen=True)
class Neighbours:
    """Index of n training images, to find those that are most similar to an image."""

    features: NDArray[np.float32]  # [n, d]
    manifest: pd.DataFrame  # paths and labels, one line per image
    root: Path  # folder that the paths are relative to

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", _unit(self.features))

    def nearest(self, feature: NDArray[np.float32], count: int) -> list[dict[str, Any]]:
        """Path, labels, cosine and thumbnail of the `count` training images nearest to a feature, best first."""
        best, cosines = most_similar(_unit(feature)[None], self.features, count)
        records: list[Any] = self.manifest.iloc[best[0]][["image", "state", "object"]].to_dict("records")
        return [
            {**record, "cosine": round(float(cosine), 4), "thumbnail": cached_thumbnail(self.root / record["image"])}
            for record, cosine in zip(records, cosines[0], strict=True)
        ]


def _unit(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12), dtype=np.float32)
