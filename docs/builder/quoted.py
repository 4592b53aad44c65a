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


def contradiction(numbers: Mapping[str, float]) -> str:
    """What is impossible in rounded S, U, HM and AUC of one curve, as the end of a sentence.

        HM <= 2 S U / (S + U),    AUC >= HM^2 / 100   (the rectangle below the best point of a falling curve)

    >>> contradiction({"seen": 26.6, "unseen": 2.9, "hm": 6.4, "auc": 0.7})
    ', where HM is too high for S and U'
    >>> contradiction({"seen": 64.5, "unseen": 71.5, "hm": 60.5, "auc": 33.5})
    ', where HM is too high for AUC'
    """
    if not numbers.keys() >= set(ENDS.values()):
        return ""
    s, u, hm, auc = (numbers[key] + 0.05 for key in ENDS.values())
    lowest = hm - 0.1
    if lowest > 2 * s * u / (s + u):
        return ", where HM is too high for S and U"
    return ", where HM is too high for AUC" if lowest**2 / 100 > auc else ""


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
            source = row.get("source", "the paper's tables") + contradiction(numbers)
            records.append({**record, "quoted from": source})
    return ["world", "method", "year", "backbone", *ENDS, "quoted from"], records
