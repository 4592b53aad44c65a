"""Find the runs that match rows of the paper's tables, and judge the claims of claims.yaml.

A run is recognised as a row by its settings or, if the summary has none, by its name. A claim that
one row is above another is judged between runs with the same data, encoder and fine-tuned blocks;
if a claim is about whole methods, their blocks may differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Any

from ruamel.yaml import YAML

from duplex.data.tables import read_benchmarks
from duplex.evaluation.metrics import METRICS, MISSING
from duplex.labels import SPLITS, WORLDS
from duplex.report.aggregate import DatasetResults, Results, RunRecord, Tree, standard_error
from duplex.report.blocks import json_pointer, package_text

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
UNDECIDED = "undecided"
NOT_COMPARABLE = "not comparable"
NOT_RUN = "not run"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, UNDECIDED, NOT_COMPARABLE, NOT_RUN)
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706)  # 97.5 %, 1 to 5 degrees of freedom
CLOSE = 1.0  # points by which a reproduced number may differ
PAPER_SEEDS = 5  # of numbers with a standard error
CLIP = "CLIP ViT-L/14"
SHARED = ("encoder", "counts", "finetune")  # settings that both sides of a comparison share
COSTS = {"parameters": "parameters", "peak_bytes": "memory"}
COSTS |= {"seconds_per_epoch": "epoch", "test_seconds": "test"}


@lru_cache
def read_package_yaml(name: str) -> Tree:
    """Read quoted.yaml (published numbers), claims.yaml or ablation_tables.yaml."""
    return dict(YAML(typ="safe", pure=True).load(package_text(name)))


@dataclass(frozen=True)
class MeanWithError:
    """A mean over seeds; for a published number without error, `error` and `seeds` are 0."""

    mean: float
    error: float | None
    seeds: int
    source: str = ""


@dataclass(frozen=True)
class Gap:
    """A sum or difference of values; with a 95 % interval if all have a standard error."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, *terms: tuple[float, MeanWithError]) -> Gap:
        """Sum terms (factor, value); has one degree of freedom less than the fewest seeds."""
        total = math.fsum(factor * value.mean for factor, value in terms)
        freedom = min((value.seeds for _, value in terms if value.seeds), default=0) - 1
        squares = []
        for factor, value in terms:
            if value.error is not None:
                squares.append((factor * value.error) ** 2)
        if freedom < 1 or len(squares) < len(terms):
            return cls(total)
        width = t_quantile(freedom) * math.sqrt(math.fsum(squares))
        return cls(total, total - width, total + width)

    @property
    def order(self) -> str:
        """Verdict on `value` > 0, by whether the interval is above 0, below or neither."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return UNDECIDED
        return REPRODUCED if self.low > 0 else NOT_REPRODUCED

    @property
    def equality(self) -> str:
        """Verdict on `value` = 0: reproduced if the interval has 0 and |value| <= 1 point."""
        if self.order != UNDECIDED:
            return NOT_REPRODUCED
        return REPRODUCED if self.low is not None and abs(self.value) <= CLOSE else UNDECIDED

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return MISSING
        return f"{self.low:+.1f} to {self.high:+.1f}"


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, with an error below 0.1 %."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + (z**3 + z) / (4 * freedom) + second + third


@dataclass(frozen=True)
class Measured:
    """One method's results on one data set, to compare with rows of the paper's tables."""

    name: str
    dataset: str
    file: str  # the summary
    tree: Tree
    runs: Mapping[int, RunRecord] = field(default_factory=dict)

    @property
    def seeds(self) -> int:
        counts = [self.tree[world].get("seeds", 1) for world in WORLDS if world in self.tree]
        return max(map(int, counts), default=1)

    @property
    def untrained(self) -> int | None:
        """Number of seeds whose best epoch is 0; None if the summary does not tell."""
        count = self.tree.get("validation", {}).get("untrained")
        return None if count is None else int(count)

    def settings(self, table: str = "closed") -> Tree | None:
        found: Tree | None = self.tree.get(f"settings_{table}", self.tree.get("settings"))
        return found

    def value(self, table: str, metric: str, sampled: bool = False) -> MeanWithError | None:
        """Mean of a metric in a table of the summary (or `costs`); None if not measured.

        `sampled`: prefer the value by the published protocol, which samples the bias.
        """
        if table == "costs":
            return self._cost(metric)
        numbers: Tree = self.tree.get(table, {})
        ends = ["_sampled", ""] if sampled else [""]
        if table == "open":
            ends = [f"{end}_by_words" for end in ends] + ends
        key = next((metric + end for end in ends if metric + end in numbers), None)
        if key is None:
            return None
        seeds = numbers.get("seeds", self.seeds)
        error = numbers.get(f"{key}_se") if seeds > 1 else None
        source = json_pointer(self.file, self.dataset, self.name, table, key)
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

    def surroundings(self, table: str, shared: Sequence[str] = SHARED) -> str:
        """The settings named in `shared`, as JSON; if equal, results can be compared."""
        settings = self.settings(table)
        return "" if settings is None else json.dumps([settings.get(key) for key in shared])


def measured_methods(results: Results, data: DatasetResults) -> list[Measured]:
    """All methods measured: the ablations, which have more seeds, then those under `run:`."""
    is_reproduction = results.ablations_file == results.metrics_file
    ablations = {} if is_reproduction else data.ablations
    found = []
    for name, tree in ablations.items():
        found.append(Measured(name, data.name, results.ablations_file, tree))
    for name, tree in data.summary.items():
        runs = data.runs.get(name, {})
        found.append(Measured(name, data.name, results.metrics_file, tree, runs))
    return found


def paper_row(name: str) -> Tree:
    """The row `name` of claims.yaml or, for a published method, one made from quoted.yaml."""
    rows = read_package_yaml("claims.yaml")["rows"]
    if name in rows:
        return dict(rows[name])
    return {"quoted": name, **read_package_yaml("quoted.yaml")["entries"][name]}


def is_row(settings: Tree, row: Tree) -> bool:
    """Whether a run's kind and the options that distinguish rows are those of the `row`."""
    if settings["kind"] != row["kind"]:
        return False
    defaults = read_package_yaml("claims.yaml")["defaults"].get(row["kind"], {})
    wanted = {**defaults, **row.get("options", {})}
    found = {key: settings.get(key, defaults.get(key)) for key in wanted}
    return all(value == "any" or _plain(found[key]) == _plain(value) for key, value in wanted.items())


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list | tuple) else value


def runs_of(row: Tree, candidates: Sequence[Measured], *tables: str) -> list[Measured]:
    """Runs that match a `row` in all `tables`: those that it lists, then others by settings."""
    names = row.get("run", [])
    found = [each for each in candidates if each.name in names]
    found.sort(key=lambda each: names.index(each.name))
    for each in candidates:
        if each.name not in names and each.settings(tables[0]) is not None:
            found.append(each)
    return [each for each in found if all(_fits(each, row, table) for table in tables)]


def _fits(each: Measured, row: Tree, table: str) -> bool:
    """In the open world, the paper's own method must be trained for it."""
    settings = each.settings(table)
    needs_open = table == "open" and row["kind"] == "duplex"
    if needs_open and (settings is None or settings.get("world") != "open"):
        return False
    return settings is None or is_row(settings, row)


def counts_of(statistics: Tree | None) -> Tree | None:
    """Numbers of states, objects, pairs and images, as in benchmarks.yaml."""
    if statistics is None:
        return None
    counts: Tree = {key: statistics.get(key) for key in ("states", "objects")}
    for split in SPLITS:
        counts[split] = [statistics.get(split, {}).get(key) for key in ("seen", "unseen", "images")]
    return counts


def benchmark_of(counts: Tree | None) -> str | None:
    """The paper's benchmark with these `counts` (of `counts_of`); None if there is none."""
    for name, each in read_benchmarks().items():
        if "archives" in each and each["counts"] == counts:
            return str(name)
    return None


def backbone_of(encoder: str) -> str | None:
    """The paper's name for `encoder` (name and weights); None if it has no results with it."""
    known = read_package_yaml("claims.yaml")["encoders"]
    if "random:" in encoder:
        return None
    return next((name for name, start in known.items() if f"{encoder} ".startswith(start)), None)


def obstacle(settings: Tree | None, backbone: str) -> str:
    """Why a run cannot be compared with the paper's numbers for `backbone`; empty if it can."""
    if settings is None:
        return "its encoder and data are not recorded"
    if backbone_of(settings["encoder"]) != backbone:
        return f"encoder {settings['encoder']}, not {backbone}"
    if benchmark_of(settings["counts"]) is None:
        return "no published data set has its numbers of states, objects, pairs and images"
    return ""


def paper_value(row: Tree, table: str, benchmark: str, metric: str) -> MeanWithError | None:
    """One number of the paper's tables, None if missing."""
    numbers = row.get(table, {}).get(benchmark)
    errors: Sequence[float] = ()
    if numbers is None or (isinstance(numbers, Mapping) and metric not in numbers):
        wanted = row.get("quoted"), row.get("backbone", CLIP)
        numbers = None
        for each in published_rows(table):
            if (each["method"], each["backbone"]) == wanted:
                numbers = each.get(benchmark)
                errors = each.get("errors", {}).get(benchmark, ())
                break
    if numbers is None:
        return None
    if not isinstance(numbers, Mapping):
        numbers = dict(zip(METRICS, numbers, strict=True))
    if metric not in numbers:
        return None
    error = dict(zip(METRICS, errors, strict=False)).get(metric)
    return MeanWithError(numbers[metric], error or 0.0, 0 if error is None else PAPER_SEEDS)


def published_rows(table: str) -> list[Tree]:
    """All results in quoted.yaml for a world (closed, open); empty for other tables."""
    published = read_package_yaml("quoted.yaml")
    backbones = published["backbones"] if table == "closed" else ()
    return [*published[table], *published["later"][table], *backbones] if table in WORLDS else []


@dataclass(frozen=True)
class Judgement:
    """Verdict on one claim for one metric; `reason`: what was compared, or why nothing was."""

    source: str
    text: str
    rows: str
    metric: str
    paper: str
    verdict: str
    reason: str
    left: MeanWithError | None = None
    right: MeanWithError | None = None
    gap: Gap | None = None


@dataclass(frozen=True)
class Comparison:
    """One comparison of a claim: the names of its rows, and each side's table and metric."""

    claim: Tree
    names: tuple[str, ...]
    tables: tuple[str, str]
    metrics: tuple[str, str]

    @property
    def sides(self) -> list[tuple[float, str, str, str]]:
        """Terms (factor, row, table, metric) of a sum that is above zero if the claim holds."""
        is_cost = "cost" in self.claim
        factors = [1.0, -1.0, -1.0, 1.0]  # the last two of a gain
        if is_cost:
            factors = [-1.0, float(self.claim["at_most"])]
        return [
            (factor, name, self.tables[place % 2], self.metrics[place % 2])
            for place, (factor, name) in enumerate(zip(factors, self.names, strict=False))
        ]

    @property
    def text(self) -> str:
        text = str(self.claim["text"])
        if isinstance(_names(self.claim)[-1], list):  # of several rows
            return f"{text}: {self.names[1]}"
        return f"{text} (at most {self.claim['at_most']:g} times)" if "cost" in self.claim else text

    @property
    def title(self) -> str:
        if "gain" in self.claim:
            return "{} − {} > {} − {}".format(*self.names)
        if "cost" in self.claim:
            return f"{self.names[0]} ≤ {self.claim['at_most']:g} × {self.names[1]}"
        return " > ".join(dict.fromkeys(self.names))

    def paper(self, benchmark: str) -> str:
        """The paper's own numbers on a benchmark, as text such as `21.7 > 20.1`."""
        values = []
        for _, name, table, key in self.sides:
            values.append(paper_value(paper_row(name), table, benchmark, key))
        numbers = [value.mean for value in values if value is not None]
        if len(numbers) < len(values):
            return MISSING
        if "gain" in self.claim:
            return f"{numbers[0] - numbers[1]:.1f} > {numbers[2] - numbers[3]:.1f}"
        if "number" in self.claim:
            error = values[0].error if values[0] is not None and values[0].seeds else None
            end = "(no error given)" if error is None else f"± {error:.1f}"
            return f"{numbers[0]:.1f} {end}"
        is_open = "cost" in self.claim or benchmark in self.claim.get("contradicted", ())
        mark = " v " if is_open else " > "
        return mark.join(format_number(self.metrics[0], number) for number in numbers)


def format_number(metric: str, number: float) -> str:
    if metric == "parameters":
        return f"{1e-6 * number:.1f} M"
    if metric == "peak_bytes":
        return f"{1e-9 * number:.1f} GB"
    return f"{number:.0f} s" if metric in COSTS else f"{number:.1f}"


def comparisons_of(claim: Tree) -> Iterator[Comparison]:
    """Split a claim into one comparison per metric and, if it lists several, per row."""
    places = claim.get("in", "costs" if "cost" in claim else "closed")
    tables = (places, places) if isinstance(places, str) else (places[0], places[1])
    first, *others = _names(claim)
    lowers = others[0] if others and isinstance(others[0], list) else None
    for rows in [(first, *others)] if lowers is None else [(first, lower) for lower in lowers]:
        for metric in claim["on"]:
            metrics = (metric, metric) if isinstance(metric, str) else (metric[0], metric[1])
            yield Comparison(claim, rows, tables, metrics)


def _names(claim: Tree) -> list[Any]:
    if "number" in claim:
        return [claim["number"]]
    return list(next(claim[kind] for kind in ("greater", "gain", "cost") if kind in claim))


def judge_all(results: Results, data: DatasetResults) -> list[Judgement]:
    """Judge every claim on a data set, per metric and setting of encoder and fine-tuning."""
    candidates = measured_methods(results, data)
    benchmark = benchmark_of(counts_of(data.statistics))
    found: list[Judgement] = []
    for claim in read_package_yaml("claims.yaml")["claims"]:
        if benchmark is None or benchmark in claim["of"]:
            for line in comparisons_of(claim):
                found += _judge(line, candidates, benchmark)
    return found


def _judge(line: Comparison, candidates: Sequence[Measured], benchmark: str | None) -> list[Judgement]:
    claim = line.claim
    shown = [benchmark] if benchmark else claim["of"]
    paper = "; ".join(f"{name} {line.paper(name)}" for name in shown)
    metric = " > ".join(dict.fromkeys({**METRICS, **COSTS}.get(name, name) for name in line.metrics))
    contradicted = [name for name in shown if name in claim.get("contradicted", ())]
    start = f"the paper's numbers on {' and '.join(contradicted)} contradict it; " if contradicted else ""

    def judgement(verdict: str, reason: str, **numbers: Any) -> Judgement:
        texts = (claim["source"], line.text, line.title, metric, paper)
        return Judgement(*texts, verdict, start + reason, **numbers)

    if claim.get("only") and benchmark is None:
        return [judgement(NOT_COMPARABLE, f"said of {' and '.join(claim['of'])} alone")]
    rows = {name: paper_row(name) for name in line.names}
    found = {}
    for name, row in rows.items():
        wanted = [(table, metric) for _, other, table, metric in line.sides if other == name]
        runs = runs_of(row, candidates, *line.tables)
        found[name] = [run for run in runs if all(run.value(*place) for place in wanted)]
    missing = [name for name, runs in found.items() if not runs]
    if missing:
        return [judgement(NOT_RUN, ", ".join(missing))]
    if "number" in claim:
        (name,) = line.names
        place = (line.tables[0], line.metrics[0])
        judged = []
        for run in _one_per_setting(line, found[name]):
            verdict, gap, reason = number_verdict(run, rows[name], *place)
            left = run.value(*place, sampled=True)
            judged.append(judgement(verdict, reason, gap=gap, left=left))
        return judged
    whole = [group for group in _groups(line, found) if len(group) == len(rows)]
    if not whole:
        return [judgement(NOT_COMPARABLE, "its rows were run with different encoders, data or fine-tuned blocks")]
    return [judgement(**_order(line, group)) for group in whole]


def _groups(line: Comparison, found: Mapping[str, Sequence[Measured]]) -> list[dict[str, Measured]]:
    # of comparable runs, each row -> run: equal data, encoder and blocks (any blocks for methods)
    groups: dict[str, dict[str, Measured]] = {}
    if line.claim.get("methods"):
        first, *others = found
        table = line.tables[0]
        for left in _one_per_setting(line, found[first]):
            group = groups.setdefault(left.name, {first: left})
            place = left.surroundings(table, SHARED[:2])
            for name in others:
                for each in found[name]:
                    if each.surroundings(table, SHARED[:2]) == place:
                        group[name] = each
                        break
        return list(groups.values())
    for name, runs in found.items():
        for each in runs:
            groups.setdefault(each.surroundings(line.tables[0]), {}).setdefault(name, each)
    return list(groups.values())


def _one_per_setting(line: Comparison, runs: Sequence[Measured]) -> list[Measured]:
    first: dict[str, Measured] = {}
    for each in runs:
        first.setdefault(each.surroundings(line.tables[0]), each)
    return list(first.values())


def _order(line: Comparison, group: Mapping[str, Measured]) -> dict[str, Any]:
    settings = group[line.names[0]].settings(line.tables[0])
    wanted = line.claim.get("encoder")
    if wanted and (settings is None or backbone_of(settings["encoder"]) != wanted):
        encoder = "not recorded" if settings is None else settings["encoder"]
        return {"verdict": NOT_COMPARABLE, "reason": f"encoder {encoder}, not {wanted}"}
    terms = []
    for factor, name, table, metric in line.sides:
        value = group[name].value(table, metric)
        if value is not None:
            terms.append((factor, value))
    gap = Gap.of(*terms)
    numbers = {"left": terms[0][1], "right": terms[1][1]} if len(terms) == 2 else {}
    return {"verdict": gap.order, "reason": _with(group.values(), line.tables[0]), "gap": gap, **numbers}


def number_verdict(each: Measured, row: Tree, table: str, metric: str) -> tuple[str, Gap | None, str]:
    """Compare a run's number with the paper's; returns verdict, difference and reason."""
    settings = each.settings(table)
    value = each.value(table, metric, sampled=True)
    found = obstacle(settings, row.get("backbone", CLIP))
    if found:
        return NOT_COMPARABLE, None, f"{each.name}: {found}"
    benchmark = benchmark_of(settings["counts"]) if settings else None
    paper = paper_value(row, table, str(benchmark), metric)
    if value is None or paper is None:
        reason = "the paper has no such number" if paper is None else "not measured"
        return NOT_COMPARABLE, None, reason
    gap = Gap.of((1.0, value), (-1.0, paper))
    return gap.equality, gap, _with([each], table)


def _with(used: Iterable[Measured], table: str) -> str:
    runs = list(used)
    settings = runs[0].settings(table)
    seeds = min(each.tree.get(table, {}).get("seeds", each.seeds) for each in runs)
    encoder = "encoder not recorded" if settings is None else settings["encoder"]
    tuned = ", fine-tuned blocks" if settings and settings.get("finetune") else ""
    # in the closed world's run
    same = [each for each in runs if table != "open" or "settings_open" not in each.tree]
    untrained = []
    for each in same:
        if each.untrained:
            untrained.append(f"{each.name} untrained in {each.untrained} of {each.seeds}")
    names = ", ".join(dict.fromkeys(each.name for each in runs))
    over = f"{seeds} {'seed' if seeds == 1 else 'seeds'}, {encoder}{tuned}"
    return "; ".join([names, over, *untrained])
