"""Find the runs that match rows of the paper's tables, and judge the claims of claims.yaml.

A claim is a sentence of the paper, of one or more comparisons. A run is recognised as a row by its
settings or, if the summary has none, by its name. A claim that one row is above another is judged
between runs with the same data, encoder and fine-tuned blocks; if a claim is about whole methods,
their blocks may differ. A row whose best epoch is 0 in most seeds is no evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from ruamel.yaml import YAML

from duplex.data.tables import read_benchmarks
from duplex.evaluation.metrics import METRICS, MISSING
from duplex.evaluation.vectors import unlike_published
from duplex.labels import SPLITS, WORLDS
from duplex.report.aggregate import DatasetResults, Results, Tree
from duplex.report.blocks import package_text
from duplex.report.measured import SHARED, Measured, measured_methods
from duplex.report.paired import PairedGaps
from duplex.report.verdicts import (
    NOT_COMPARABLE,
    NOT_RUN,
    UNTRAINED,
    Gap,
    MeanWithError,
    joint_verdict,
)

PAPER_SEEDS = 5  # of numbers with a standard error
CLIP = "CLIP ViT-L/14"
COSTS = {"parameters": "parameters", "peak_bytes": "memory"}
COSTS |= {"seconds_per_epoch": "epoch", "test_seconds": "test"}


@lru_cache
def read_package_yaml(name: str) -> Tree:
    """Read quoted.yaml (published numbers), claims.yaml or ablation_tables.yaml."""
    return dict(YAML(typ="safe", pure=True).load(package_text(name)))


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


def obstacle(settings: Tree | None, backbone: str, table: str = "closed") -> str:
    """Why a run cannot be compared with the paper's numbers for `backbone` in a `table`; empty if it can."""
    if settings is None:
        return "its encoder and data are not recorded"
    if backbone_of(settings["encoder"]) != backbone:
        return f"encoder {settings['encoder']}, not {backbone}"
    if benchmark_of(settings["counts"]) is None:
        return "no published data set has its numbers of states, objects, pairs and images"
    return unlike_published(settings.get("word_vectors")) if table == "open" else ""


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
    """Verdict on one comparison, for one metric; `reason`: what was compared, or why nothing was."""

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
    setting: str = ""  # data, encoder and blocks of the runs; empty if nothing was compared


@dataclass(frozen=True)
class Sentence:
    """Verdict on one sentence of the paper, from its comparisons in one setting."""

    source: str
    text: str
    parts: tuple[Judgement, ...]

    @property
    def verdict(self) -> str:
        return joint_verdict([part.verdict for part in self.parts])

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.metric for part in self.parts))


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
        return f"{text} (at most {self.claim['at_most']:g} times)" if "cost" in self.claim else text

    @property
    def title(self) -> str:
        if "gain" in self.claim:
            return "{} − {} > {} − {}".format(*self.names)
        if "equal" in self.claim or self.claim.get("near"):
            return (" ≈ " if "equal" in self.claim else " ≥ ").join(self.names)
        if "cost" in self.claim:
            return f"{self.names[0]} ≤ {self.claim['at_most']:g} × {self.names[1]}"
        if "share" in self.claim:
            return f"{self.names[0]} > {self.claim['share'][1]:g} %"
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
        is_open = "cost" in self.claim or "equal" in self.claim or benchmark in self.claim.get("contradicted", ())
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
    sides = [side if isinstance(side, list) else [side] for side in _names(claim)]
    for rows in product(*sides):
        for metric in claim["on"]:
            metrics = (metric, metric) if isinstance(metric, str) else (metric[0], metric[1])
            yield Comparison(claim, rows, tables, metrics)


def _names(claim: Tree) -> list[Any]:
    if "number" in claim:
        return [claim["number"]]
    if "share" in claim:
        return [claim["share"][0]]
    return list(next(claim[kind] for kind in ("greater", "equal", "gain", "cost") if kind in claim))


def judge_all(results: Results, data: DatasetResults) -> list[Sentence]:
    """Judge every claim on a data set, once per setting of encoder and fine-tuning."""
    candidates = measured_methods(results, data)
    benchmark = benchmark_of(counts_of(data.statistics))
    paired = PairedGaps()
    found: list[Sentence] = []
    for claim in read_package_yaml("claims.yaml")["claims"]:
        if benchmark is None or benchmark in claim["of"]:
            parts: list[Judgement] = []
            for line in comparisons_of(claim):
                parts += _judge(line, candidates, benchmark, paired)
            found += _sentences(claim, parts)
    return found


def _sentences(claim: Tree, parts: Sequence[Judgement]) -> Iterator[Sentence]:
    # comparisons that could not be made anywhere belong to each setting
    settings = dict.fromkeys(part.setting for part in parts if part.setting) or {"": None}
    for setting in settings:
        yield Sentence(claim["source"], parts[0].text, tuple(p for p in parts if p.setting in ("", setting)))


def _judge(
    line: Comparison, candidates: Sequence[Measured], benchmark: str | None, paired: PairedGaps
) -> list[Judgement]:
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
        found[name].sort(key=lambda run: run.lacks_training(line.tables[0]))  # terms of a trained one come before it
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
            setting = run.surroundings(line.tables[0])
            judged.append(judgement(verdict, reason, gap=gap, left=left, setting=setting))
        return judged
    whole = [group for group in _groups(line, found) if len(group) == len(rows)]
    if not whole:
        return [judgement(NOT_COMPARABLE, "its rows were run with different encoders, data or fine-tuned blocks")]
    return [judgement(**_order(line, group, paired)) for group in whole]


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


def _order(line: Comparison, group: Mapping[str, Measured], paired: PairedGaps) -> dict[str, Any]:
    table = line.tables[0]
    settings = group[line.names[0]].settings(table)
    shared = SHARED[:2] if line.claim.get("methods") else SHARED
    found: dict[str, Any] = {"setting": group[line.names[0]].surroundings(table, shared)}
    wanted = line.claim.get("encoder")
    if wanted and (settings is None or backbone_of(settings["encoder"]) != wanted):
        encoder = "not recorded" if settings is None else settings["encoder"]
        return {**found, "verdict": NOT_COMPARABLE, "reason": f"encoder {encoder}, not {wanted}"}
    terms = []
    for factor, name, place, metric in line.sides:
        value = group[name].value(place, metric)
        if value is not None:
            terms.append((factor, value))
    if len(terms) < 3:
        found |= dict(zip(("left", "right"), (value for _, value in terms), strict=False))
    if "share" in line.claim:
        terms.append((-1.0, MeanWithError(line.claim["share"][1], 0.0, 0)))
    gap = Gap.of(*terms)
    reason = _with(group.values(), table)
    on_images = _gap_on_images(line, group, paired)
    if on_images is not None:
        gap = on_images
        reason += "; over images and seeds"
    found |= {"reason": reason, "gap": gap}
    if "cost" not in line.claim and any(run.lacks_training(table) for run in group.values()):
        return {**found, "verdict": UNTRAINED}
    if "equal" in line.claim:
        return {**found, "verdict": gap.equality}
    return {**found, "verdict": gap.near_order if line.claim.get("near") else gap.order}


def _gap_on_images(line: Comparison, group: Mapping[str, Measured], paired: PairedGaps) -> Gap | None:
    """The difference of two rows in one closed-world metric on the same images; None for other comparisons."""
    if len(group) != 2 or line.tables != ("closed", "closed") or line.metrics[0] != line.metrics[1]:
        return None
    left, right = [group[name] for name in line.names]
    if left.part or right.part:  # of whose score terms only means were measured
        return None
    return paired.gap(left.runs, right.runs, line.metrics[0])


def number_verdict(each: Measured, row: Tree, table: str, metric: str) -> tuple[str, Gap | None, str]:
    """Compare a run's number with the paper's; returns verdict, difference and reason."""
    settings = each.settings(table)
    value = each.value(table, metric, sampled=True)
    found = obstacle(settings, row.get("backbone", CLIP), table)
    if found:
        return NOT_COMPARABLE, None, f"{each.name}: {found}"
    benchmark = benchmark_of(settings["counts"]) if settings else None
    paper = paper_value(row, table, str(benchmark), metric)
    if value is None or paper is None:
        reason = "the paper has no such number" if paper is None else "not measured"
        return NOT_COMPARABLE, None, reason
    gap = Gap.of((1.0, value), (-1.0, MeanWithError(paper.mean, 0.0, 0)))  # exact: more seeds here decide
    verdict = UNTRAINED if each.lacks_training(table) else gap.equality
    return verdict, gap, _with([each], table)


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
