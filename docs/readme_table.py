"""Write the README's table from files of docs/results: `python docs/readme_table.py`, after a new measurement."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)
SMALL, LITE0 = "`tiny`; small CLIP", "Lite0"
SHAPES, SHAPES_LITE0, PHOTOS_LITE0 = "methods_shapes.csv", "shapes_untouched.csv", "photos_untouched.csv"
FROZEN, TUNED = "rivals.csv", "finetuned_photos.csv"  # photographs with the small CLIP
ROWS = [  # encoder; file and method on shapes, and on photographs: the best measured published one where they differ
    (SMALL, (SHAPES, "linear"), (FROZEN, "linear")),
    (SMALL, (SHAPES, "plid"), (FROZEN, "scen")),
    (SMALL, (SHAPES, "duplex"), (FROZEN, "duplex")),
    (SMALL, (SHAPES, "dual"), (FROZEN, "dual")),
    (SMALL, (SHAPES, "dual_finetuned"), (TUNED, "dual@4")),
    *((LITE0, (SHAPES_LITE0, name), (PHOTOS_LITE0, name)) for name in ("linear", "canet", "dual_visual")),
    *((LITE0, (SHAPES_LITE0, name), (PHOTOS_LITE0, name)) for name in ("kg_sp@4", "dual_visual@4")),
]


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(TABLE.sub(lambda _: readme_table(), text), encoding="utf-8")


def readme_table() -> str:
    """The Markdown table: AUC in both worlds, `closed / open`, on shapes and on photographs."""
    lines = ["| encoder | method | drawn shapes | photographs |", "|---|---|---|---|"]
    for encoder, *cells in ROWS:
        names = "; ".join(f"`{name}`" for name in dict.fromkeys(name for _, name in cells))
        lines.append(f"| {encoder} | {names} | {' | '.join(auc_cell(*cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def auc_cell(file: str, method: str) -> str:
    """A method's AUC in the closed and the open world, from a file of results."""
    with (RESULTS / file).open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["method"] == method]
    worlds = [(row["AUC"],) if "world" in row else (row["closed AUC"], row["open AUC"]) for row in rows]
    return " / ".join(auc for row in worlds for auc in row)


if __name__ == "__main__":
    main()
