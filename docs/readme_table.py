"""Write the README's table from files of docs/results: `python docs/readme_table.py`, after a new measurement."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)
FIT, SHAPES, PHOTOS = "first_minutes.csv", "shapes_splits.csv", "photos_untouched.csv"
Cell = tuple[str, str, str, str] | None  # file, its column of names, the name, the column of the AUC
ROWS: list[tuple[str, Cell, Cell]] = [
    (
        "two logistic regressions",
        (FIT, "images", "mean", "regressions: AUC"),
        (PHOTOS, "method", "linear", "closed AUC"),
    ),
    ("the paper's *Duplex*, frozen encoder", (SHAPES, "method", "duplex", "AUC"), None),
    (
        "ours, frozen encoder",
        (SHAPES, "method", "dual", "AUC"),
        (PHOTOS, "method", "dual_visual", "closed AUC"),
    ),
    (
        "ours, four blocks of the encoder trained",
        (FIT, "images", "mean", "AUC"),
        (PHOTOS, "method", "dual_visual@4", "closed AUC"),
    ),
]


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(TABLE.sub(lambda _: readme_table(), text), encoding="utf-8")


def readme_table() -> str:
    """The Markdown table: AUC in the closed world, on drawn shapes and on photographs."""
    lines = ["| | drawn shapes | photographs |", "|---|---|---|"]
    lines += [f"| {name} | {auc(shapes)} | {auc(photos)} |" for name, shapes, photos in ROWS]
    return "\n".join(lines) + "\n"


def auc(cell: Cell) -> str:
    """A method's AUC from a file of results; a dash where there is none."""
    if cell is None:
        return "–"
    file, names, name, column = cell
    with (RESULTS / file).open(encoding="utf-8", newline="") as lines:
        return next(row[column] for row in csv.DictReader(lines) if row[names] == name)


if __name__ == "__main__":
    main()
