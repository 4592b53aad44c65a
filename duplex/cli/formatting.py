"""What a look at a data set found, as lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duplex.data.check import Finding


def print_findings(name: str, findings: Iterable[Finding], notes: dict[str, int], different: Iterable[str]) -> None:
    lines = [f"{'problem' if finding.problem else 'remark'}: {finding}" for finding in findings]
    lines += [f"left out or short: {what}: {count:,}" for what, count in notes.items()]
    lines += [f"differs from the published table: {line}" for line in different]
    print("\n".join(lines) or f"{name}: nothing to report")
