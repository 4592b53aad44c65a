"""Names of the metrics, and how every table writes their numbers: the report, the commands, model cards and notebooks.

Metrics are percentages, stored by the names on the left of `METRICS`; `NAME_low` and `NAME_high` are the ends of a 95 %
interval. A number that is not defined is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duplex.evaluation.metrics import Difference

MISSING = "–"
METRICS = {"seen": "S", "unseen": "U", "hm": "HM", "auc": "AUC"}
OPEN_METRICS = {"auc_all": "AUC, all pairs", "auc_by_words": "AUC, by words"}
PART_METRICS = {"hm_at_val_bias": "HM, validation bias", "state_accuracy": "state", "object_accuracy": "object"}
TIPS = {
    "S": "accuracy on images of seen pairs when unseen pairs are excluded",
    "U": "accuracy on images of unseen pairs when seen pairs are excluded",
    "HM": "best harmonic mean of seen and unseen accuracy over all biases",
    "AUC": "area under the seen–unseen curve",
    "AUC 95 %": "interval over test images, mean of the seeds' intervals",
    "AUC, all pairs": "open world with every pair a candidate, no feasibility threshold",
    "AUC, by words": "open world with the feasibility threshold by words that validation chose: the published protocol",
    "HM, validation bias": "harmonic mean at the bias chosen on validation, which predictions use",
    "state": "accuracy of the predicted state, no bias",
    "object": "accuracy of the predicted object, no bias",
}


def number(value: float | None, form: str = ".2f") -> str:
    return MISSING if value is None else format(value, form)


def interval_of(values: Mapping[str, Any], name: str = "auc") -> tuple[float, float] | None:
    """Ends of a metric's 95 % interval; None if one is not defined."""
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    return None if low is None or high is None else (low, high)


def interval_text(values: Mapping[str, Any], name: str = "auc", form: str = ".1f") -> str:
    """A metric's 95 % interval, such as `6.1–7.8`; a dash if it is not defined."""
    ends = interval_of(values, name)
    return MISSING if ends is None else "–".join(format(end, form) for end in ends)


def headline(values: Mapping[str, Any]) -> str:
    """A line such as `S 41.30  U 20.00  HM 18.20  AUC 6.90 [6.10, 7.80]`; in the open world, `all pairs 7.10` too."""
    line = "  ".join(f"{title} {number(values.get(name))}" for name, title in METRICS.items())
    if (ends := interval_of(values)) is not None:
        line += f" [{ends[0]:.2f}, {ends[1]:.2f}]"
    return line if values.get("auc_all") is None else f"{line}  all pairs {values['auc_all']:.2f}"


def estimate_line(name: str, estimate: Mapping[str, Any]) -> str:
    """A metric as a line such as `auc       12.34   [11.00, 13.70]   p = 0.012`; missing parts are left out."""
    line = f"{name}{number(estimate['value']):>6}"
    if estimate["interval"] is not None:
        low, high = estimate["interval"]
        line += f"   [{low:6.2f}, {high:6.2f}]"
    p = estimate.get("p")
    if p is None:
        return line
    return f"{line}   p < 0.001" if p < 0.001 else f"{line}   p = {p:.3f}"


def to_points(gains: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Differences as percentage points, of fractions; p-values stay probabilities."""
    return {
        name: {
            "value": 100 * gain.value,
            "interval": None if gain.interval is None else [100 * end for end in gain.interval],
            "p": gain.p,
        }
        for name, gain in gains.items()
    }


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, never wrapped or cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
