"""Write the README's table from files of docs/results: `python docs/readme_table.py`, after a new measurement."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)


@dataclass(frozen=True)
class Claim:
    """A row: what is compared, on which images, and the cell of a file that has the difference.

    `sign` is -1 if the file has the difference the other way round.
    """

    what: str
    images: str
    file: str
    method: str
    column: str
    sign: int = 1


CLAIMS = [
    Claim("ours, four trained blocks, over two regressions", "photographs", "photos_untouched.csv", "dual_visual@4",
          "linear minus it, closed", -1),
    Claim("ours, frozen encoder, over two regressions", "photographs", "photos_untouched.csv", "dual_visual",
          "linear minus it, closed", -1),
    Claim("ours, frozen encoder, over trained prompts", "drawn shapes", "shapes_splits.csv", "cso", "dual minus it"),
    Claim("the paper's graph", "drawn shapes", "shapes_splits.csv", "duplex_static", "duplex minus it"),
]  # fmt: skip


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(TABLE.sub(lambda _: readme_table(), text), encoding="utf-8")


def readme_table() -> str:
    """The Markdown table: differences of AUC in the closed world, with their intervals."""
    lines = ["| | images | AUC | 95 % interval |", "|---|---|---|---|"]
    for claim in CLAIMS:
        value, low, high = difference(claim)
        lines.append(f"| {claim.what} | {claim.images} | {value} | {low} to {high} |")
    return "\n".join(lines) + "\n"


def difference(claim: Claim) -> list[str]:
    """A difference and the ends of its interval, with typographic signs."""
    with (RESULTS / claim.file).open(encoding="utf-8", newline="") as lines:
        row = next(row for row in csv.DictReader(lines) if row["method"] == claim.method)
    cells = [row[claim.column], *sorted((row[f"{claim.column} low"], row[f"{claim.column} high"]), key=float)]
    numbers = [claim.sign * float(cell) for cell in cells]
    if claim.sign < 0:
        numbers[1:] = reversed(numbers[1:])
    return [f"{number:+.1f}".replace("-", "−") for number in numbers]


if __name__ == "__main__":
    main()
