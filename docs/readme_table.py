"""Write the table of the default run to the README and docs/results/shapes.csv.

`python docs/readme_table.py` reads artifacts/metrics.json; run it after `make repro`.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATASET = "shapes"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)
ENCODERS = {  # of the default run's methods
    "linear": "frozen",
    "clip": "frozen",
    "csp": "frozen",
    "cso": "frozen",
    "duplex": "frozen",
    "closed_form": "frozen",
    "dual": "frozen",
    "dual_finetuned": "**fine-tuned**",
}
NUMBERS = {"seen": "S", "unseen": "U", "hm": "HM", "auc": "AUC"}
OPEN = {"auc_all": "all pairs", "auc_by_words": "by words"}


def main() -> None:
    """Write both files."""
    metrics = json.loads((ROOT / "artifacts/metrics.json").read_text(encoding="utf-8"))[DATASET]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(TABLE.sub(lambda _: readme_table(metrics), text), encoding="utf-8")
    with (ROOT / "docs/results/shapes.csv").open("w", encoding="utf-8", newline="") as file:
        rows = result_rows(metrics)
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def readme_table(metrics: dict[str, Any]) -> str:
    """The Markdown table: frozen and fine-tuned encoders apart, the best AUC of the frozen ones in bold."""
    lines = ["| encoder | method | HM | AUC | AUC, open world |", "|---|---|---|---|---|"]
    best = max(metrics[name]["closed"]["auc"] for name, encoder in ENCODERS.items() if encoder == "frozen")
    for name, encoder in ENCODERS.items():
        closed = metrics[name]["closed"]
        auc = f"{closed['auc']:.1f}"
        if encoder == "frozen" and closed["auc"] == best:
            auc = f"**{auc}**"
        lines.append(f"| {encoder} | `{name}` | {closed['hm']:.1f} | {auc} | {metrics[name]['open']['auc']:.1f} |")
    return "\n".join(lines) + "\n"


def result_rows(metrics: dict[str, Any]) -> list[dict[str, str]]:
    """One row per method and world, with the standard error of AUC where the file has it."""
    rows = []
    for name, encoder in ENCODERS.items():
        for world in ("closed", "open"):
            part = metrics[name][world]
            row = {"encoder": encoder.strip("*"), "method": name, "world": world}
            row |= {label: f"{part[key]:.1f}" for key, label in NUMBERS.items()}
            row |= {f"AUC, {label}": f"{part[key]:.1f}" for key, label in OPEN.items() if key in part}
            rows.append(row | ({"AUC ±": f"{part['auc_se']:.1f}"} if "auc_se" in part else {}))
    return rows


if __name__ == "__main__":
    main()
