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
TRAINED = {  # what each method of the default run trains, and the encoder that it trains on
    "clip": ("frozen", "nothing"),
    "csp": ("frozen", "words of the prompts"),
    "cso": ("frozen", "prompts, networks"),
    "duplex": ("frozen", "prompts, networks, visual prototypes"),
    "closed_form": ("frozen", "nothing"),
    "dual": ("frozen", "prompts, networks"),
    "dual_finetuned": ("**fine-tuned**", "prompts, networks, encoder blocks"),
}
NUMBERS = {"seen": "S", "unseen": "U", "hm": "HM", "auc": "AUC"}
OPEN = {"auc": "AUC, open world", "auc_all": "all pairs", "auc_by_words": "by words"}


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
    """The Markdown table: frozen and fine-tuned encoders apart, the best AUC of each in bold."""
    columns = [key for key in OPEN if all(key in metrics[name]["open"] for name in TRAINED)]
    header = ["encoder", "method", "trains", *NUMBERS.values(), *(OPEN[key] for key in columns)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    best = max(metrics[name]["closed"]["auc"] for name, (encoder, _) in TRAINED.items() if encoder == "frozen")
    for name, (encoder, trains) in TRAINED.items():
        closed = metrics[name]["closed"]
        cells = [f"{closed[key]:.1f}" for key in NUMBERS]
        if encoder == "frozen" and closed["auc"] == best:
            cells[-1] = f"**{cells[-1]}**"
        row = [encoder, f"`{name}`", trains, *cells, *(f"{metrics[name]['open'][key]:.1f}" for key in columns)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def result_rows(metrics: dict[str, Any]) -> list[dict[str, str]]:
    """One row per method and world, with the standard error of AUC where the file has it."""
    rows = []
    for name, (encoder, _) in TRAINED.items():
        for world in ("closed", "open"):
            part = metrics[name][world]
            row = {"encoder": encoder.strip("*"), "method": name, "world": world}
            row |= {label: f"{part[key]:.1f}" for key, label in NUMBERS.items()}
            row |= {f"AUC, {OPEN[key]}": f"{part[key]:.1f}" for key in ("auc_all", "auc_by_words") if key in part}
            rows.append(row | ({"AUC ±": f"{part['auc_se']:.1f}"} if "auc_se" in part else {}))
    return rows


if __name__ == "__main__":
    main()
