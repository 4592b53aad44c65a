"""Files in pages: a line `[Table: x.csv](results/x.csv)` becomes the table, `[File: x.py](../examples/x.py)` the text.

A line `[Quoted: mit-states](../duplex/report/quoted.yaml)` becomes the table of published numbers on a benchmark.

Where the page is read without the site, the line is a link to the file.

A file has one plain number per cell. Columns that belong together are shown in one cell: `AUC`, `AUC ±`, `AUC low` and
`AUC high` as `26.2 ± 0.3 (23.3 to 29.0)`.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from docs.builder.quoted import quoted_records

DIRECTIVE = re.compile(r"^\[Table: \S+\]\((\S+\.csv)\)$", re.M)
INCLUDED = re.compile(r"^\[File: \S+\]\((\S+\.(\w+))\)$", re.M)
QUOTED = re.compile(r"^\[Quoted: (\S+)\]\((\S+\.yaml)\)$", re.M)
PARTS = (" ±", " low", " high")  # endings of columns that are shown in the cell of another column


def with_tables(markdown: str, folder: Path) -> str:
    """A page with its directives replaced by tables, each with a link to its file, and by the text of files.

    folder: the folder of the page; paths in directives are relative to it.

    Raises `FileNotFoundError` if a file is absent.
    """
    shown = INCLUDED.sub(
        lambda match: f"```{match[2]}\n{(folder / match[1]).read_text('utf-8').rstrip()}\n```", markdown
    )
    shown = QUOTED.sub(lambda match: markdown_table(*quoted_records(match[1])), shown)
    return DIRECTIVE.sub(lambda match: f"{result_table(folder / match[1])}\n\n[CSV]({match[1]})", shown)


def result_table(path: Path) -> str:
    """A CSV file as a Markdown table."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        return markdown_table(list(reader.fieldnames or ()), list(reader))


def markdown_table(columns: list[str], rows: list[dict[str, str]]) -> str:
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
