"""Tables of published numbers: the rows of duplex/report/quoted.yaml on a benchmark, the newest publication last."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from duplex.labels import WORLDS
from duplex.report.claims import published_rows

ENDS = {"S": "seen", "U": "unseen", "HM": "hm", "AUC": "auc"}
ARXIV = re.compile(r"arXiv (\d\d)\d\d\.\d{5}")  # its number begins with year and month


def publication_year(row: Mapping[str, Any]) -> int:
    """The year of a row: its `year`, or the one in its `venue`.

    >>> publication_year({"venue": "arXiv 2609.15649"}), publication_year({"venue": "ICCV 2025"})
    (2026, 2025)
    """
    if "year" in row:
        return int(row["year"])
    if match := ARXIV.search(row["venue"]):
        return 2000 + int(match[1])
    return int(re.findall(r"20\d\d", row["venue"])[-1])


def quoted_records(benchmark: str) -> tuple[list[str], list[dict[str, str]]]:
    """The columns, and one record per quoted result on a benchmark: the closed world, then the open one."""
    records = []
    for world in WORLDS:
        rows = [row for row in published_rows(world) if benchmark in row]
        for row in sorted(rows, key=publication_year):
            record = {"world": world, "method": row["method"], "year": str(publication_year(row))}
            record["backbone"] = row["backbone"]
            numbers = row[benchmark]
            if not isinstance(numbers, Mapping):
                numbers = dict(zip(ENDS.values(), numbers, strict=True))
            errors = dict(zip(ENDS.values(), row.get("errors", {}).get(benchmark, ()), strict=False))
            for column, key in ENDS.items():
                record[column] = f"{numbers[key]:.1f}" if key in numbers else ""
                record[f"{column} ±"] = f"{errors[key]:.1f}" if key in errors else ""
            records.append({**record, "quoted from": row.get("source", "the paper's tables")})
    return ["world", "method", "year", "backbone", *ENDS, "quoted from"], records
