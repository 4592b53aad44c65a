"""Write the test results of `make ablations` or `duplex reproduce` as one table: python -m benchmarks.ablation_table

Reads a summary (default: ablations/artifacts/summary.json; `duplex reproduce` writes one beside its page) and the
report's list of tables; writes a table (default: docs/results/ablations.csv). A row of several tables of the paper is
written once, in the first. `untrained`: the seeds whose best epoch is the start.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from duplex.report.claims import read_package_yaml

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = ROOT / "ablations" / "artifacts" / "summary.json"
TABLE = ROOT / "docs" / "results" / "ablations.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path, nargs="?", default=SUMMARY)
    parser.add_argument("--csv", type=Path, default=TABLE)
    given = parser.parse_args()
    runs = json.loads(given.summary.read_text(encoding="utf-8"))["shapes"]
    rows_of(runs, read_package_yaml("ablation_tables.yaml")["tables"]).to_csv(given.csv, index=False)


def rows_of(runs: dict[str, Any], tables: list[dict[str, Any]]) -> pd.DataFrame:
    """A row for each run, in the order of the paper's tables; runs of no table come last."""
    sources: dict[str, str] = {}
    for table in tables:
        for row in table["rows"]:
            name = row["run"][0]
            sources.setdefault(name, table["source"])
    order = sorted(runs, key=lambda name: list(sources).index(name) if name in sources else len(sources))
    records = []
    for name in order:
        record: dict[str, Any] = {"paper": sources.get(name, "–"), "run": name}
        for world in ("closed", "open"):
            if world in runs[name]:
                for metric, title in (("auc", "AUC"), ("auc_se", "±"), ("hm", "HM")):
                    record[f"{world}: {title}"] = f"{runs[name][world][metric]:.1f}"
        record["untrained"] = runs[name]["validation"]["untrained"]
        records.append(record)
    return pd.DataFrame(records)


if __name__ == "__main__":
    main()
