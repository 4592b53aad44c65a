"""The results of each method of a report, as they are compared with the rows of the paper's tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from duplex.labels import WORLDS
from duplex.report.aggregate import TERMS, DatasetResults, Results, RunRecord, Tree, standard_error
from duplex.report.blocks import json_pointer
from duplex.report.verdicts import MeanWithError

AMONG_THREE = "among_three"  # share of wrong answers whose label is the second or the third, in percent
SHARED = ("encoder", "counts", "finetune")  # settings that both sides of a comparison share


@dataclass(frozen=True)
class Measured:
    """One method's results on one data set, to compare with rows of the paper's tables."""

    name: str
    dataset: str
    file: str  # the summary
    tree: Tree
    runs: Mapping[int, RunRecord] = field(default_factory=dict)
    part: str = ""  # table of the summary with some score terms of the method; empty: all terms

    @property
    def seeds(self) -> int:
        counts = [self.tree[world].get("seeds", 1) for world in WORLDS if world in self.tree]
        return max(map(int, counts), default=1)

    @property
    def untrained(self) -> int | None:
        """Number of seeds whose best epoch is 0; None if the summary does not tell."""
        count = self.tree.get("validation", {}).get("untrained")
        return None if count is None else int(count)

    def lacks_training(self, table: str) -> bool:
        """Whether most seeds in a `table` kept the untrained model, although there was a loss to train."""
        has_own_run = table == "open" and "settings_open" in self.tree  # `validation` is of the other
        settings = self.settings(table) or {}
        if has_own_run or settings.get("losses") == []:
            return False
        return 2 * (self.untrained or 0) > self.seeds

    def settings(self, table: str = "closed") -> Tree | None:
        found: Tree | None = self.tree.get(f"settings_{table}", self.tree.get("settings"))
        return found

    def value(self, table: str, metric: str, sampled: bool = False) -> MeanWithError | None:
        """Mean of a metric in a table of the summary (or `costs`); None if not measured.

        `sampled`: prefer the value by the published protocol, which samples the bias.
        """
        if table == "costs":
            return self._cost(metric)
        if metric == AMONG_THREE:
            return self._labels_among_three(table)
        numbers: Tree = self.tree.get(table, {})
        ends = ["_sampled", ""] if sampled else [""]
        if table == "open":
            ends = [f"{end}_by_words" for end in ends] + ends
        key = next((metric + end for end in ends if metric + end in numbers), None)
        if key is None:
            return None
        seeds = numbers.get("seeds", self.seeds)
        error = numbers.get(f"{key}_se") if seeds > 1 else None
        source = json_pointer(self.file, self.dataset, self.name, self.part or table, key)
        return MeanWithError(numbers[key], error, seeds, source)

    def _cost(self, metric: str) -> MeanWithError | None:
        part = "evaluation_timing" if metric == "test_seconds" else "timing"
        found = [run for run in self.runs.values() if metric in getattr(run, part)]
        if not found:
            return None
        numbers = [float(getattr(run, part)[metric]) for run in found]
        error = standard_error(numbers) if len(numbers) > 1 else None
        sources = " ".join(json_pointer(run.files[part], metric) for run in found)
        return MeanWithError(fmean(numbers), error, len(numbers), sources)

    def _labels_among_three(self, world: str) -> MeanWithError | None:
        shares = []
        sources = []
        for run in self.runs.values():
            if run.predictions is not None:
                rows = run.predictions[run.predictions["world"] == world]
                wrong = rows[rows["label"] != rows["top1"]]
                if len(wrong):
                    shares.append(100 * float(wrong["top2"].eq(wrong["label"]).mean()))
                    shares[-1] += 100 * float(wrong["top3"].eq(wrong["label"]).mean())
                    sources.append(run.files["predictions"])
        if not shares:
            return None
        error = standard_error(shares) if len(shares) > 1 else None
        return MeanWithError(fmean(shares), error, len(shares), " ".join(sources))

    def surroundings(self, table: str, shared: Sequence[str] = SHARED) -> str:
        """The settings named in `shared`, as JSON; if equal, results can be compared."""
        settings = self.settings(table)
        return "" if settings is None else json.dumps([settings.get(key) for key in shared])


def measured_methods(results: Results, data: DatasetResults) -> list[Measured]:
    """All methods measured: the ablations, which have more seeds, those under `run:`, then parts of their scores."""
    is_reproduction = results.ablations_file == results.metrics_file
    ablations = {} if is_reproduction else data.ablations
    found = []
    for name, tree in ablations.items():
        found.append(Measured(name, data.name, results.ablations_file, tree))
    for name, tree in data.summary.items():
        same = [other for other, its in data.summary.items() if its == tree]  # a row measured in another's run
        runs = next((data.runs[other] for other in (name, *same) if data.runs.get(other)), {})
        found.append(Measured(name, data.name, results.metrics_file, tree, runs))
    for each in tuple(found):
        found += _parts_of_score(each)
    return found


def _parts_of_score(each: Measured) -> Iterator[Measured]:
    """A method's results with some of its score terms, as those of a method that has only these."""
    settings = each.settings()
    for table in each.tree:
        if table.startswith(TERMS) and settings is not None:
            terms = table.removeprefix(TERMS).split("+")
            tree = {"closed": each.tree[table], "validation": each.tree.get("validation", {})}
            tree["settings"] = {**settings, "inference": terms}
            yield replace(each, tree=tree, part=table)
