"""`duplex data add` and `remove`: pictures of one's own, checked at the door, into params.yaml and out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli.formatting import print_findings
from duplex.data.split_options import SplitOptions
from duplex.errors import DuplexError, UsageError
from duplex.system.script import LARGEST_SEED

if TYPE_CHECKING:
    from duplex.config.params import DatasetParams, EncoderParams
    from duplex.data.check import Finding
    from duplex.data.dataset import Dataset
    from duplex.data.source import Source
    from duplex.labels import LabelSpace

ENCODER, WEIGHTS = "ViT-L-14-quickgelu", "openai"  # the paper's
TRAINING = {"learning_rate": 0.0001, "batch_size": 64, "epochs": 15}


def add(
    name: Annotated[str, typer.Argument(help="what the data set will be called")],
    path: Annotated[Path, typer.Argument(help="a folder of pictures, a CSV or Parquet table, or a benchmark's folder")],
    images: Annotated[Path | None, typer.Option(help="for a table: the folder its image paths start from")] = None,
    split_seed: Annotated[
        int | None, typer.Option(min=0, max=LARGEST_SEED, help=f"seed of the split to be made [{SplitOptions.seed}]")
    ] = None,
    val_unseen: Annotated[
        float | None, typer.Option(help=f"share of the pairs held out for validation [{SplitOptions.val_unseen}]")
    ] = None,
    test_unseen: Annotated[
        float | None, typer.Option(help=f"share of the pairs held out for test [{SplitOptions.test_unseen}]")
    ] = None,
    val_images: Annotated[
        float | None, typer.Option(help=f"share of the seen pairs' images for validation [{SplitOptions.val_images}]")
    ] = None,
    test_images: Annotated[
        float | None, typer.Option(help=f"share of the seen pairs' images for test [{SplitOptions.test_images}]")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help=f"the frozen encoder [{ENCODER}]; tiny knows only the drawn benchmark's words")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="its weights: a tag or a file")] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="do not add it to run.datasets")] = False,
) -> None:
    """Check pictures of your own, print their statistics, and write what params.yaml needs.

    A data set that is there keeps what no option changes. Exits with 1 if there is a problem.
    """
    from duplex.cli.params_file import add_dataset, check_name
    from duplex.config.params import load_params
    from duplex.data.check import check_dataset
    from duplex.data.published import differences
    from duplex.data.stats import statistics, statistics_text

    check_name(name)
    known = load_params().datasets.get(name)
    asked = {"seed": split_seed, "val_unseen": val_unseen, "test_unseen": test_unseen}
    asked |= {"val_images": val_images, "test_images": test_images}
    split = _split(asked, known)
    chosen = _encoder(encoder, weights, known)
    source, dataset = _found(path, images, split)
    if not dataset.made_split and any(value is not None for value in asked.values()):
        raise UsageError(f"{path} comes with its split; leave out what says how to make one")
    counted = statistics(dataset.labels, dataset.manifest)
    findings = [*_encoder_findings(chosen, dataset.labels), *check_dataset(dataset, source.root)]
    print_findings(name, findings, dataset.notes, differences(name, counted))
    print(statistics_text(name, counted))
    if fatal := next((finding for finding in findings if finding.fatal), None):
        raise DuplexError(f"{name} is not added: {fatal}")
    entry = {"source": _source_record(source, split if dataset.made_split else None)}
    if known is None or encoder is not None or weights is not None:
        entry["encoder"] = chosen
    add_dataset(name, entry if known else {**entry, "training": TRAINING}, run=not no_run)
    what = f"; its {' and '.join(entry)} changed, the rest stays" if known else ""
    typer.echo(f"params.yaml has {name}{what}; `dvc repro` runs it{' once run.datasets names it' * no_run}", err=True)
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


def split(
    name: Annotated[str, typer.Argument(help="a data set of params.yaml")],
    splits: Annotated[int, typer.Option(min=1, max=100, help="how many: NAME-split1 and so on")] = 5,
    no_run: Annotated[bool, typer.Option("--no-run", help="do not add them to run.datasets")] = False,
) -> None:
    """Splits of a data set, each a data set of its own: which pairs are unseen is drawn anew, as many as before.

    They keep its pictures, encoder and training; features are copied where it has been extracted.
    """
    from duplex.cli.params_file import add_dataset, check_name
    from duplex.config.params import load_params
    from duplex.data.resplit import resplit, split_name
    from duplex.data.source import load_source

    params = load_params()
    base = params.dataset(name)
    if base.source.resplit is not None:
        raise UsageError(f"{name} is a split itself; split the data set that it is of")
    check_name(split_name(name, splits))
    for number in range(1, splits + 1):
        there = params.datasets.get(split_name(name, number))
        if there is not None and there.source != base.source.model_copy(update={"resplit": number}):
            raise UsageError(f"{split_name(name, number)} is there and no such split of {name}; give it another name")
    data = load_source(base.source)
    drawn = [resplit(data, number).labels for number in range(1, splits + 1)]  # a fault, before anything is written
    record = base.model_dump(mode="json", exclude_defaults=True)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(base.training)}
    record["training"] = {key: value for key, value in base.training.to_dict().items() if value != defaults[key]}
    for number, labels in enumerate(drawn, 1):
        source = {**record["source"], "resplit": number}
        add_dataset(split_name(name, number), {**record, "source": source}, run=not no_run)
        val, test = ((~labels.seen[labels.pairs[part]]).sum() for part in ("val", "test"))
        seen = f"{labels.pairs['train'].size} seen pairs"
        typer.echo(f"{split_name(name, number)}: {seen}, {val} unseen in validation and {test} in test", err=True)
    apart = [row for row, written in {**params.methods, **params.ablations}.items() if name in written.on]
    if apart:
        typer.echo(f"{', '.join(apart)}: what `on: {name}` says is not of its splits; add it for them", err=True)


def remove(
    name: Annotated[str, typer.Argument(help="a data set of params.yaml")],
    results: Annotated[bool, typer.Option("--results", help="delete artifacts/NAME too")] = False,
) -> None:
    """Take a data set out of params.yaml, dvc.lock and the report. Its pictures are never touched."""
    import shutil

    from duplex.cli.lock_file import forget
    from duplex.cli.params_file import remove_dataset
    from duplex.config.artifacts import ArtifactPaths

    remove_dataset(name)
    stages = sum(forget(name, lock) for lock in (Path("dvc.lock"), Path("ablations/dvc.lock")))
    paths = ArtifactPaths()
    shutil.rmtree(paths.inventory(name), ignore_errors=True)
    paths.maps(name).unlink(missing_ok=True)
    own = [place for place in (paths.manifest(name).parent, paths.views(name).parent) if place.exists()]
    if results:
        for place in own:
            shutil.rmtree(place, ignore_errors=True)
    left = [str(place) for place in own if place.exists()]
    kept = f"; kept: {', '.join(left)} (--results deletes them)" if left else ""
    typer.echo(f"params.yaml and dvc.lock are without {name} ({stages} stages){kept}", err=True)


def _found(path: Path, images: Path | None, split: SplitOptions) -> tuple[Source, Dataset]:
    """What lies at a path, and its manifest and labels."""
    from duplex.data.source import detect_source, load_source

    source = detect_source(path.resolve(), split, images.resolve() if images else None)
    if images is not None and source.kind != "table":
        raise UsageError(f"--images is the folder of a table's pictures, and {path} is no table; leave it out")
    return source, load_source(source)


def _split(asked: dict[str, Any], known: DatasetParams | None) -> SplitOptions:
    """What is asked for; else what the data set has; else the defaults."""
    has = known.source.split.model_dump() if known else {}
    return SplitOptions(**{**has, **{key: value for key, value in asked.items() if value is not None}})


def _encoder(name: str | None, weights: str | None, known: DatasetParams | None) -> dict[str, Any]:
    if name is None and known is not None:
        chosen: EncoderParams = known.encoder
        return {**chosen.model_dump(exclude_defaults=True), **({"weights": weights} if weights else {})}
    name = name or ENCODER
    weights = weights or (WEIGHTS if name.startswith("ViT-") else None)
    return {"name": name, **({"weights": weights} if weights else {})}


def _source_record(source: Source, split: SplitOptions | None) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": source.kind, "root": str(source.root)}
    if source.table:
        record["table"] = str(source.table)
    if split is not None:
        record["split"] = dataclasses.asdict(split)
    return record


def _encoder_findings(chosen: dict[str, Any], labels: LabelSpace) -> Iterator[Finding]:
    """Words that the encoder does not know, and weights that are not here."""
    from duplex.data.check import Finding
    from duplex.encoders import unknown_words
    from duplex.encoders.hub import answers
    from duplex.encoders.source import absent_weights
    from duplex.labels import prompt_name

    name, weights = chosen["name"], chosen.get("weights")
    if strange := unknown_words(name, map(prompt_name, (*labels.states, *labels.objects))):
        what = f"words are unknown to {name}; choose another --encoder (`duplex encoders` lists those on disk)"
        yield Finding(what, len(strange), tuple(strange), True, fatal=True)
    try:
        absent = absent_weights(name, weights)
    except UsageError as error:
        raise UsageError(f"--encoder {name}: {error}") from error
    if absent is not None:
        size = f", about {absent.size / 1e9:.1f} GB" if absent.size else ""
        there = answers(absent.address)
        what = "weights will be downloaded" if there else "weights are not on disk and cannot be fetched from here"
        hint = "" if there else "; fetch them elsewhere, or name a folder with weights as --encoder local-dir:FOLDER"
        yield Finding(what, 1, (f"{name} + {weights}{size}, from {absent.address}{hint}",), not there)
