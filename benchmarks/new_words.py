"""Metrics of finished runs on a data set with new words: states and objects without training images.

    duplex data split shapes --splits 1 --unseen-states 0.125 --unseen-objects 0.17
    duplex sweep --datasets shapes-words1 --methods clip,lde,csp,cso,closed_form,dual
    python -m benchmarks.new_words --csv docs/results/new_words_shapes.csv

Numbers are of the closed world, in percent, means over seeds. Groups have the accuracy at the bias with the best
harmonic mean, as OV-CZSL reports them.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from benchmarks.measure import emit, options
from duplex.artifacts import ArtifactPaths
from duplex.evaluation.metrics import METRICS

GROUPS = ("AO", "(AO)*", "A*O", "AO*", "A*O*")


def row(method: str, records: list[dict[str, Any]]) -> dict[str, str]:
    """A line of the table, from the metrics of each seed; a group without images is empty."""
    numbers = {"validation AUC": [record["val_auc"] for record in records]}
    numbers |= {title: [record["closed"][name] for record in records] for name, title in METRICS.items()}
    tables = [record["closed"].get("vocabulary", {}) for record in records]
    numbers |= {group: [table[group]["accuracy"] for table in tables if group in table] for group in GROUPS}
    for kind in ("states", "objects"):
        numbers[f"new {kind}"] = [table[kind]["new"] for table in tables if "new" in table.get(kind, {})]
    cells = {title: f"{fmean(values):.1f}" if values else "" for title, values in numbers.items()}
    return {"method": method, **cells, "seeds": str(len(records))}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dataset", default="shapes-words1")
    parser.add_argument("--methods", default="clip,lde,csp,cso,closed_form,dual")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    wanted = parser.parse_args()
    rows = []
    for method in wanted.methods.split(","):
        files = sorted(ArtifactPaths().run(wanted.dataset, method, 0).root.parent.glob("*/metrics.json"))
        rows.append(row(method, [json.loads(file.read_text(encoding="utf-8")) for file in files]))
    emit(rows)
    if wanted.csv:
        pd.DataFrame(rows).to_csv(wanted.csv, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
