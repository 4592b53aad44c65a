"""Write the verdicts on the paper's sentences as a table: python -m benchmarks.claims --csv FILE

Reads what `duplex reproduce` wrote for a data set (`--dataset`, default: shapes), with seeds 0, 1, ... Sentences of
which no comparison could be made are left out.
"""

from __future__ import annotations

from collections import Counter
from contextlib import chdir
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.measure import emit, options, say, write_csv
from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.errors import UsageError
from duplex.project.report import read_results
from duplex.report.aggregate import stored_numbers
from duplex.report.claims import Sentence, judge_all
from duplex.report.verdicts import NOT_COMPARABLE, NOT_RUN

ABLATIONS = Path("ablations")  # the project of the paper's rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dataset", default="shapes")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    given = parser.parse_args()
    with chdir(ABLATIONS):
        table = judged(given.dataset)
    write_csv(table, given.csv)
    emit(table) if given.json else say(pd.DataFrame(table).to_string(index=False))


def judged(dataset: str) -> list[dict[str, Any]]:
    """A row for each sentence of which a comparison was made, in the project of this folder."""
    paths = ArtifactPaths().of_reproduction(dataset)
    summary = stored_numbers(paths.summary)
    if summary is None:
        raise UsageError(f"{paths.summary} does not exist; `duplex reproduce {dataset} --rows all` writes it")
    params = load_params()
    methods = tuple(name for name in summary[dataset] if name in params.methods)
    counts = [tree["closed"].get("seeds", 1) for tree in summary[dataset].values() if "closed" in tree]
    seeds = tuple(range(int(max(counts))))
    run = params.run.model_copy(update={"datasets": (dataset,), "methods": methods, "seeds": seeds})
    results = read_results(params.model_copy(update={"run": run}), summary, paths)
    (data,) = results.datasets
    return [row_of(each) for each in judge_all(results, data) if each.verdict not in (NOT_COMPARABLE, NOT_RUN)]


def row_of(sentence: Sentence) -> dict[str, Any]:
    counts = Counter(part.verdict for part in sentence.parts)
    return {
        "source": sentence.source,
        "statement": sentence.text,
        "metrics": ", ".join(sentence.metrics),
        "verdict": sentence.verdict,
        "comparisons": ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())),
    }


if __name__ == "__main__":
    main()
