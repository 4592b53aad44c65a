"""Numbers with intervals and p-values, in percent, as commands print them."""

from __future__ import annotations

from typing import Any


def points(gain: dict[str, Any]) -> dict[str, Any]:
    """A difference in percentage points; p stays a probability."""
    interval = gain["interval"]
    return {
        "value": 100 * gain["value"],
        "interval": None if interval is None else [100 * end for end in interval],
        "p": gain["p"],
    }


def span(found: dict[str, Any]) -> str:
    interval = found["interval"]
    span = "" if interval is None else f"   [{number(interval[0])}, {number(interval[1])}]"
    return number(found["value"]) + span


def p_value(value: float | None) -> str:
    if value is None:
        return ""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def number(value: float | None) -> str:
    return "     -" if value is None else f"{value:6.2f}"
