"""Text and JSON as commands print them: numbers with intervals and p-values, and the issues of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from duplex.system.entry import escape_unprintable

if TYPE_CHECKING:
    from duplex.data.check import DataIssue
    from duplex.evaluation.uncertainty import Difference


def print_json(record: object) -> None:
    typer.echo(json.dumps(record, indent=2, ensure_ascii=False))


def issue_lines(name: str, issues: Iterable[DataIssue], notes: dict[str, int], differences: Iterable[str]) -> str:
    """Return the result of checking a data set as text, one line per issue or difference from published counts.

    `notes`: what was left out while reading the data set -> count; one line each.
    """
    lines = [f"{'problem' if issue.problem else 'remark'}: {issue}" for issue in issues]
    lines += [f"note: {note}: {count:,}" for note, count in notes.items()]
    lines += [f"differs from the published table: {line}" for line in differences]
    return "\n".join(map(escape_unprintable, lines)) or f"{name}: no problems found"


def to_points(gains: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Convert metric differences from fractions to percentage points; p-values stay probabilities."""
    return {
        name: {
            "value": 100 * gain.value,
            "interval": None if gain.interval is None else [100 * end for end in gain.interval],
            "p": gain.p,
        }
        for name, gain in gains.items()
    }


def estimate_line(name: str, estimate: Mapping[str, Any]) -> str:
    """Return a metric as a line such as `auc       12.34   [11.00, 13.70]   p = 0.012`.

    The interval or p is left out if it is None.
    """
    line = f"{name}{number(estimate['value'])}"
    if estimate["interval"] is not None:
        line += "   [{}, {}]".format(*map(number, estimate["interval"]))
    p = estimate.get("p")
    return line if p is None else f"{line}   p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}"


def number(value: float | None) -> str:
    """Return a number with two decimals, or a dash for None, six characters wide."""
    return "     -" if value is None else f"{value:6.2f}"
