"""`duplex data`: list, count, check and download data sets; add, split and remove the user's own.

`duplex suspects` and `duplex relabel` find and correct wrong labels, also of images outside a
project. *Suspects* are images whose labels are likely wrong.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from duplex.artifacts import ArtifactPaths
from duplex.cli import (
    AsJson,
    DatasetName,
    Force,
    ImageFolder,
    Resize,
    Weights,
    app,
    encoder_option,
    issue_lines,
    load_params,
    log,
    print_json,
    seed_option,
)
from duplex.errors import DuplexError, UsageError, require
from duplex.labels import SPLITS, LabelSpace, prompt_name
from duplex.options import DEFAULT_TRAINING, SplitOptions
from duplex.system.files import refuse_existing, replace_file

if TYPE_CHECKING:
    from duplex.config.params import DatasetParams, Params
    from duplex.data.check import DataIssue
    from duplex.data.tables import LabelledImages
    from duplex.options import SourceOptions

Name = Annotated[str, Argument(help="Data set in params.yaml; with --root, a name of your choice.")]
Root = Annotated[Path | None, Option(help="Folder or table of a data set outside params.yaml.")]
NoRun = Annotated[bool, Option("--no-run", help="Do not add new data sets to run.datasets.")]

ENCODER, WEIGHTS = "ViT-L-14-quickgelu", "openai"  # the paper's
PRINTED = 20  # suspects on stdout
SHOWN_ON_PAGE = 200  # suspects in suspects.html

group = typer.Typer(no_args_is_help=True, help="List, check, download, add, split and remove data sets.")
app.add_typer(group, name="data")


@group.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the data sets of params.yaml, and whether their images are on disk."""
    from duplex.data.download import BENCHMARKS
    from duplex.data.sources import is_on_disk

    rows = []
    for name, entry in load_params().datasets.items():
        source = entry.source
        on_disk = is_on_disk(source) or source.kind == "shapes"
        rows.append({"name": name, "kind": source.kind, "root": str(source.root), "on_disk": on_disk})
        if not as_json:
            command = f"; get it with `duplex data download {name}`" if name in BENCHMARKS else ""
            state = "on disk" if on_disk else f"not on disk{command}"
            print(f"{name:<16}{source.kind:<10}{source.root}  ({state})")
    if as_json:
        print_json(rows)


@group.command()
def stats(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Print the pairs and images of each split, and the shares of frequent and rare pairs."""
    from duplex.data.tables import count_dataset, statistics_text

    labels, dataset = _load(*_source(name, root))
    counts = count_dataset(labels, dataset.manifest if dataset else None)
    if as_json:
        print_json(counts.to_dict())
    else:
        print(statistics_text(name, counts))


@group.command()
def check(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Check the images, pair lists, labels and splits of a data set.

    Exits with 1 if there is a problem.
    """
    from duplex.data.check import check_dataset, check_labels_of
    from duplex.data.sources import draw_missing_images
    from duplex.data.tables import count_dataset, published_differences

    source, features = _source(name, root)
    labels, dataset = _load(source, features)
    if dataset is None:
        log(f"{source.root} has no metadata file; only the pair lists are checked")
        issues: list[DataIssue] = []
    else:
        draw_missing_images(source, dataset.manifest)
        if features is None:
            issues = check_dataset(dataset, source.root)
        else:  # images need not exist
            issues = [issue for issue in check_labels_of(dataset) if issue.count]
    counts = count_dataset(labels, dataset.manifest if dataset else None)
    differences = published_differences(name, counts)
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
    name: Annotated[str, Argument(help="Benchmark to download: mit-states, ut-zappos or cgqa.")],
    to: Annotated[Path | None, Option(help="Folder; default: that of params.yaml, or data/NAME.")] = None,
) -> None:
    """Download a benchmark and unpack it.

    The same command resumes an interrupted download.
    """
    from duplex.data.download import BENCHMARKS
    from duplex.data.download import download as fetch

    require(name, BENCHMARKS, "benchmark")
    datasets = load_params().datasets if Path("params.yaml").exists() else {}
    root = to or (datasets[name].source.root if name in datasets else Path("data") / name)
    fetch(name, root, log)
    command = f"duplex data check {name} --root {root}"
    log(f"{name} is in {root}; `{command}` checks that every image can be read")


def _source(name: str, root: Path | None) -> tuple[SourceOptions, Path | None]:
    from duplex.data.sources import detect_source

    if root is not None:
        return detect_source(root), None
    datasets = load_params().datasets
    if name not in datasets:
        problem = f"params.yaml has no data set {name!r} (it has {', '.join(datasets)})"
        add_yours = f"add yours with `duplex data add {name} PATH`"
        raise UsageError(f"{problem}; choose one of these, {add_yours}, or give its folder or table with --root")
    return datasets[name].source, datasets[name].features


def _load(source: SourceOptions, features: Path | None) -> tuple[LabelSpace, LabelledImages | None]:
    from duplex.data.sources import METADATA, has_pair_lists, load_source, read_pair_lists
    from duplex.features.imported import equal_feature_keys

    has_metadata = (source.root / METADATA).exists()
    if source.kind == "standard" and has_pair_lists(source.root) and not has_metadata:
        return LabelSpace.from_pairs(read_pair_lists(source.root)[0]), None
    dataset = load_source(source, equal_feature_keys(features, source))
    return dataset.labels, dataset


def _share(text: str, default: float) -> Any:
    return Option(help=f"Share of {text}; default: {default}.")


@group.command()
def add(
    name: Annotated[str, Argument(help="Name of the data set.")],
    path: Annotated[Path, Argument(help="Image or benchmark folder, table, or hf-datasets:OWNER/NAME.")],
    images: ImageFolder = None,
    split_seed: Annotated[int | None, seed_option(f"Default: {SplitOptions.seed}.", "--split-seed")] = None,
    val_unseen: Annotated[float | None, _share("unseen pairs for validation", SplitOptions.val_unseen)] = None,
    test_unseen: Annotated[float | None, _share("unseen pairs for test", SplitOptions.test_unseen)] = None,
    val_images: Annotated[float | None, _share("images for validation", SplitOptions.val_images)] = None,
    test_images: Annotated[float | None, _share("images for test", SplitOptions.test_images)] = None,
    encoder: Annotated[str | None, encoder_option(help=f"Default: {ENCODER}; with --features: 'none'.")] = None,
    weights: Weights = None,
    resize: Resize = None,
    features: Annotated[Path | None, Option(help="Features: .npy in the table's order, or .npz by image.")] = None,
    no_run: NoRun = False,
) -> None:
    """Check a data set, print its statistics, and write datasets/NAME.yaml.

    If the data set exists, only the given options change. Exits with 1 if it cannot be trained on.
    """
    from duplex.config.datasets import check_name, write_dataset

    check_name(name)
    params = load_params()
    existing = params.datasets.get(name)
    options: dict[str, Any] = {"seed": split_seed, "val_unseen": val_unseen, "test_unseen": test_unseen}
    options |= {"val_images": val_images, "test_images": test_images}
    options = {key: value for key, value in options.items() if value is not None}
    split = dataclasses.replace(existing.source.split if existing else SplitOptions(), **options)
    before = existing.features if existing else None
    features = features.resolve() if features else before
    if resize is not None and features is not None:
        raise UsageError(f"--resize {resize} is given with --features; leave it out, as no image is encoded")
    encoder_entry = _encoder_entry(encoder, weights, existing, features)
    encoder_entry |= {} if resize is None else {"resize": resize}
    if existing and existing.source.resplit is not None:
        problem = f"{name} is a re-split, made by `duplex data split`"
        raise UsageError(f"{problem}; change datasets/{name}.yaml instead")
    table = existing.source.table if existing else None
    if existing and table is not None and table.resolve() == path.resolve():
        images = images or existing.source.root
    source, dataset = _load_own(path, images, split, features)
    if options and not dataset.made_split:
        problem = f"{path} has a split, so none is made"
        raise UsageError(f"{problem}; leave out --split-seed, --val-* and --test-*")
    issues = list(_issues(dataset, source, encoder_entry, features, params.extraction.max_bad))
    _print_findings(name, dataset, issues)
    entry: dict[str, Any] = {"source": {"kind": source.kind, "root": str(source.root)}}
    if source.table:
        entry["source"]["table"] = str(source.table)
    if dataset.made_split:
        entry["source"]["split"] = dataclasses.asdict(split)
    if existing is None or encoder is not None or weights is not None or resize is not None:
        entry["encoder"] = encoder_entry
    if features is not None:
        entry["features"] = str(features)
    supported = _supported_methods(params, name, source, encoder_entry, features)
    unsupported = [method for method in params.run.methods if method not in supported]
    run = not (no_run or unsupported)
    write_dataset(name, entry if existing else {**entry, "training": DEFAULT_TRAINING}, run=run)
    changes = f"; changed: {' and '.join(entry)}" if existing else ""
    later = "" if run else " after you add it to run.datasets of params.yaml"
    log(f"wrote datasets/{name}.yaml{changes}; `dvc repro` trains on this data set{later}")
    if unsupported:
        needs = f"{', '.join(unsupported)}, which need a text tower or patch tokens"
        other = ""
        if supported:
            other = f"; instead, run `duplex sweep --datasets {name} --methods {supported[0]}`"
        log(f"{name} was not added to run.datasets, because run.methods has {needs}{other}")


def _load_own(
    path: Path, images: Path | None, split: SplitOptions, features: Path | None
) -> tuple[SourceOptions, LabelledImages]:
    from duplex.data.download import local_source
    from duplex.data.sources import detect_source, load_source
    from duplex.features.imported import equal_feature_keys
    from duplex.features.shared import user_cache

    folder = images.resolve() if images else None
    source = detect_source(local_source(path, user_cache()), split, folder)
    return source, load_source(source, equal_feature_keys(features, source))


def _print_findings(name: str, dataset: LabelledImages, issues: list[DataIssue]) -> None:
    from duplex.data.tables import count_dataset, published_differences, statistics_text

    counts = count_dataset(dataset.labels, dataset.manifest)
    print(issue_lines(name, issues, dataset.notes, published_differences(name, counts)))
    print(statistics_text(name, counts))
    if dataset.made_split:
        images = ", ".join(f"{counts.splits[split].images:,} {split}" for split in SPLITS)
        advice = "to set your own, add a table with a column 'split' instead"
        print(f"made a split: {images} images; {advice}")
    fatal = next((issue for issue in issues if issue.fatal), None)
    if fatal is not None:
        problem = f"{name} was not added: {fatal}"
        raise DuplexError(f"{problem}; correct this, then run the same command again")


@group.command()
def split(
    name: DatasetName,
    splits: Annotated[int, Option(min=1, max=100, help="Number of new random splits to make.")] = 5,
    unseen_states: Annotated[float, Option(help="Share of states without training images.")] = 0.0,
    unseen_objects: Annotated[float, Option(help="Share of objects without training images.")] = 0.0,
    images_per_pair: Annotated[int | None, Option(min=1, help="Most training images per pair.")] = None,
    no_run: NoRun = False,
) -> None:
    """Write NAME-split1.yaml, -split2.yaml, … to datasets/, with other random unseen pairs.

    The new data sets have the images, encoder, options and number of unseen pairs of NAME;
    features are copied if they exist. If a re-split exists already, only a changed `source` of
    NAME is copied to it. With unseen states or objects, the names are NAME-words1, NAME-words2, …;
    with at most 4 images per pair, NAME-few4-split1, ….
    """
    from duplex.config.datasets import check_name, write_dataset
    from duplex.data.sources import load_source, original
    from duplex.data.tables import resplit, split_name
    from duplex.features.imported import equal_feature_keys

    params = load_params()
    base = params.dataset(name)
    if base.source.resplit is not None:
        problem = f"{name} is itself a re-split, made by `duplex data split`"
        raise UsageError(f"{problem}; give the original data set")
    given: dict[str, Any] = {"unseen_states": unseen_states, "unseen_objects": unseen_objects}
    given["images_per_pair"] = images_per_pair
    given = {key: value for key, value in given.items() if value}
    options = dataclasses.replace(base.source.split, **given)
    names = [split_name(name, number, options) for number in range(1, splits + 1)]
    check_name(names[-1])
    for number, own in enumerate(names, 1):
        existing = params.datasets.get(own)
        if existing is not None and existing.source.resplit != number:
            taken = f"{own}, the name for re-split {number} of {name}, belongs to another data set"
            raise UsageError(f"{taken}; rename that data set, or run `duplex data remove {own}`")
    data = load_source(original(base.source), equal_feature_keys(base.features, base.source))
    numbers = range(1, splits + 1)
    labels_by_split = [resplit(data, number, options).labels for number in numbers]  # may fail, so first
    record = base.model_dump(mode="json", exclude_defaults=True)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(base.training)}
    training = base.training.to_dict()
    record["training"] = {key: value for key, value in training.items() if value != defaults[key]}
    if given:
        record["source"]["split"] = {**record["source"].get("split", {}), **given}
    for number, (own, labels) in enumerate(zip(names, labels_by_split, strict=True), 1):
        source = {**record["source"], "resplit": number}
        existing = params.datasets.get(own)
        if existing is None:
            entry = {**record, "source": source}
        elif existing.source == dataclasses.replace(base.source, resplit=number, split=options):
            entry = {}
        else:
            entry = {"source": source}
            log(f"{own}: source changed to that of {name}")
        write_dataset(own, entry, run=not no_run)
        val = (~labels.seen[labels.pairs["val"]]).sum()
        test = (~labels.seen[labels.pairs["test"]]).sum()
        seen = f"{labels.pairs['train'].size} seen pairs"
        states, objects = labels.trained_words
        counts = f"{(~states).sum()} states and {(~objects).sum()} objects"
        words = f"; {counts} without training images" if unseen_states or unseen_objects else ""
        log(f"{own}: {seen}, {val} unseen in validation and {test} in test{words}")
    _log_missing_options(params, name, names[0])


def _log_missing_options(before: Params, name: str, own: str) -> None:
    after = load_params().methods  # which have the `methods:` of datasets/NAME.yaml for re-splits, too
    special = []
    for method, entry in before.methods.items():
        options = entry.per_dataset.get(name)
        if options is not None and after[method].per_dataset.get(own) != options:
            special.append(method)
    if special:
        lacks = f"has {name} but not its re-splits"
        log(f"params.yaml: per_dataset of {', '.join(special)} {lacks}; add them there")


@group.command()
def remove(
    name: DatasetName,
    results: Annotated[bool, Option("--results", help="Also delete artifacts/NAME.")] = False,
) -> None:
    """Delete datasets/NAME.yaml and the data set's part of the report.

    Images are never deleted.
    """
    from duplex.config.datasets import remove_dataset

    remove_dataset(name)
    paths = ArtifactPaths()
    shutil.rmtree(paths.inventory(name), ignore_errors=True)
    paths.maps(name).unlink(missing_ok=True)
    folder = paths.manifest(name).parent
    if results:
        shutil.rmtree(folder, ignore_errors=True)
    remark = f"; kept: {folder} (--results deletes it)" if folder.exists() else ""
    log(f"removed datasets/{name}.yaml{remark}")


def _encoder_entry(
    name: str | None, weights: str | None, existing: DatasetParams | None, features: Path | None
) -> dict[str, Any]:
    from duplex.encoders.base import is_random
    from duplex.features.file import IMPORTED

    if name == "none" or (name is None and existing is None and features is not None):
        if features is None or weights is not None:
            missing = "--encoder none needs --features" if features is None else "--weights needs an --encoder"
            raise UsageError(missing)
        return {"name": IMPORTED}
    if features is not None and is_random(weights):
        problem = f"random weights cannot match features from {features}"
        raise UsageError(f"{problem}; leave out --weights {weights}")
    entry = existing.encoder.model_dump(exclude_defaults=True) if existing else {}
    if name is not None or existing is None:
        name = name or ENCODER
        weights = weights or (WEIGHTS if name.startswith("ViT-") else None)
        kept = {key: value for key, value in entry.items() if key not in ("name", "weights")}
        named = {"name": name, "weights": weights} if weights else {"name": name}
        return {**named, **kept}
    return {**entry, "weights": weights} if weights else entry


def _issues(
    dataset: LabelledImages, source: SourceOptions, encoder: dict[str, Any], features: Path | None, max_bad: float
) -> Iterator[DataIssue]:
    from duplex.data.check import check_dataset, check_labels_of
    from duplex.features.file import IMPORTED
    from duplex.features.imported import check_features

    if encoder["name"] != IMPORTED:
        yield from _encoder_issues(encoder, dataset.labels)
    if features is None:
        yield from check_dataset(dataset, source.root)
    else:
        yield from (issue for issue in check_labels_of(dataset) if issue.count)
        is_table = source.kind == "table"
        weights = encoder.get("weights")
        yield from check_features(features, dataset, is_table, encoder["name"], weights, max_bad)


def _supported_methods(
    params: Params, name: str, source: SourceOptions, encoder: dict[str, Any], features: Path | None
) -> list[str]:
    from duplex.config.params import DatasetParams, EncoderParams
    from duplex.training.inputs import supported_methods

    training: Any = DEFAULT_TRAINING  # checked and converted
    settings = EncoderParams(**encoder)
    entry = DatasetParams(source=source, encoder=settings, features=features, training=training)
    datasets = {**params.datasets, name: entry}
    return supported_methods(params.model_copy(update={"datasets": datasets}), name)


def _encoder_issues(encoder: dict[str, Any], labels: LabelSpace) -> Iterator[DataIssue]:
    from duplex.data.check import DataIssue
    from duplex.encoders.base import is_random, missing_weights, unknown_words
    from duplex.training.inputs import long_prompts

    name = encoder["name"]
    weights = encoder.get("weights")
    unknown = unknown_words(name, map(prompt_name, (*labels.states, *labels.objects)))
    if unknown:
        advice = "choose another --encoder; `duplex encoders` lists them"
        message = f"words are unknown to the encoder {name} ({advice})"
        yield DataIssue(message, len(unknown), tuple(unknown), True, fatal=True)
    try:
        missing = missing_weights(name, weights)
    except UsageError as error:
        raise UsageError(f"--encoder {name}: {error}") from error
    if is_random(weights):
        message = "encoder has random weights, so its results mean nothing"
        yield DataIssue(message, 1, (f"{name} + {weights}",), False)
    long = long_prompts(name, weights, labels) if missing is None and not unknown else ()
    if long:
        advice = "shorten the names of their states or objects"
        message = f"pairs have prompts that are too long for {name} ({advice})"
        yield DataIssue(message, len(long), tuple(long), True, fatal=True)
    if missing is not None:
        size = f", about {missing.size / 1e9:.1f} GB" if missing.size else ""
        address = f"{name} + {weights}{size}, from {missing.address}"
        message = "encoder's weights are not on disk and will be downloaded"
        yield DataIssue(message, 1, (address,), False)


Labelled = Annotated[str, Argument(help="Data set of params.yaml, labelled folder, table or fitted model.")]


@app.command()
def suspects(
    source: Labelled,
    images: ImageFolder = None,
    out: Annotated[Path | None, Option(help="Folder to write to; default: suspects/NAME.")] = None,
    force: Force = False,
) -> None:
    """Rank labelled images by how likely their labels are wrong, and find near-copies.

    Finds outliers, too. Reads features that `extract` or `fit` has cached; writes suspects.csv
    and suspects.html.
    """
    from duplex.project.suspects import copied_pairs, open_labelled, rank_suspects, write_suspects_page

    params = load_params() if Path("params.yaml").exists() else None
    labelled = open_labelled(source, images, params)
    folder = out or Path("suspects") / labelled.name
    csv = folder / "suspects.csv"
    page = folder / "suspects.html"
    for path in (csv, page):
        refuse_existing(path, force=force)
    table = rank_suspects(labelled)
    with replace_file(csv) as scratch:  # renamed once the page is written too
        table.to_csv(scratch, index=False, lineterminator="\n")
        title = f"Suspicious labels of {labelled.name}"
        write_suspects_page(page, title, table, labelled.root, SHOWN_ON_PAGE)
    for row in table.head(PRINTED).to_dict("records"):
        label = f"{row['state']} {row['object']}"
        better = f"{row['better_state']} {row['better_object']}"
        typer.echo(f"{row['rank']:>5}  {label:<28} perhaps {better:<28} {row['image']}")
    counts = f"{len(table)} images and {len(copied_pairs(table))} pairs of near-copies"
    then = f"correct the columns state and object where they are wrong, then run `duplex relabel {source} {csv}`"
    log(f"wrote {csv} and suspects.html with {counts}; {then}")


@app.command()
def relabel(
    source: Labelled,
    edited: Annotated[Path, Argument(help="CSV file of corrected labels: image, state, object.")],
    images: ImageFolder = None,
    out: Annotated[Path | None, Option(help="CSV to write; default: NAME-relabelled.csv.")] = None,
    force: Force = False,
) -> None:
    """Write a table of the labelled images, with labels corrected by a CSV file."""
    from duplex.data.check import SHOWN
    from duplex.data.tables import write_manifest
    from duplex.project.suspects import open_labelled, relabelled

    params = load_params() if Path("params.yaml").exists() else None
    labelled = open_labelled(source, images, params, stages=["prepare"])
    name = labelled.name
    target = out or Path(f"{name}-relabelled.csv")
    if target.suffix.lower() != ".csv":
        example = f"--out {name}-relabelled.csv"
        raise UsageError(f"{target} does not end in .csv; choose, for example, {example}")
    refuse_existing(target, force=force)
    result = relabelled(labelled, edited)
    write_manifest(result.manifest, target)
    command = "fit" if labelled.params is None else f"data add {name}-relabelled"
    hint = f"`duplex {command} {target} --images {labelled.root}{labelled.encoder}` uses it"
    log(f"wrote {target} with {result.changed} corrected labels; {hint}")
    if result.outdated:
        why = f"their labels in {name} have changed since the list was made"
        images_left = ", ".join(result.outdated[:SHOWN])
        log(f"not relabelled ({len(result.outdated):,}), as {why}: {images_left}")
    if result.new:
        log(f"new states or objects, perhaps misspelt: {', '.join(result.new)}")
