"""`duplex data`: list, count, check and download data sets; add, split and remove the user's own.

`duplex suspects` and `duplex relabel` find and correct wrong labels, also of images outside a project.
*Suspects* are images whose labels are likely wrong.
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
    from duplex.config.params import DatasetParams, EncoderParams, Params
    from duplex.data.check import DataIssue
    from duplex.data.tables import LabelledImages
    from duplex.options import SourceOptions

Name = Annotated[str, Argument(help="Name of a data set in params.yaml; with --root, a name of your choice.")]
Root = Annotated[Path | None, Option(help="Folder or table of a data set that is not in params.yaml.")]
NoRun = Annotated[bool, Option("--no-run", help="Do not add new data sets to run.datasets in params.yaml.")]

ENCODER, WEIGHTS = "ViT-L-14-quickgelu", "openai"  # the paper's
PRINTED = 20  # suspects on stdout

group = typer.Typer(no_args_is_help=True, help="List, check and download data sets; add, split and remove your own.")
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
            print(f"{name:<16}{source.kind:<10}{source.root}  ({'on disk' if on_disk else f'not on disk{command}'})")
    if as_json:
        print_json(rows)


@group.command()
def stats(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Print the number of pairs and images per split, and the shares of images with frequent and with rare pairs."""
    from duplex.data.tables import count_dataset, statistics_text

    labels, dataset = _load(*_source(name, root))
    counts = count_dataset(labels, dataset.manifest if dataset else None)
    if as_json:
        print_json(counts.to_dict())
    else:
        print(statistics_text(name, counts))


@group.command()
def check(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Open every image of a data set; check pair lists, labels and splits. Exits with 1 if there is a problem."""
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
        labels_only = (issue for issue in check_labels_of(dataset) if issue.count)  # images need not exist
        issues = check_dataset(dataset, source.root) if features is None else list(labels_only)
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
    name: Annotated[str, Argument(help="Benchmark to download: mit-states, ut-zappos or cgqa.")],
    to: Annotated[Path | None, Option(help="Folder; default: NAME's root in params.yaml, else data/NAME.")] = None,
) -> None:
    """Download a benchmark and unpack it. The same command resumes an interrupted download."""
    from duplex.data.download import BENCHMARKS
    from duplex.data.download import download as fetch

    require(name, BENCHMARKS, "benchmark")
    known = load_params().datasets if Path("params.yaml").exists() else {}
    root = to or (known[name].source.root if name in known else Path("data") / name)
    fetch(name, root, log)
    log(f"{name} is in {root}; `duplex data check {name} --root {root}` checks that every image can be read")


def _source(name: str, root: Path | None) -> tuple[SourceOptions, Path | None]:
    from duplex.data.sources import detect_source

    if root is not None:
        return detect_source(root), None
    known = load_params().datasets
    if name not in known:
        raise UsageError(
            f"params.yaml has no data set {name!r} (it has {', '.join(known)}); choose one of these, "
            f"add yours with `duplex data add {name} PATH`, or give its folder or table with --root"
        )
    return known[name].source, known[name].features


def _load(source: SourceOptions, features: Path | None) -> tuple[LabelSpace, LabelledImages | None]:
    from duplex.data.sources import METADATA, has_pair_lists, load_source, read_pair_lists
    from duplex.features.imported import equal_feature_keys

    if source.kind == "standard" and has_pair_lists(source.root) and not (source.root / METADATA).exists():
        return LabelSpace.from_pairs(read_pair_lists(source.root)[0]), None
    dataset = load_source(source, equal_feature_keys(features, source))
    return dataset.labels, dataset


def _share(text: str, default: float) -> Any:
    return Option(help=f"Share of {text}; default: {default}.")


@group.command()
def add(
    name: Annotated[str, Argument(help="Name of the data set.")],
    path: Annotated[Path, Argument(help="Image or benchmark folder, table, or hf-datasets:OWNER/NAME (Hugging Face).")],
    images: ImageFolder = None,
    split_seed: Annotated[int | None, seed_option(f"Split seed; default: {SplitOptions.seed}.", "--split-seed")] = None,
    val_unseen: Annotated[float | None, _share("pairs held out for validation", SplitOptions.val_unseen)] = None,
    test_unseen: Annotated[float | None, _share("pairs held out for test", SplitOptions.test_unseen)] = None,
    val_images: Annotated[float | None, _share("seen pairs' images for validation", SplitOptions.val_images)] = None,
    test_images: Annotated[float | None, _share("seen pairs' images for test", SplitOptions.test_images)] = None,
    encoder: Annotated[
        str | None, encoder_option(help=f"Encoder; default: {ENCODER}; with --features: 'none' (not stated).")
    ] = None,
    weights: Weights = None,
    features: Annotated[
        Path | None, Option(help="Precomputed features: .npy with rows in the table's order, or .npz with image names.")
    ] = None,
    no_run: NoRun = False,
) -> None:
    """Check a data set, print its statistics, and write datasets/NAME.yaml.

    If the data set exists already, only the given options change. Exits with 1 if the data set cannot be trained on.
    """
    from duplex.config.params import check_name, write_dataset

    check_name(name)
    params = load_params()
    known = params.datasets.get(name)
    options = {"seed": split_seed, "val_unseen": val_unseen, "test_unseen": test_unseen}
    options |= {"val_images": val_images, "test_images": test_images}
    options = {key: value for key, value in options.items() if value is not None}
    split = SplitOptions(**{**(dataclasses.asdict(known.source.split) if known else {}), **options})
    before = known.features if known else None
    features = features.resolve() if features else before
    encoder_entry = _encoder_entry(encoder, weights, known, features)
    if known and known.source.resplit is not None:
        raise UsageError(f"{name} is a re-split, made by `duplex data split`; change datasets/{name}.yaml instead")
    if known and known.source.table is not None and known.source.table.resolve() == path.resolve():
        images = images or known.source.root
    source, dataset = _load_own(path, images, split, features)
    if options and not dataset.made_split:
        raise UsageError(f"{path} has a split, so none is made; leave out --split-seed, --val-* and --test-*")
    _print_findings(name, dataset, [*_issues(dataset, source, encoder_entry, features, params.extraction.max_bad)])
    entry: dict[str, Any] = {"source": {"kind": source.kind, "root": str(source.root)}}
    if source.table:
        entry["source"]["table"] = str(source.table)
    if dataset.made_split:
        entry["source"]["split"] = dataclasses.asdict(split)
    if known is None or encoder is not None or weights is not None:
        entry["encoder"] = encoder_entry
    if features is not None:
        entry["features"] = str(features)
    supported = _supported_methods(params, name, source, encoder_entry, features)
    unsupported = [method for method in params.run.methods if method not in supported]
    run = not (no_run or unsupported)
    write_dataset(name, entry if known else {**entry, "training": DEFAULT_TRAINING}, run=run)
    changes = f"; changed: {' and '.join(entry)}" if known else ""
    later = "" if run else " after you add it to run.datasets of params.yaml"
    log(f"wrote datasets/{name}.yaml{changes}; `dvc repro` trains on this data set{later}")
    if unsupported:
        needs = f"{', '.join(unsupported)}, which need a text tower or patch tokens"
        other = f"; instead, run `duplex sweep --datasets {name} --methods {supported[0]}`" if supported else ""
        log(f"{name} was not added to run.datasets, because run.methods has {needs}{other}")


def _load_own(
    path: Path, images: Path | None, split: SplitOptions, features: Path | None
) -> tuple[SourceOptions, LabelledImages]:
    from duplex.data.download import local_source
    from duplex.data.sources import detect_source, load_source
    from duplex.features.imported import equal_feature_keys
    from duplex.features.shared import user_cache

    source = detect_source(local_source(path, user_cache()), split, images.resolve() if images else None)
    return source, load_source(source, equal_feature_keys(features, source))


def _print_findings(name: str, dataset: LabelledImages, issues: list[DataIssue]) -> None:
    from duplex.data.tables import count_dataset, published_differences, statistics_text

    counts = count_dataset(dataset.labels, dataset.manifest)
    print(issue_lines(name, issues, dataset.notes, published_differences(name, counts)))
    print(statistics_text(name, counts))
    if dataset.made_split:
        images = ", ".join(f"{counts.splits[split].images:,} {split}" for split in SPLITS)
        print(f"made a split: {images} images; to set your own, add a table with a column 'split' instead")
    if fatal := next((issue for issue in issues if issue.fatal), None):
        raise DuplexError(f"{name} was not added: {fatal}; correct this, then run the same command again")


@group.command()
def split(
    name: DatasetName,
    splits: Annotated[int, Option(min=1, max=100, help="Number of new random splits to make.")] = 5,
    unseen_states: Annotated[float, Option(help="Share of states given no training images (open vocabulary).")] = 0.0,
    unseen_objects: Annotated[float, Option(help="Share of objects given no training images.")] = 0.0,
    images_per_pair: Annotated[int | None, Option(min=1, help="Largest number of training images per pair.")] = None,
    no_run: NoRun = False,
) -> None:
    """Write datasets/NAME-split1.yaml, datasets/NAME-split2.yaml, …, each with another random choice of unseen pairs.

    The new data sets have the images, encoder, options and number of unseen pairs of NAME; features are copied if
    they exist. If a re-split exists already, only a changed `source` of NAME is copied to it. With unseen
    states or objects, the names are NAME-words1, NAME-words2, …; with at most 4 images per pair, NAME-few4-split1, ….
    """
    from duplex.config.params import check_name, write_dataset
    from duplex.data.sources import load_source, original
    from duplex.data.tables import resplit, split_name
    from duplex.features.imported import equal_feature_keys

    params = load_params()
    base = params.dataset(name)
    if base.source.resplit is not None:
        raise UsageError(f"{name} is itself a re-split, made by `duplex data split`; give the original data set")
    given: dict[str, Any] = {"unseen_states": unseen_states, "unseen_objects": unseen_objects}
    given = {key: value for key, value in {**given, "images_per_pair": images_per_pair}.items() if value}
    options = dataclasses.replace(base.source.split, **given)
    names = [split_name(name, number, options) for number in range(1, splits + 1)]
    check_name(names[-1])
    for number, own in enumerate(names, 1):
        existing = params.datasets.get(own)
        if existing is not None and existing.source.resplit != number:
            taken = f"{own}, the name for re-split {number} of {name}, belongs to another data set"
            raise UsageError(f"{taken}; rename that data set, or run `duplex data remove {own}`")
    data = load_source(original(base.source), equal_feature_keys(base.features, base.source))
    labels_by_split = [resplit(data, number, options).labels for number in range(1, splits + 1)]  # first: may fail
    record = base.model_dump(mode="json", exclude_defaults=True)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(base.training)}
    record["training"] = {key: value for key, value in base.training.to_dict().items() if value != defaults[key]}
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
    after = load_params().methods  # which have the `methods:` of datasets/NAME.yaml for re-splits, too
    listed = {method: entry.per_dataset[name] for method, entry in params.methods.items() if name in entry.per_dataset}
    if special := [method for method, own in listed.items() if after[method].per_dataset.get(names[0]) != own]:
        log(f"params.yaml: per_dataset of {', '.join(special)} has {name} but not its re-splits; add them there")


@group.command()
def remove(
    name: DatasetName,
    results: Annotated[bool, Option("--results", help="Also delete artifacts/NAME: features, runs, results.")] = False,
) -> None:
    """Delete datasets/NAME.yaml and the data set's part of the report. Images are never deleted."""
    from duplex.config.params import remove_dataset

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
    name: str | None, weights: str | None, known: DatasetParams | None, features: Path | None
) -> dict[str, Any]:
    """The encoder of the command's options or else of the existing entry; the default is the Duplex paper's encoder."""
    from duplex.encoders.base import is_random
    from duplex.features.file import IMPORTED

    if name == "none" or (name is None and known is None and features is not None):
        if features is None or weights is not None:
            raise UsageError("--encoder none needs --features" if features is None else "--weights needs an --encoder")
        return {"name": IMPORTED}
    if features is not None and is_random(weights):
        raise UsageError(f"random weights cannot match features from {features}; leave out --weights {weights}")
    if name is None and known is not None:
        encoder: EncoderParams = known.encoder
        return {**encoder.model_dump(exclude_defaults=True), **({"weights": weights} if weights else {})}
    name = name or ENCODER
    weights = weights or (WEIGHTS if name.startswith("ViT-") else None)
    kept = known.encoder.model_dump(exclude_defaults=True, exclude={"name", "weights"}) if known else {}
    return {"name": name, **({"weights": weights} if weights else {}), **kept}


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
        is_table, weights = source.kind == "table", encoder.get("weights")
        yield from check_features(features, dataset, is_table, encoder["name"], weights, max_bad)


def _supported_methods(
    params: Params, name: str, source: SourceOptions, encoder: dict[str, Any], features: Path | None
) -> list[str]:
    from duplex.config.params import DatasetParams, EncoderParams
    from duplex.training.inputs import supported_methods

    training: Any = DEFAULT_TRAINING  # checked and converted
    entry = DatasetParams(source=source, encoder=EncoderParams(**encoder), features=features, training=training)
    return supported_methods(params.model_copy(update={"datasets": {**params.datasets, name: entry}}), name)


def _encoder_issues(encoder: dict[str, Any], labels: LabelSpace) -> Iterator[DataIssue]:
    from duplex.data.check import DataIssue
    from duplex.encoders.base import is_random, missing_weights, unknown_words
    from duplex.training.inputs import long_prompts

    name, weights = encoder["name"], encoder.get("weights")
    if unknown := unknown_words(name, map(prompt_name, (*labels.states, *labels.objects))):
        message = f"words are unknown to the encoder {name} (choose another --encoder; `duplex encoders` lists them)"
        yield DataIssue(message, len(unknown), tuple(unknown), True, fatal=True)
    try:
        missing = missing_weights(name, weights)
    except UsageError as error:
        raise UsageError(f"--encoder {name}: {error}") from error
    if is_random(weights):
        yield DataIssue("encoder has random weights, so its results mean nothing", 1, (f"{name} + {weights}",), False)
    if missing is None and not unknown and (long := long_prompts(name, weights, labels)):
        message = f"pairs have prompts that are too long for {name} (shorten the names of their states or objects)"
        yield DataIssue(message, len(long), tuple(long), True, fatal=True)
    if missing is not None:
        size = f", about {missing.size / 1e9:.1f} GB" if missing.size else ""
        address = f"{name} + {weights}{size}, from {missing.address}"
        yield DataIssue("encoder's weights are not on disk and will be downloaded", 1, (address,), False)


Labelled = Annotated[str, Argument(help="Data set of params.yaml, labelled folder or table, or fitted model's folder.")]


@app.command()
def suspects(
    source: Labelled,
    images: ImageFolder = None,
    out: Annotated[Path | None, Option(help="Folder to write to; default: suspects/NAME (SOURCE's name).")] = None,
    shown: Annotated[int, Option(min=1, help="Number of images in suspects.html.")] = 200,
    force: Force = False,
) -> None:
    """Rank labelled images by how likely their labels are wrong, and find near-copies and outliers.

    Reads features that `extract` or `fit` has cached. Writes suspects.csv, for editing, and suspects.html.
    """
    from duplex.project.suspects import copied_pairs, open_labelled, rank_suspects, write_suspects_page

    labelled = open_labelled(source, images, load_params() if Path("params.yaml").exists() else None)
    folder = out or Path("suspects") / labelled.name
    csv, page = folder / "suspects.csv", folder / "suspects.html"
    for path in (csv, page):
        refuse_existing(path, force=force)
    table = rank_suspects(labelled)
    with replace_file(csv) as scratch:  # renamed once the page is written too
        table.to_csv(scratch, index=False, lineterminator="\n")
        write_suspects_page(page, f"Suspicious labels of {labelled.name}", table, labelled.root, shown)
    for row in table.head(PRINTED).to_dict("records"):
        label = f"{row['state']} {row['object']}"
        better = f"{row['better_state']} {row['better_object']}"
        typer.echo(f"{row['rank']:>5}  {label:<28} perhaps {better:<28} {row['image']}")
    log(
        f"wrote {csv} and suspects.html with {len(table)} images and {len(copied_pairs(table))} pairs of near-copies; "
        f"correct the columns state and object where they are wrong, then run `duplex relabel {source} {csv}`"
    )


@app.command()
def relabel(
    source: Labelled,
    edited: Annotated[Path, Argument(help="CSV file of corrected labels, with columns image, state and object.")],
    images: ImageFolder = None,
    out: Annotated[Path | None, Option(help="CSV file to write; default: NAME-relabelled.csv (SOURCE's name).")] = None,
    force: Force = False,
) -> None:
    """Write a new table of labelled images, with labels corrected by a CSV file. The original stays unchanged."""
    from duplex.data.check import SHOWN
    from duplex.data.tables import write_manifest
    from duplex.project.suspects import open_labelled, relabelled

    params = load_params() if Path("params.yaml").exists() else None
    labelled = open_labelled(source, images, params, stages=["prepare"])
    name = labelled.name
    target = out or Path(f"{name}-relabelled.csv")
    if target.suffix.lower() != ".csv":
        raise UsageError(f"{target} does not end in .csv; choose, for example, --out {name}-relabelled.csv")
    refuse_existing(target, force=force)
    result = relabelled(labelled, edited)
    write_manifest(result.manifest, target)
    command = "fit" if labelled.params is None else f"data add {name}-relabelled"
    hint = f"`duplex {command} {target} --images {labelled.root}{labelled.encoder}` uses it"
    log(f"wrote {target} with {result.changed} corrected labels; {hint}")
    if result.outdated:
        why = f"their labels in {name} have changed since the list was made"
        log(f"not relabelled ({len(result.outdated):,}), as {why}: {', '.join(result.outdated[:SHOWN])}")
    if result.new:
        log(f"new states or objects, perhaps misspelt: {', '.join(result.new)}")
