"""Tables of results as CSV files with one number per cell, which the pages of the manual show."""

from __future__ import annotations

import csv
import re
from pathlib import Path

NUMBER = r"[+-]?[\d,]*\.?\d+"
CELL = re.compile(rf"({NUMBER})(?: ± ({NUMBER}))?(?: \(({NUMBER}) to ({NUMBER})\))?")
RANGE = re.compile(rf"({NUMBER})–({NUMBER})")
CODE = re.compile(r"^`([^`]+)`$")
INTERVAL = " 95 %"  # a column of this ending holds the interval of the column before it


def write_csv(markdown: str, path: Path) -> None:
    """Write a Markdown table as a CSV file: `26.2 ± 0.3 (23.3 to 29.0)` becomes four columns, `–` an empty cell."""
    head, _, *lines = [line for line in markdown.splitlines() if line.startswith("|")]
    names = [name.replace("`", "") for name in _cells(head)]
    if len(set(names)) < len(names):
        raise ValueError(f"columns {names} repeat a name; expected unique names")
    rows = [_numbers(names, _cells(line)) for line in lines]
    columns = list(dict.fromkeys(name for part in names for row in rows for name in row if _belongs(name, part)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _belongs(column: str, name: str) -> bool:
    return column in (name, *(f"{name} {part}" for part in ("±", "low", "high")))


def _cells(line: str) -> list[str]:
    r"""Return the cells of one line of a Markdown table.

    >>> _cells(r"| `cso` | −0.5 | p(c\|x) |")
    ['cso', '-0.5', 'p(c|x)']
    """
    inner = line.strip().removeprefix("|").removesuffix("|")
    cells = [cell.strip().replace("\\|", "|").replace("−", "-") for cell in re.split(r"(?<!\\)\|", inner)]
    return [CODE.sub(r"\1", cell) for cell in cells]


def _numbers(names: list[str], cells: list[str]) -> dict[str, str]:
    """Return a line's cells by column, with errors and intervals in columns of their own."""
    row: dict[str, str] = {}
    for name, cell in zip(names, cells, strict=True):
        if name.endswith(INTERVAL) and (ends := RANGE.fullmatch(cell)):
            row |= {f"{name.removesuffix(INTERVAL)} low": ends[1], f"{name.removesuffix(INTERVAL)} high": ends[2]}
        elif match := CELL.fullmatch(cell):
            parts = zip(("", " ±", " low", " high"), match.groups(), strict=True)
            row |= {f"{name}{part}": value.replace(",", "") for part, value in parts if value}
        elif not name.endswith(INTERVAL):
            row[name] = "" if cell == "–" else cell
    return row
