"""What is said about a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DIGITS = 6  # of numbers in JSON; scores are float32


@dataclass(frozen=True)
class Known:
    """Of a composition that training had not: which of its words, and which of its primitives' pictures, it knew."""

    state: bool
    object: bool

    def to_dict(self) -> dict[str, bool]:
        return {"state": self.state, "object": self.object}


@dataclass(frozen=True)
class Guess:
    """One composition: its score as the evaluation has it, without bias, and its share among those to choose from."""

    state: str
    object: str
    score: float
    probability: float
    seen: bool  # it labels training pictures
    evidence: Mapping[str, float]  # parts of the score: visual, semantic, factors; empty where the method has none
    known: Known | None = None  # None: it is of the model's own label space

    @property
    def name(self) -> str:
        return f"{self.state} {self.object}"

    def to_dict(self) -> dict[str, Any]:
        record = {
            "state": self.state,
            "object": self.object,
            "score": round(self.score, DIGITS),
            "probability": round(self.probability, DIGITS),
            "seen": self.seen,
            "evidence": {name: round(value, DIGITS) for name, value in self.evidence.items()},
        }
        return record if self.known is None else {**record, "known": self.known.to_dict()}


@dataclass(frozen=True)
class Answer:
    """The best compositions, best first, and what the probabilities of all say of each state and object."""

    top: tuple[Guess, ...]
    states: Mapping[str, float]  # every state, most likely first; they sum to 1
    objects: Mapping[str, float]

    @property
    def best(self) -> Guess:
        return self.top[0]

    def to_dict(self, marginals: int | None = None) -> dict[str, Any]:
        """Plain JSON values; `marginals` keeps the likeliest so many states and objects."""
        return {
            "top": [guess.to_dict() for guess in self.top],
            "states": _rounded(self.states, marginals),
            "objects": _rounded(self.objects, marginals),
        }


@dataclass(frozen=True)
class Unreadable:
    """A file that gave no picture."""

    reason: str

    def to_dict(self, marginals: int | None = None) -> dict[str, Any]:
        return {"error": self.reason}


def _rounded(shares: Mapping[str, float], limit: int | None) -> dict[str, float]:
    return {name: round(share, DIGITS) for name, share in list(shares.items())[:limit]}
