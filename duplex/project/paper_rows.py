"""Which rows of the paper's tables `duplex reproduce` runs on a data set, and which it trains once.

A row is a method of the project `ablations`. Its group, `main` or `readings`, is listed in
report/ablation_tables.yaml; `ablations` are the rows that a claim of report/claims.yaml compares.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from duplex.config.params import Params, published_recipes
from duplex.data.tables import LabelledImages, count_dataset
from duplex.report.claims import (
    CLIP,
    backbone_of,
    benchmark_of,
    comparisons_of,
    counts_of,
    paper_row,
    read_package_yaml,
)
from duplex.training.run import MethodSpec

RowGroup = Literal["main", "ablations", "readings", "all"]
GROUPS: tuple[RowGroup, ...] = ("main", "ablations", "readings")
NO_ENTRY = "no entry in ablations/params.yaml"
SCORE = "inference"  # the option that lists the terms of a score
TRAINED_BY = {"visual": {"visual"}, "semantic": {"semantic"}, "factors": {"state", "object"}}  # term -> losses


@dataclass(frozen=True)
class PaperRows:
    """The rows of a group: those to run, those measured in another row's run, and those left out."""

    run: tuple[str, ...]
    measured_in: Mapping[str, str] = field(default_factory=dict)  # row -> the row whose run measures it
    absent: Mapping[str, str] = field(default_factory=dict)  # row -> why it cannot be run
    sentences: Mapping[str, int] = field(default_factory=dict)  # row -> sentences of the paper that need it
    copies: Mapping[str, str] = field(default_factory=dict)  # of `measured_in`, rows with the run's own score


def benchmark_with(data: LabelledImages) -> str | None:
    """The benchmark with the data's numbers of labels and images, or None."""
    return benchmark_of(counts_of(count_dataset(data.labels, data.manifest).to_dict()))


def paper_rows(params: Params, dataset: str, data: LabelledImages, group: RowGroup) -> PaperRows:
    """The rows of a `group` on a data set.

    Of the ablations, a benchmark has the rows that the paper's tables list for it, another data set
    has all. If the paper has results with the data set's encoder, only rows with this encoder count.
    """
    encoder = params.dataset(dataset).encoder
    backbone = backbone_of(f"{encoder.name} {encoder.weights}")
    known = {name for claim in read_package_yaml("claims.yaml")["claims"] for name in claim["of"]}
    benchmark = benchmark_with(data) or (dataset if dataset in known else None)
    sentences = _sentences_by_row(params, benchmark, backbone)
    listed = read_package_yaml("ablation_tables.yaml")["groups"]
    wanted: dict[str, None] = {}
    absent: dict[str, str] = {}
    for each in GROUPS if group == "all" else (group,):
        if each == "ablations" or backbone not in (None, CLIP):  # the paper's tables have no other rows
            found, missing = _claimed(params, benchmark, backbone)
            absent |= dict.fromkeys(missing, NO_ENTRY)
        else:
            found = listed[each]
        wanted |= dict.fromkeys(found)
    for name in wanted:
        if reason := _obstacle(params, dataset, name, benchmark):
            absent[name] = reason
    names = [name for name in wanted if name not in absent]
    measured_in = shared_training(params, dataset, names)
    specs = {name: MethodSpec.of(params, dataset, name) for name in names}
    copies = {name: host for name, host in measured_in.items() if _terms(specs[name]) == _terms(specs[host])}
    for name, host in measured_in.items():
        sentences[host] = sentences.get(host, 0) + sentences.get(name, 0)
    run = tuple(name for name in names if name not in measured_in)
    return PaperRows(run, measured_in, absent, sentences, copies)


def _obstacle(params: Params, dataset: str, name: str, benchmark: str | None) -> str:
    recipe = published_recipes().get(name)
    if name not in params.methods:
        if recipe is None:
            return "no published settings"
        undecided = _undecided(recipe)
        return f"no published {undecided}" if undecided else NO_ENTRY
    if recipe is not None and benchmark and dataset not in recipe["per_dataset"]:
        return f"no published settings for {dataset}"
    return ""


def _undecided(recipe: Mapping[str, Any]) -> str:
    return " or ".join(key for key, value in recipe.get("training", {}).items() if value == "?")


def _claimed(params: Params, benchmark: str | None, backbone: str | None) -> tuple[list[str], list[str]]:
    """Methods that are rows of the claims, and rows without a method."""
    found: set[str] = set()
    absent: list[str] = []
    rows = read_package_yaml("claims.yaml")["rows"]
    for claim in _claims_on(benchmark):
        for name in _names_in(claim):
            row = rows.get(name)
            if row is None or backbone not in (None, row.get("backbone", CLIP)):
                continue
            present = [run for run in row["run"] if run in params.methods]
            if present:
                found.add(present[0])
            else:
                absent.append(row["run"][0])
    if backbone in (None, CLIP):  # the only one with rows in the open world
        found |= {name for name, entry in params.methods.items() if entry.shown_as in found}
    return [name for name in params.methods if name in found], absent


def _claims_on(benchmark: str | None) -> Iterator[dict[str, Any]]:
    for claim in read_package_yaml("claims.yaml")["claims"]:
        if benchmark in claim["of"] or (benchmark is None and not claim.get("only")):
            yield claim


def _names_in(claim: Mapping[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for line in comparisons_of(dict(claim)):
        names |= dict.fromkeys(line.names)
    return list(names)


def _sentences_by_row(params: Params, benchmark: str | None, backbone: str | None) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for claim in _claims_on(benchmark):
        for name in _names_in(claim):
            row = paper_row(name)
            present = [run for run in row["run"] if run in params.methods]
            if present and backbone in (None, row.get("backbone", CLIP)):
                counts[present[0]] += 1
    for name, entry in params.methods.items():
        if entry.shown_as is not None and entry.shown_as in counts:
            counts[name] = counts[entry.shown_as]
    return dict(counts)


def shared_training(params: Params, dataset: str, names: Sequence[str]) -> dict[str, str]:
    """Rows that need no training of their own -> the row whose run measures them.

    Both have the same training. The run's score has the row's terms, or all of them and others, each
    of which a loss trains; its evaluation measures every sum of its terms in the closed world.
    """
    specs = {name: MethodSpec.of(params, dataset, name) for name in names}
    terms = {name: _terms(specs[name]) for name in names}
    hosts: dict[str, str] = {}
    by_terms = sorted(names, key=lambda name: -len(terms[name]))  # stable: the first of equal rows is run
    for place, name in enumerate(by_terms):
        for other in by_terms[:place]:
            if other in hosts or _training(specs[name], params) != _training(specs[other], params):
                continue
            is_copy = terms[name] == terms[other] and specs[name].worlds == specs[other].worlds
            is_part = terms[name] < terms[other] and _trains_all_terms(specs[other]) and params.evaluation.terms
            if is_copy or is_part:
                hosts[name] = other
                break
    return {name: hosts[name] for name in names if name in hosts}


def _terms(spec: MethodSpec) -> frozenset[str]:
    return frozenset(getattr(spec.options, SCORE, ()))


def _training(spec: MethodSpec, params: Params) -> str:
    options = {key: value for key, value in spec.options.to_dict().items() if key != SCORE}
    tuned = None if spec.finetune is None else spec.finetune.to_dict()
    shown = params.entry(spec.name).shown_as
    record = [spec.kind, spec.trained_for, shown, options, spec.training.to_dict(), tuned]
    return json.dumps(record, sort_keys=True, default=str)


def _trains_all_terms(spec: MethodSpec) -> bool:
    losses = set(getattr(spec.options, "losses", ()))
    return all(TRAINED_BY.get(term, {term}) <= losses for term in _terms(spec))
