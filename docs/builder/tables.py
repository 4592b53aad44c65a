"""Tables of options, read from the source: a field's name, type, default, and the comment beside it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Field:
    """One option: its name, its type and default as written in the source, and the comment on its line."""

    name: str
    type: str
    default: str
    note: str


def read_classes(path: Path) -> dict[str, tuple[str, list[Field]]]:
    """The docstring and the annotated fields of each class of a module."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            rows = [_field(item, lines) for item in node.body if isinstance(item, ast.AnnAssign)]
            found[node.name] = (ast.get_docstring(node) or "", [row for row in rows if not row.name.startswith("_")])
    return found


def _field(node: ast.AnnAssign, lines: list[str]) -> Field:
    default = "" if node.value is None else ast.unparse(node.value)
    if isinstance(node.value, ast.Call):  # Field(default=…, …) of pydantic
        default = next((ast.unparse(word.value) for word in node.value.keywords if word.arg == "default"), "")
    line = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
    note = line.partition("#")[2].strip() if "#" in line else ""
    return Field(
        ast.unparse(node.target), ast.unparse(node.annotation), default, "" if note.startswith("fmt:") else note
    )


def table(rows: list[Field]) -> str:
    """Fields as a Markdown table."""
    head = ["| name | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *map(_row, rows)])


def _row(row: Field) -> str:
    return f"| `{row.name}` | {_code(row.type)} | {_code(row.default)} | {_plain(row.note)} |"


def _code(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
