"""`duplex data ...`: what is there, what is wrong with it, where to get it, and how to bring one's own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli.formatting import print_findings
from duplex.cli.own_data import add, remove, split
from duplex.errors import UsageError

if TYPE_CHECKING:
    from duplex.data.check import Finding
    from duplex.data.dataset import Dataset
    from duplex.data.source import Source
    from duplex.labels import LabelSpace

PARAMS = Path("params.yaml")
Name = Annotated[str, typer.Argument(help="a data set of params.yaml, or any name with --root")]
Root = Annotated[Path | None, typer.Option(help="a folder or table that params.yaml does not know")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]

group = typer.Typer(no_args_is_help=True, help="Data sets: list, check, count, download, add your own.")


def register(app: typer.Typer) -> None:
    group.command("add")(add)
    group.command("split")(split)
    group.command("remove")(remove)
    app.add_typer(group, name="data")


@group.command("list")
def list_(as_json: Json = False) -> None:
    """The data sets that params.yaml knows, and whether their pictures are there."""
    from duplex.data.mirrors import BENCHMARKS
    from duplex.data.source import are_there

    rows = []
    for name, source in _known().items():
        there = are_there(source) or source.kind == "shapes"
        how = "there" if there else "absent" + (f"; duplex data download {name}" if name in BENCHMARKS else "")
        rows.append({"name": name, "kind": source.kind, "root": str(source.root), "there": there, "how": how})
    if as_json:
        _print_json([{key: row[key] for key in ("name", "kind", "root", "there")} for row in rows])
        return
    for row in rows:
        print(f"{row['name']:<16}{row['kind']:<10}{row['root']}  ({row['how']})")


@group.command()
def stats(name: Name, root: Root = None, as_json: Json = False) -> None:
    """The paper's row of statistics, and the shares of frequent and rare compositions."""
    from duplex.data.stats import statistics, statistics_text

    labels, dataset = _load(_source(name, root))
    counted = statistics(labels, dataset.manifest if dataset else None)
    if as_json:
        _print_json(counted.to_dict())
    else:
        print(statistics_text(name, counted))


@group.command()
def check(name: Name, root: Root = None, as_json: Json = False) -> None:
    """Open every picture and compare lists, labels and splits. Exits with 1 if there is a problem."""
    from duplex.data.check import check_dataset
    from duplex.data.published import differences
    from duplex.data.source import ensure_pictures
    from duplex.data.stats import statistics

    source = _source(name, root)
    labels, dataset = _load(source)
    if dataset is None:
        _say("no metadata there: only the pair lists are checked")
        findings: list[Finding] = []
    else:
        ensure_pictures(source, dataset.manifest)
        findings = check_dataset(dataset, source.root)
    different = differences(name, statistics(labels, dataset.manifest if dataset else None))
    notes = dataset.notes if dataset else {}
    if as_json:
        _print_json({"findings": [dataclasses.asdict(f) for f in findings], "notes": notes, "published": different})
    else:
        print_findings(name, findings, notes, different)
    if different or any(finding.problem for finding in findings):
        raise typer.Exit(1)


@group.command()
def download(
    name: Annotated[str, typer.Argument(help="mit-states, ut-zappos or cgqa")],
    to: Annotated[Path | None, typer.Option(help="the data root to fill; params.yaml's by default")] = None,
) -> None:
    """Fetch a benchmark and unpack it; a transfer that broke off is continued."""
    from duplex.data.download import download as fetch
    from duplex.data.mirrors import BENCHMARKS
    from duplex.errors import require

    require(name, BENCHMARKS, "benchmark")
    known = _known() if PARAMS.exists() else {}
    root = to or (known[name].root if name in known else Path("data") / name)
    fetch(name, root, _say)
    _say(f"{name} is in {root}; `duplex data check {name} --root {root}` opens every picture")


def _known() -> dict[str, Source]:
    from duplex.config.params import load_params

    return {name: entry.source for name, entry in load_params(PARAMS).datasets.items()}


def _source(name: str, root: Path | None) -> Source:
    from duplex.data.source import detect_source

    if root is not None:
        return detect_source(root)
    known = _known()
    if name not in known:
        raise UsageError(
            f"params.yaml has no data set {name!r} (it has {', '.join(known)}); give --root PATH, "
            f"or add it with `duplex data add {name} PATH`"
        )
    return known[name]


def _load(source: Source) -> tuple[LabelSpace, Dataset | None]:
    """Labels and rows; labels alone where only a benchmark's pair lists are at hand."""
    from duplex.data.czsl_layout import METADATA
    from duplex.data.pair_lists import has_pair_lists, read_pair_lists
    from duplex.data.source import load_source

    if source.kind == "standard" and has_pair_lists(source.root) and not (source.root / METADATA).exists():
        return read_pair_lists(source.root).labels(), None
    dataset = load_source(source)
    return dataset.labels, dataset


def _print_json(record: Any) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False))


def _say(text: str) -> None:
    typer.echo(text, err=True)
