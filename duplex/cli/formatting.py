"""JSON as commands print it, and the issues of a data set as text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from duplex.system.entry import escape_unprintable

if TYPE_CHECKING:
    from duplex.data.check import DataIssue


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
