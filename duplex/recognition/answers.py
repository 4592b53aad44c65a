"""Answers for images: the compositions to choose from, the chosen ones, and similar training images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
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
from duplex.evaluation.answered import group_weights
from duplex.evaluation.new_share import NewShare, estimate_share
from duplex.evaluation.probabilities import Confidence, UnseenMass
from duplex.evaluation.vectors import most_similar
from duplex.labels import Bools, Ints, LabelSpace, World
from duplex.methods import portable, score_formula
from duplex.methods.base import Inputs, Scorer, ScoreTerms
from duplex.training.novelty import NoveltyDetector

Pair = tuple[str, str]
DIGITS = 6  # of numbers in JSON; scores are float32
BLOCK_SCORES = 2**22  # scores in memory at once, per score term: 16 MiB
cached_thumbnail = lru_cache(maxsize=512)(thumbnail)


@dataclass(frozen=True)
class WordsSeen:
    """Whether each word of an added composition occurred in training."""

    state: bool
    object: bool


@dataclass(frozen=True)
class Guess:
    """One composition proposed for an image, with its score and probability among the candidates."""

    state: str
    object: str
    score: float
    probability: float
    seen: bool  # it labels training images
    score_terms: Mapping[str, float]  # summands of the score: visual, semantic, ...; may be empty
    trained_words: WordsSeen | None = None  # None unless the user added the composition

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
    """An image's best compositions, and the probabilities of all states and all objects."""

    top: tuple[Guess, ...]
    states: Mapping[str, float]  # probability of every state, most likely first; they sum to 1
    objects: Mapping[str, float]  # the same for every object
    share: NewShare  # the expected share of new pairs, by which pairs are ranked
    in_distribution: bool = True  # False: it is unlike all pairs, which may all be wrong
    distance: float | None = None  # Mahalanobis distance to the nearest pair (`NoveltyDetector`)

    @property
    def best(self) -> Guess:
        return self.top[0]

    def to_dict(self, marginals: int | None = None) -> dict[str, Any]:
        """The answer for JSON, with the `marginals` most probable states and objects (None: all)."""
        error = self.share.error
        return {
            "top": [guess.to_dict() for guess in self.top],
            "states": _rounded(self.states, marginals),
            "objects": _rounded(self.objects, marginals),
            "in_distribution": self.in_distribution,
            "distance": None if self.distance is None else round(self.distance, DIGITS),
            "new_share": round(self.share.value, DIGITS),
            "new_share_error": None if error is None else round(error, DIGITS),
        }


@dataclass(frozen=True)
class UnreadableImage:
    """Takes the place of an answer for a file that cannot be read as an image."""

    reason: str

    def to_dict(self, marginals: int | None = None) -> dict[str, Any]:
        return {"error": self.reason}


def _rounded(shares: Mapping[str, float], limit: int | None) -> dict[str, float]:
    return {name: round(share, DIGITS) for name, share in list(shares.items())[:limit]}


@dataclass(frozen=True)
class Candidates:
    """The `C` compositions that answers are chosen from, with scorer, calibration and novelty detector."""

    states: tuple[str, ...]  # names
    objects: tuple[str, ...]
    state_of: Ints  # [C] index in `states`
    object_of: Ints  # [C] index in `objects`
    seen: Bools  # [C]
    feasible: Bools  # [C] within the calibrated feasibility threshold; others are never answers
    confidence: Confidence  # temperature and prior of the probabilities
    scorer: Scorer
    terms: ScoreTerms | None  # computes the summands of the score; None if the score is not a sum
    probabilities: Callable[[Tensor], Tensor]  # of the method, from scores [B, C], before the temperature
    trained_words: Mapping[int, WordsSeen]  # of compositions that the user added, by index
    novelty: NoveltyDetector | None = None  # finds images unlike all pairs
    mass: UnseenMass | None = None  # of the confidence, for these candidates' world

    @classmethod
    def of(
        cls,
        labels: LabelSpace,
        compositions: Ints,
        *,
        feasible: Bools | None = None,
        confidence: Confidence,
        world: World,
        scorer: Scorer,
        terms: ScoreTerms | None = None,
        probabilities: Callable[[Tensor], Tensor],
    ) -> Candidates:
        """Make candidates of compositions [C] of `labels`; `feasible` None: all of them are."""
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
            mass=confidence.unseen_mass.get(world),
        )

    def __len__(self) -> int:
        return len(self.state_of)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The candidates as names (state, object)."""
        rows = zip(self.state_of.tolist(), self.object_of.tolist(), strict=True)
        return [(self.states[m], self.objects[n]) for m, n in rows]

    @property
    def stored_share(self) -> NewShare:
        """The share of new pairs that the calibration expects of any images."""
        return NewShare(self.confidence.new_share, note="not estimated")

    def answers(self, inputs: Inputs, top: int) -> Iterator[Answer]:
        """Yield one answer per image, in order, each with the `top` most probable compositions."""
        for block in self.blocks(inputs, top):
            yield from block.answers(self.stored_share)

    def blocks(self, inputs: Inputs, top: int) -> Iterator[AnswerBlock]:
        """Yield blocks of images whose answers, with `top` compositions, follow at any share of new pairs."""
        top = require_whole(top, "top")
        rows = max(1, BLOCK_SCORES // len(self))
        for start in range(0, len(inputs["cls"]), rows):
            yield self._block({name: values[start : start + rows] for name, values in inputs.items()}, top)

    def estimate(self, blocks: Sequence[AnswerBlock]) -> NewShare:
        """The share of new pairs among all images of `blocks`, or the stored one and why."""
        return self.estimate_from(np.concatenate([block.unseen for block in blocks] or [np.zeros(0)]))

    def estimate_from(self, q: Floats) -> NewShare:
        """The same from images' probabilities [n] of all unseen candidates at r = 1/2."""
        return estimate_share(q, None if self.mass is None else asdict(self.mass), self.confidence.new_share)

    def even_log_posteriors(self, scores: Tensor) -> Tensor:
        """Calibrated log probabilities [B, C] in float64 at r = 1/2, from the scores [B, C] of images."""
        return self.confidence.even.log_posteriors(self.probabilities, scores, self.seen, self.feasible)

    @cached_property
    def groups(self) -> tuple[Tensor, Tensor]:
        """Positions of the seen and of the unseen candidates that may be answers."""
        seen = np.flatnonzero(self.seen & self.feasible)
        return torch.from_numpy(seen), torch.from_numpy(np.flatnonzero(~self.seen & self.feasible))

    @torch.no_grad()
    def _block(self, inputs: Inputs, top: int) -> AnswerBlock:
        terms = [] if self.terms is None else list(self.terms(inputs))
        scores = cast(Tensor, sum(term for _, term in terms)) if terms else self.scorer(inputs)
        log_q = self.even_log_posteriors(scores)
        q = log_q.exp()
        groups = [group.to(q.device) for group in self.groups]
        best = []
        for group in groups:
            listed = log_q[:, group].topk(min(top, len(group)), dim=1).indices
            best.append(group[listed])
        position = torch.cat(best, dim=1)  # [B, T]: seen ones, then unseen ones
        near = self.novelty
        return AnswerBlock(
            candidates=self,
            top=top,
            position=position.cpu().numpy(),
            probability=q.gather(1, position).cpu().numpy(),
            score=scores.gather(1, position).cpu().numpy(),
            terms={name: term.gather(1, position).cpu().numpy() for name, term in terms},
            unseen=q[:, groups[1]].sum(1).cpu().numpy(),
            states=_marginals(q, groups, self.state_of, len(self.states)),
            objects=_marginals(q, groups, self.object_of, len(self.objects)),
            distance=None if near is None else near.distances(inputs["cls"]).cpu().numpy(),
        )


@dataclass(frozen=True)
class AnswerBlock:
    """What B images' answers at any share of new pairs need; probabilities are those at r = 1/2."""

    candidates: Candidates
    top: int  # number of compositions per answer
    position: Ints  # [B, T] candidates: the best seen ones, then the best unseen ones
    probability: Floats  # [B, T]
    score: NDArray[Any]  # [B, T]
    terms: Mapping[str, NDArray[Any]]  # [B, T] of each score term
    unseen: Floats  # [B] probability of all unseen candidates
    states: NDArray[np.float32]  # [B, 2, M] probability of each state, with seen and with unseen pairs
    objects: NDArray[np.float32]  # [B, 2, N]
    distance: Floats | None  # [B] to the nearest pair

    def __len__(self) -> int:
        return len(self.unseen)

    def answers(self, share: NewShare) -> Iterator[Answer]:
        """Yield the images' answers if `share` of all images are expected to show unseen pairs."""
        their = self.candidates
        weights = group_weights(share.value, self.unseen)  # [B, 2]
        group = (~their.seen[self.position]).astype(int)  # [B, T]
        probability = self.probability * np.take_along_axis(weights, group, 1)
        order = np.argsort(-probability, axis=1, kind="stable")[:, : self.top]
        by_state = np.einsum("bg,bgm->bm", weights, self.states)
        by_object = np.einsum("bg,bgn->bn", weights, self.objects)
        limit = math.inf if their.novelty is None else float(their.novelty.threshold)
        for row, best in enumerate(order):
            distance = None if self.distance is None else float(self.distance[row])
            yield Answer(
                top=tuple(self._guess(row, place, float(probability[row, place])) for place in best),
                states=_ranked(their.states, by_state[row]),
                objects=_ranked(their.objects, by_object[row]),
                share=share,
                in_distribution=distance is None or distance <= limit,
                distance=distance,
            )

    def _guess(self, row: int, place: int, probability: float) -> Guess:
        their = self.candidates
        position = int(self.position[row, place])
        return Guess(
            state=their.states[their.state_of[position]],
            object=their.objects[their.object_of[position]],
            score=float(self.score[row, place]),
            probability=probability,
            seen=bool(their.seen[position]),
            score_terms={name: float(values[row, place]) for name, values in self.terms.items()},
            trained_words=their.trained_words.get(position),
        )


def sum_scorer(terms: ScoreTerms) -> Scorer:
    """A scorer that adds up the score terms that `terms` computes."""
    return lambda inputs: cast(Tensor, sum(term for _, term in terms(inputs)))


def portable_term_function(tensors: Mapping[str, Tensor]) -> ScoreTerms:
    """A function of a batch's features that yields name and values [B, C] of each exported score term."""

    @torch.no_grad()
    def terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        yield from portable.score_terms(tensors, inputs["cls"])

    return terms


def _marginals(q: Tensor, groups: Sequence[Tensor], words: Ints, count: int) -> NDArray[np.float32]:
    # [B, 2, count] for each state (or object), the sums over the seen and the unseen candidates that have it
    index = torch.as_tensor(words, device=q.device)
    sums = q.new_zeros(len(q), len(groups), count)
    for place, group in enumerate(groups):
        sums[:, place].index_add_(1, index[group], q[:, group])
    return sums.float().cpu().numpy()


def _ranked(names: tuple[str, ...], shares: Floats) -> dict[str, float]:
    return {names[place]: float(shares[place]) for place in np.argsort(-shares, kind="stable")}


@dataclass(frozen=True)
class NeighbourIndex:
    """Index of training images that finds the images most similar to a given one."""

    features: NDArray[np.float32]  # [n, d]
    manifest: pd.DataFrame  # paths and labels, one line per image
    root: Path  # folder that the paths are relative to

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", score_formula.unit(self.features, np))

    def nearest(self, feature: NDArray[np.float32], count: int) -> list[dict[str, Any]]:
        """The `count` training images nearest to a feature: path, labels, cosine and thumbnail."""
        best, cosines = most_similar(score_formula.unit(feature[None], np), self.features, count)
        rows: list[Any] = self.manifest.iloc[best[0]][["image", "state", "object"]].to_dict("records")
        records = []
        for row, cosine in zip(rows, cosines[0], strict=True):
            shown = cached_thumbnail(self.root / row["image"])
            records.append({**row, "cosine": round(float(cosine), 4), "thumbnail": shown})
        return records
