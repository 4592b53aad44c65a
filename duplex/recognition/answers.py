"""Results of recognition: the compositions that an image shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DIGITS = 6  # of numbers in JSON; scores are float32


@dataclass(frozen=True)
class TrainedWords:
    """Whether the state and the object of an added composition occurred in training."""

    state: bool
    object: bool


@dataclass(frozen=True)
class Guess:
    """Composition that a recognizer proposes for an image, with its score and its probability among the candidates."""

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
    distance: float | None = None  # Mahalanobis distance to the nearest pair (training/known_images.py)

    @property
    def best(self) -> Guess:
        return self.top[0]

    def to_dict(self, marginals: int | None = None) -> dict[str, Any]:
        """The answer as a dictionary for JSON.

        marginals: number of most likely states and of most likely objects that are listed; None: all.
        """
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
