"""Verdicts on differences, by their 95 % intervals over seeds, and on sentences of several comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from duplex.evaluation.metrics import MISSING

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
UNDECIDED = "undecided"
UNTRAINED = "untrained"
NOT_COMPARABLE = "not comparable"
NOT_RUN = "not run"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, UNDECIDED, UNTRAINED, NOT_COMPARABLE, NOT_RUN)
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706)  # 97.5 %, 1 to 5 degrees of freedom
CLOSE = 1.0  # points; a smaller difference is negligible


@dataclass(frozen=True)
class MeanWithError:
    """A mean over seeds; for a published number without error, `error` and `seeds` are 0."""

    mean: float
    error: float | None
    seeds: int
    source: str = ""


@dataclass(frozen=True)
class Gap:
    """A sum or difference of values; with a 95 % interval if all have a standard error."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, *terms: tuple[float, MeanWithError]) -> Gap:
        """Sum terms (factor, value); has one degree of freedom less than the fewest seeds."""
        total = math.fsum(factor * value.mean for factor, value in terms)
        freedom = min((value.seeds for _, value in terms if value.seeds), default=0) - 1
        squares = []
        for factor, value in terms:
            if value.error is not None:
                squares.append((factor * value.error) ** 2)
        if freedom < 1 or len(squares) < len(terms):
            return cls(total)
        width = t_quantile(freedom) * math.sqrt(math.fsum(squares))
        return cls(total, total - width, total + width)

    @property
    def order(self) -> str:
        """Verdict on `value` > 0, by whether the interval is above 0, below or neither."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return UNDECIDED
        return REPRODUCED if self.low > 0 else NOT_REPRODUCED

    @property
    def equality(self) -> str:
        """Verdict on |`value`| < 1 point, by whether the interval is within ±1, outside or neither."""
        if self.low is None or self.high is None:
            return UNDECIDED
        if self.low > -CLOSE and self.high < CLOSE:
            return REPRODUCED
        return NOT_REPRODUCED if self.low > CLOSE or self.high < -CLOSE else UNDECIDED

    @property
    def near_order(self) -> str:
        """Verdict on `value` > -1 point, by whether the interval is above -1, below or neither."""
        if self.low is None or self.high is None:
            return UNDECIDED
        if self.low > -CLOSE:
            return REPRODUCED
        return NOT_REPRODUCED if self.high < -CLOSE else UNDECIDED

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return MISSING
        return f"{self.low:+.1f} to {self.high:+.1f}"


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, with an error below 0.1 %."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + (z**3 + z) / (4 * freedom) + second + third


def joint_verdict(verdicts: Sequence[str]) -> str:
    """Verdict on a sentence that makes several comparisons: reproduced if all of them are.

    One comparison that is not reproduced refutes it; otherwise it is undecided, unless no
    comparison tells anything, all for the same reason.
    """
    if NOT_REPRODUCED in verdicts:
        return NOT_REPRODUCED
    return verdicts[0] if len(set(verdicts)) == 1 else UNDECIDED
