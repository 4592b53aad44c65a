"""Answers for images: the compositions to choose from, the chosen ones, and similar training images.

Users may add compositions, with trained or new words, which are scored without training. Their
text features are encoded from prompts; their visual prototypes are composed of means of the
training pairs' prototypes or, in the closed form, of its terms:

    normalise(mean_state + mean_object - mean_all)    mean_all replaces the mean of a new word
    mu + a_state + b_object                           0 replaces the term of a new word
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from duplex.data.images import thumbnail
from duplex.data.tables import read_table
from duplex.encoders.base import TextTower
from duplex.errors import UsageError, as_usage_error, require_whole
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.answered import AnsweredImages
from duplex.evaluation.probabilities import Confidence, log_probabilities
from duplex.evaluation.vectors import most_similar
from duplex.features.tokens import Examples
from duplex.labels import Bools, Ints, LabelSpace, World, prompt_name
from duplex.methods import portable, score_formula
from duplex.methods.base import Inputs, Method, Scorer, ScoreTerms
from duplex.methods.layers import unit
from duplex.training.novelty import NoveltyDetector
from duplex.training.scoring import SplitScorer

Pair = tuple[str, str]
COLUMNS = ("state", "object")
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
    in_distribution: bool = True  # False: it resembles no training image, so all pairs may be wrong
    distance: float | None = None  # Mahalanobis distance to the nearest pair (`NoveltyDetector`)

    @property
    def best(self) -> Guess:
        return self.top[0]

    def to_dict(self, marginals: int | None = None) -> dict[str, Any]:
        """The answer for JSON, with the `marginals` most probable states and objects (None: all)."""
        return {
            "top": [guess.to_dict() for guess in self.top],
            "states": _rounded(self.states, marginals),
            "objects": _rounded(self.objects, marginals),
            "in_distribution": self.in_distribution,
            "distance": None if self.distance is None else round(self.distance, DIGITS),
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
    novelty: NoveltyDetector | None = None  # finds images that resemble no training image

    @classmethod
    def of(
        cls,
        labels: LabelSpace,
        compositions: Ints,
        *,
        feasible: Bools | None = None,
        confidence: Confidence,
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
        )

    def __len__(self) -> int:
        return len(self.state_of)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The candidates as names (state, object)."""
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
        """Calibrated log probabilities [B, C] in float64, from the scores [B, C] of images."""
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
        distances: list[Any] = [None] * len(best)
        if near is not None:
            distances = near.distances(inputs["cls"]).tolist()
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


def sum_scorer(terms: ScoreTerms) -> Scorer:
    """A scorer that adds up the score terms that `terms` computes."""
    return lambda inputs: cast(Tensor, sum(term for _, term in terms(inputs)))


def _marginals(shares: Tensor, groups: Ints, count: int) -> Floats:
    # [B, count] for each state (or object), the sum over the candidates [C] that have it
    index = torch.as_tensor(groups, device=shares.device)
    sums = shares.new_zeros(len(shares), count).index_add_(1, index, shares)
    return sums.cpu().numpy().astype(np.float64)


def _ranked(names: tuple[str, ...], shares: Floats) -> dict[str, float]:
    return {names[place]: float(shares[place]) for place in np.argsort(-shares, kind="stable")}


@torch.no_grad()
def answers_with_labels(
    method: Method[Any], examples: Examples, labels: LabelSpace, confidence: Confidence, world: World
) -> AnsweredImages:
    """Answer labelled images: each image's most probable composition, its probability, and its label."""
    compositions = labels.candidates(world, "train")
    task = SplitScorer.of(method, compositions)
    candidates = Candidates.of(
        labels,
        compositions,
        confidence=confidence,
        scorer=task.scorer,
        probabilities=method.probabilities,
    )
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


@as_usage_error()
def read_compositions(path: Path) -> list[Pair]:
    """Read (state, object) pairs from a table with the columns state and object."""
    frame = read_table(path, needed=COLUMNS)
    return list(zip(frame["state"], frame["object"], strict=True))


def as_pair(composition: object, labels: LabelSpace) -> Pair:
    """The (state, object) names of a composition, given as one text or as two texts."""
    if isinstance(composition, str):
        return split_composition(composition, labels)
    match composition:
        case (str(state), str(name)) if state.strip() and name.strip():
            return state, name
    expected = "expected 'state object' or ('state', 'object')"
    raise UsageError(f"{composition!r} is not a composition; {expected}")


def split_composition(text: str, labels: LabelSpace) -> Pair:
    """Split `rusty kettle` into state and object; unknown names of several words need a comma."""
    if "," in text:
        before, _, after = text.partition(",")
        if before.strip() and after.strip():
            return before.strip(), after.strip()
    words = text.split()
    cuts = [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(1, len(words))]
    labelled = [(_find(m, labels.states) is not None) + (_find(n, labels.objects) is not None) for m, n in cuts]
    if cuts and (len(cuts) == 1 or max(labelled)):
        return cuts[labelled.index(max(labelled))]
    problem = f"{text!r} cannot be split into a state and an object"
    raise UsageError(f"{problem}; write it as 'state,object'")


def are_words_trained(pair: Pair, labels: LabelSpace) -> WordsSeen:
    """Whether training images have a pair's state, and its object; case, `.` and `_` do not matter."""
    m = _find(pair[0], labels.states)
    n = _find(pair[1], labels.objects)
    states, objects = labels.trained_words
    return WordsSeen(m is not None and bool(states[m]), n is not None and bool(objects[n]))


def with_added_compositions(
    candidates: Candidates, tensors: Mapping[str, Tensor], labels: LabelSpace, tower: TextTower, pairs: Iterable[Pair]
) -> Candidates:
    """Add pairs to the candidates without training; all are scored from `tensors` of the model."""
    states, objects = list(labels.states), list(labels.objects)
    found = [(find_or_append(state, states), find_or_append(name, objects)) for state, name in pairs]
    asked = dict.fromkeys(found)
    present = list(zip(candidates.state_of.tolist(), candidates.object_of.tolist(), strict=True))
    candidate_pairs = set(present)
    added = [pair for pair in asked if pair not in candidate_pairs]
    feasible = candidates.feasible | np.array([pair in asked for pair in present])
    candidates = replace(candidates, feasible=feasible)
    if not added:
        return candidates
    new_words = len(states) > len(labels.states) or len(objects) > len(labels.objects)
    if tower is None and new_words:
        problem = "the encoder has no text tower to describe new words"
        raise UsageError(f"{problem}; add pairs of the model's words only")
    more = with_rows(tensors, labels, (states, objects), np.array(added).reshape(-1, 2), tower)
    terms = portable_term_function(more)
    count = len(added)
    words = (are_words_trained((states[m], objects[n]), labels) for m, n in added)
    return replace(
        candidates,
        states=tuple(states),
        objects=tuple(objects),
        state_of=more["state_of"].cpu().numpy(),
        object_of=more["object_of"].cpu().numpy(),
        seen=np.r_[candidates.seen, np.zeros(count, dtype=bool)],
        feasible=np.r_[candidates.feasible, np.ones(count, dtype=bool)],
        scorer=sum_scorer(terms),
        terms=terms,
        trained_words=dict(enumerate(words, len(candidates))),
    )


def portable_term_function(tensors: Mapping[str, Tensor]) -> ScoreTerms:
    """A function of a batch's features that yields name and values [B, C] of each exported score term."""

    @torch.no_grad()
    def terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        yield from portable.score_terms(tensors, inputs["cls"])

    return terms


def with_rows(
    t: Mapping[str, Tensor], labels: LabelSpace, names: tuple[list[str], list[str]], added: np.ndarray, tower: TextTower
) -> dict[str, Tensor]:
    """An export's tensors `t`, extended to score P more pairs.

    added: state and object of each further pair [P, 2], as indices into all `names`, old and new.
    """
    if "members.weights" in t:  # a product: each of its models has rows of its own
        parts = score_formula.product_member_tensors(t)
        members = [with_rows(part, labels, names, added, tower) for part in parts]
        return {**t, **portable.joined_members(members, t["members.weights"])}
    states, objects = names
    is_new = len(states) > len(labels.states) or len(objects) > len(labels.objects)
    only_heads = "likelihood.rows" not in t and "classifier.states.weight" in t
    if "classifier.pairs.weight" in t or (is_new and only_heads):
        problem = "a linear classifier cannot score pairs that it was not trained on"
        raise UsageError(f"{problem}; leave out the added pairs")
    indices = torch.as_tensor(added, device=t["state_of"].device)
    m, n = indices.unbind(1)
    new_states = states[len(labels.states) :]
    new_objects = objects[len(labels.objects) :]
    encode = partial(encode_prompts, t, labels, tower)
    rows = {"state_of": m, "object_of": n}  # to append to the tensors of these names
    if "semantic" in t:
        rows["semantic"] = encode("composition", [(states[i], objects[j]) for i, j in added])
    if "states" in t and new_states:
        rows["states"] = encode("state", [(name, None) for name in new_states])
    if "objects" in t and new_objects:
        rows["objects"] = encode("object", [(None, name) for name in new_objects])
    if "visual" in t:
        every = t["mean.all"][None]
        of_state = torch.cat([t["mean.states"], every.expand(len(new_states), -1)])[m]
        of_object = torch.cat([t["mean.objects"], every.expand(len(new_objects), -1)])[n]
        rows["visual"] = normalize(of_state + of_object - every, dim=-1)
    if "likelihood.rows" in t:
        limits = torch.tensor([len(labels.states), len(labels.objects)], device=indices.device)
        of_state, of_object = torch.where(indices < limits, indices, -1).unbind(1)
        prototypes = portable.composed_prototypes(t, of_state, of_object)
        rows["likelihood.rows"] = prototypes
        rows["likelihood.offset"] = -0.5 * (prototypes * prototypes).sum(1)
    more = {**t, **{name: torch.cat([t[name], values]) for name, values in rows.items()}}
    return more | _columns(t, "states", len(new_states)) | _columns(t, "objects", len(new_objects))


def _columns(t: Mapping[str, Tensor], name: str, count: int) -> dict[str, Tensor]:
    # posteriors extended by new words: in closed form, each as if it had one training image, at the
    # mean feature of all images; by linear heads, each with the mean of the trained words' logits
    more = {}
    for group in ("primitives", "classifier"):
        for key in (f"{group}.{name}.weight", f"{group}.{name}.offset"):
            if key in t:
                column = t[key].mean(-1, keepdim=True) * (group == "classifier")
                more[key] = torch.cat([t[key], column.expand(*column.shape[:-1], count)], dim=-1)
    return more


@torch.no_grad()
def encode_prompts(
    t: Mapping[str, Tensor],
    labels: LabelSpace,
    tower: TextTower,
    path: str,
    names: Sequence[tuple[str | None, str | None]],
) -> Tensor:
    """Unit text features [P, d] of the prompts of a `path` ("composition", "state" or "object").

    names: (state, object) of each prompt; None leaves a word out. Labels of the model have learned
        vectors, if there are any; other names have token embeddings.
    """
    ends = tower.embedding([tower.start, tower.end])
    prompts = []
    for pair in names:
        words = []
        for name, kind in zip(pair, ("states", "objects"), strict=True):
            place = None if name is None else _find(name, getattr(labels, kind))
            learned = t.get(f"words.{kind}", ends[:0])  # an update adds words to the labels, but not here
            if place is not None and place < len(learned):
                words.append(learned[place : place + 1])
            elif name is not None:
                words.append(tower.embedding(tower.tokens(prompt_name(name))))
        prompts.append(torch.cat([ends[:1], t[f"context.{path}"], *words, ends[1:]]))
    lengths = [len(prompt) for prompt in prompts]
    rows = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    return unit(tower.encode_blocks([row.tolist() for row in rows], torch.cat(prompts)))


def _find(name: str, labels: Sequence[str]) -> int | None:
    wanted = prompt_name(name)
    return next((place for place, label in enumerate(labels) if prompt_name(label) == wanted), None)


def find_or_append(name: str, names: list[str]) -> int:
    """Index of a name in `names`, ignoring case, `.` and `_`; a missing name is appended to it."""
    place = _find(name, names)
    if place is None:
        names.append(name)
        return len(names) - 1
    return place
