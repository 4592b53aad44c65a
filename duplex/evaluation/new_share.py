"""Estimate the share of images that show unseen pairs, with NumPy alone. Each export has a copy of this.

    q(x) = sum of p(c|x) over the unseen candidates c;  p is calibrated, at a prior share r = 1/2
    s    = (mean q - m_s) / (m_u - m_s)

`m_s` and `m_u` are the means of `q` over validation images of seen and of unseen pairs. `s` is the
scaled probability average of Bella et al., "Quantification via probability estimators", ICDM 2010.
With `n` images, and by the first order of errors,

    var s = (var q / n + (1 - s)^2 var m_s + s^2 var m_u) / (m_u - m_s)^2

With n < 50, the share is a weighted mean of `s` and the model's stored share `r_0`, so that one
image is answered at the stored share:

    w s + (1 - w) r_0,    w = (n - 1) / 49
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot, sqrt
from typing import Any

ENOUGH = 50  # images from which the estimate is used as it is
LEAST = 0.01  # the share stays between this and 1 - LEAST, as a share of 0 or 1 excludes pairs


@dataclass(frozen=True)
class NewShare:
    """An expected share of images of unseen pairs; as text, a line that says where it comes from."""

    value: float
    error: float | None = None  # standard error; None: not estimated
    note: str = ""  # what it was estimated from, or why it was not

    def __str__(self) -> str:
        if self.error is None:
            return f"share of new pairs: {100 * self.value:g} %, as stored with the model; {self.note}"
        return f"share of new pairs: {100 * self.value:.1f} % ± {100 * self.error:.1f}, {self.note}"


def estimate_share(q: Any, mass: Mapping[str, float] | None, stored: float) -> NewShare:
    """Estimate the share of n images from their `q` [n].

    `mass` has the means `seen` and `unseen` over validation images, and their standard errors
    `seen_error` and `unseen_error`. Without them, or if the means hardly differ, the result is
    `stored`, the model's share. The standard error does not contain the weight of `stored`.
    """
    if mass is None:
        reason = "it has no means over validation images to estimate the share from, so train, fit or export it again"
        return NewShare(stored, note=reason)
    gap = mass["unseen"] - mass["seen"]
    if gap <= 2 * hypot(mass["seen_error"], mass["unseen_error"]):
        return NewShare(stored, note="it cannot tell validation images of new pairs from others")
    n = len(q)
    if n < 2:
        return NewShare(stored, note="an estimate needs two images or more")
    s = min(max((float(q.mean()) - mass["seen"]) / gap, 0.0), 1.0)
    of_means = hypot((1 - s) * mass["seen_error"], s * mass["unseen_error"])
    error = hypot(sqrt(float(q.var(ddof=1)) / n), of_means) / gap
    w = min(1.0, (n - 1) / (ENOUGH - 1))
    value = min(max(w * s + (1 - w) * stored, LEAST), 1 - LEAST)
    more = "" if w == 1 else f" and from the model's {100 * stored:g} %"
    return NewShare(round(value, 4), round(w * error, 4), f"estimated from {n:,} images{more}")
