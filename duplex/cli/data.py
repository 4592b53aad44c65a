"""`duplex data`: list, count, check and download data sets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duplex.cli import app
from duplex.cli.formatting import issue_lines, print_json
from duplex.cli.options import AsJson, load_params
from duplex.errors import UsageError, require

if TYPE_CHECKING:
    from duplex.data.check import DataIssue
    from duplex.data.dataset import LabelledImages
    from duplex.data.source_options import SourceOptions
    from duplex.labels import LabelSpace

Name = Annotated[str, typer.Argument(help="A data set of params.yaml, or any name with --root.")]
Root = Annotated[Path | None, typer.Option(help="Folder or table of a data set that is not in params.yaml.")]

group = typer.Typer(no_args_is_help=True, help="Data sets: list, check, count, download, add your own.")
app.add_typer(group, name="data")


@group.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the data sets of params.yaml, and whether their images are on disk."""
    from duplex.data.dataset_source import is_on_disk
    from duplex.data.mirrors import BENCHMARKS

    rows = []
    for name, (source, _) in _known().items():
        on_disk = is_on_disk(source) or source.kind == "shapes"
        rows.append({"name": name, "kind": source.kind, "root": str(source.root), "on_disk": on_disk})
        if not as_json:
            command = f"; duplex data download {name}" if name in BENCHMARKS else ""
            print(f"{name:<16}{source.kind:<10}{source.root}  ({'on disk' if on_disk else f'absent{command}'})")
    if as_json:
        print_json(rows)


@group.command()
def stats(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Print the number of pairs and images per split, and the shares of images with frequent and with rare pairs."""
    from duplex.data.stats import count_dataset, statistics_text

    labels, dataset = _load(*_source(name, root))
    counts = count_dataset(labels, dataset.manifest if dataset else None)
    if as_json:
        print_json(counts.to_dict())
    else:
        print(statistics_text(name, counts))


@group.command()
def check(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Open every image of a data set and check its lists, labels and splits. Exits with 1 if there is a problem."""
    from duplex.data.check import check_dataset
    from duplex.data.dataset_source import ensure_images
    from duplex.data.stats import count_dataset, published_differences

    source, features = _source(name, root)
    labels, dataset = _load(source, features)
    if dataset is None:
        _log(f"{source.root} has no metadata file; only the pair lists are checked")
        issues: list[DataIssue] = []
    else:
        ensure_images(source, dataset.manifest)
        issues = check_dataset(dataset, source.root)
    differences = published_differences(name, count_dataset(labels, dataset.manifest if dataset else None))
    notes = dataset.notes if dataset else {}
    if as_json:
        findings = [dataclasses.asdict(issue) for issue in issues]
        print_json({"findings": findings, "notes": notes, "published": differences})
    else:
        print(issue_lines(name, issues, notes, differences))
    if differences or any(issue.problem for issue in issues):
        raise typer.Exit(1)


@group.command()
def download(
    name: Annotated[str, typer.Argument(help="Benchmark to download: mit-states, ut-zappos or cgqa.")],
    to: Annotated[
        Path | None, typer.Option(help="Folder to write; default: the root of NAME in params.yaml, or data/NAME.")
    ] = None,
) -> None:
    """Download a benchmark and unpack it. The same command resumes an interrupted download."""
    from duplex.data.download import download as fetch
    from duplex.data.mirrors import BENCHMARKS

    require(name, BENCHMARKS, "benchmark")
    known = _known() if Path("params.yaml").exists() else {}
    root = to or (known[name][0].root if name in known else Path("data") / name)
    fetch(name, root, _log)
    _log(f"{name} is in {root}; `duplex data check {name} --root {root}` checks that every image can be read")


def _known() -> dict[str, tuple[SourceOptions, Path | None]]:
    """Return the source and the file of features, if any, of each data set of params.yaml."""
    return {name: (entry.source, entry.features) for name, entry in load_params().datasets.items()}


def _source(name: str, root: Path | None) -> tuple[SourceOptions, Path | None]:
    from duplex.data.dataset_source import detect_source

    if root is not None:
        return detect_source(root), None
    known = _known()
    if name not in known:
        raise UsageError(
            f"params.yaml has no data set {name!r} (it has {', '.join(known)}); give --root PATH, "
            f"or add it with `duplex data add {name} PATH`"
        )
    return known[name]


def _load(source: SourceOptions, features: Path | None) -> tuple[LabelSpace, LabelledImages | None]:
    """Return a data set's labels and its labelled images. features: file of features that decide on its split.

    None takes the place of the images for a benchmark of which only the pair lists are on disk.
    """
    from duplex.data.czsl_layout import METADATA, has_pair_lists, read_pair_lists
    from duplex.data.dataset_source import load_source
    from duplex.features.feature_file import feature_keys

    if source.kind == "standard" and has_pair_lists(source.root) and not (source.root / METADATA).exists():
        return read_pair_lists(source.root).labels(), None
    dataset = load_source(source, feature_keys(features, source))
    return dataset.labels, dataset


def _log(text: str) -> None:
    typer.echo(text, err=True)
