"""Tables of results, from files to Markdown.

A CSV file has one plain number per cell. Columns that belong together are shown in one cell: `AUC`, `AUC ±`, `AUC low`
and `AUC high` as `26.2 ± 0.3 (23.3 to 29.0)`. A YAML file collects cells of CSV files beside it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

PARTS = (" ±", " low", " high")  # endings of columns that are shown in the cell of another column


def table_of_file(path: Path, shown: Sequence[str] = ()) -> str:
    """A CSV file, or cells of several, as a Markdown table.

    shown: the columns of a CSV file to show, in this order, without errors and intervals; by default all

    Raises `ValueError` if the file has no such column.
    """
    if path.suffix == ".csv":
        columns, records = read_csv(path)
        for name in shown:
            if name not in columns:
                raise ValueError(f"{path.name} has no column {name!r}; it has {', '.join(columns)}")
        return markdown_table(shown or columns, records)
    collected = YAML(typ="safe").load(path)
    rows: list[dict[str, str]] = []
    for row in collected["rows"]:
        rows.append({})
        for column, cell in zip(collected["columns"], row, strict=True):
            rows[-1] |= {column: cell} if isinstance(cell, str) else collected_cell(path.parent, column, cell)
    return markdown_table(collected["columns"], rows)


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)


def collected_cell(folder: Path, title: str, cell: Mapping[str, Any]) -> dict[str, str]:
    """A column `title` with a number of a file, and the ends of its interval if the file has them.

    cell: `file`, `row` (a name in its first column), `column`, and `negated` if the file has the opposite difference

    Raises `ValueError` if the file has no such number.
    """
    columns, rows = read_csv(folder / cell["file"])
    for row in rows:
        if row[columns[0]] == cell["row"] and cell["column"] in row:
            ends = {end: row.get(cell["column"] + end, "") for end in ("", " low", " high")}
            if cell.get("negated"):
                ends = {"": negated(ends[""]), " low": negated(ends[" high"]), " high": negated(ends[" low"])}
            return {f"{title}{end}": text for end, text in ends.items()}
    raise ValueError(f"{cell['file']} has no row {cell['row']!r} with a column {cell['column']!r}")


def negated(number: str) -> str:
    """A number with the other sign and as many digits.

    >>> negated("-5.2"), negated("+0.60"), negated("")
    ('+5.2', '-0.60', '')
    """
    return f"{-float(number):+.{len(number.partition('.')[2])}f}" if number else ""


def markdown_table(columns: Sequence[str], rows: list[dict[str, str]]) -> str:
    """A table with one number per cell as Markdown, with errors and intervals in the cells of their values."""
    shown = [name for name in columns if not name.endswith(PARTS)]
    titles = [name.replace("*", "\\*") for name in shown]
    lines = [titles, ["---"] * len(shown), *([_cell(row, name) for name in shown] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(row: dict[str, str], name: str) -> str:
    """A value with its error and its interval, which stay on one line each, and typographic minus signs.

    >>> _cell({"AUC": "+1.2", "AUC ±": "0.1", "AUC low": "-0.5", "AUC high": "+2.9"}, "AUC").replace("\xa0", "_")
    '+1.2_±_0.1 (−0.5_to_+2.9)'
    """
    text = row[name]
    if error := row.get(f"{name} ±"):
        text += f"\xa0±\xa0{error}"
    if low := row.get(f"{name} low"):
        text += f" ({low}\xa0to\xa0{row[f'{name} high']})"
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text).replace("|", "\\|")
