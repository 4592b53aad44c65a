"""What the parts of a score are worth, each sum of them asked of one trained model (the paper's table of inference)."""

from __future__ import annotations

from duplex.report.blocks import Block, Cell, Column, Note, Row, Table
from duplex.report.numbers import TERMS
from duplex.report.results import DatasetResults, Results
from duplex.report.tables import METRICS, NUMBERS, metric_cell, ranked

NOTE = (
    "Parts of one trained model's score, asked without the others and weighed as in the whole: semantic prototypes, "
    "visual prototypes, states and objects by their prompts (factors) or by training images (primitives)."
)


def term_tables(results: Results, data: DatasetResults) -> list[Block]:
    """A table of every method whose score was measured by its parts, and what they are."""
    found: list[Block] = []
    for method, summary in data.summary.items():
        sums = {name.removeprefix(TERMS).replace("+", " + "): name for name in summary if name.startswith(TERMS)}
        if not sums:
            continue
        rows = []
        for title, name in {**sums, "all of the score": "closed"}.items():
            place = (data.name, method, name)
            cells = [metric_cell(results.metrics_file, summary[name], place, key) for key, _ in METRICS]
            rows.append(Row([Cell(title, title), *cells]))
        header = [Column("parts", numeric=False), *NUMBERS]
        caption = f"Parts of one model's score: {method}, {data.name}, closed world"
        found.append(Table(caption, header, ranked(rows, range(1, 1 + len(METRICS)))))
    return [Note(NOTE), *found] if found else []
