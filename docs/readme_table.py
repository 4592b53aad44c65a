"""Write the README's table from files of docs/results, and docs/results/shapes.csv from artifacts/metrics.json.

`python docs/readme_table.py`, after `make repro` or a new measurement.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)
DATA = ("shapes", "photographs")
FILES = {  # by encoder and whether blocks are fine-tuned, for each data set
    ("small CLIP", False): ("rivals.csv", "rivals.csv"),
    ("small CLIP", True): ("finetuned_shapes.csv", "finetuned_photos.csv"),
    ("Lite0", False): ("shapes_untouched.csv", "photos_untouched.csv"),
    ("Lite0", True): ("shapes_untouched.csv", "photos_untouched.csv"),
}
ROWS = [  # encoder; method on shapes and on photographs: the best measured published one where they differ
    ("small CLIP", "linear", "linear"),
    ("small CLIP", "troika", "scen"),
    ("small CLIP", "duplex", "duplex"),
    ("small CLIP", "dual", "dual"),
    ("small CLIP", "troika@4", "scen@4"),
    ("small CLIP", "dual@4", "dual@4"),
    ("Lite0", "linear", "linear"),
    ("Lite0", "canet", "canet"),
    ("Lite0", "dual_visual", "dual_visual"),
    ("Lite0", "kg_sp@4", "kg_sp@4"),
    ("Lite0", "dual_visual@4", "dual_visual@4"),
]
METHODS = {  # of the default run, with their encoders
    "linear": "frozen",
    "clip": "frozen",
    "csp": "frozen",
    "cso": "frozen",
    "duplex": "frozen",
    "closed_form": "frozen",
    "dual": "frozen",
    "dual_finetuned": "fine-tuned",
}
NUMBERS = {"seen": "S", "unseen": "U", "hm": "HM", "auc": "AUC"}
OTHER = {"auc_se": "AUC ±", "auc_all": "AUC, all pairs"}


def main() -> None:
    """Write both files."""
    metrics = json.loads((ROOT / "artifacts/metrics.json").read_text(encoding="utf-8"))["shapes"]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(TABLE.sub(lambda _: readme_table(), text), encoding="utf-8")
    with (RESULTS / "shapes.csv").open("w", encoding="utf-8", newline="") as file:
        rows = result_rows(metrics)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def readme_table() -> str:
    """The Markdown table: AUC in both worlds, `closed / open`, on shapes and on photographs."""
    lines = ["| encoder | method | drawn shapes | photographs |", "|---|---|---|---|"]
    for encoder, *methods in ROWS:
        files = FILES[encoder, "@" in methods[0]]
        cells = [auc_cell(*cell) for cell in zip(files, DATA, methods, strict=True)]
        names = "; ".join(f"`{name}`" for name in dict.fromkeys(methods))
        lines.append(f"| {encoder} | {names} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def auc_cell(file: str, data: str, method: str) -> str:
    """A method's AUC in the closed and the open world, from a file of results."""
    with (RESULTS / file).open(encoding="utf-8", newline="") as rows:
        row = next(row for row in csv.DictReader(rows) if (row.get("data", data), row["method"]) == (data, method))
    return f"{row['closed AUC']} / {row['open AUC']}"


def result_rows(metrics: dict[str, Any]) -> list[dict[str, str]]:
    """One row per method and world; a number that the file lacks is an empty cell."""
    rows = []
    for name, encoder in METHODS.items():
        for world in ("closed", "open"):
            part = metrics[name][world]
            row = {"encoder": encoder, "method": name, "world": world}
            row |= {label: f"{part[key]:.1f}" for key, label in NUMBERS.items()}
            row |= {label: f"{part[key]:.1f}" if key in part else "" for key, label in OTHER.items()}
            rows.append(row)
    return rows


if __name__ == "__main__":
    main()
