"""`duplex extract`, `cache` and `encoders`: features, where they are kept, and what makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.errors import UsageError, require
from duplex.system.precision import PRECISIONS
from duplex.system.script import LARGEST_SEED

if TYPE_CHECKING:
    from duplex.config.params import Params
    from duplex.features.extraction import ExtractionReport

Dataset = Annotated[str, typer.Option("--dataset", "-d", help="A data set of params.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
CachePath = Annotated[Path, typer.Argument(help="A feature cache.")]
ENGINES = ("local", "ray")


def register(app: typer.Typer) -> None:
    app.command("extract")(extract)
    cache = typer.Typer(help="Look into feature caches, join shards, bring your own features.", no_args_is_help=True)
    cache.command("info")(info)
    cache.command("verify")(verify)
    cache.command("import")(import_)
    cache.command("join")(join)
    app.add_typer(cache, name="cache")
    encoders = typer.Typer(help="Frozen encoders by name.", invoke_without_command=True)
    encoders.callback()(_list_by_default)
    encoders.command("list")(list_encoders)
    encoders.command("convert")(convert)
    app.add_typer(encoders, name="encoders")


def extract(
    dataset: Dataset,
    encoder: Annotated[str | None, typer.Option(help="Another encoder; with its own --weights.")] = None,
    weights: Annotated[str | None, typer.Option(help="A published tag, or a file.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Pictures at once.")] = None,
    num_workers: Annotated[str | None, typer.Option(help="Decoding processes; auto: cores less one.")] = None,
    precision: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = None,
    max_bad: Annotated[float | None, typer.Option(min=0, max=1, help="Share of bad pictures allowed.")] = None,
    tokens: Annotated[str | None, typer.Option(help="none, or patch to keep patch tokens too.")] = None,
    depth: Annotated[int | None, typer.Option(min=0, help="Keep what enters the image tower's last blocks.")] = None,
    bits: Annotated[int | None, typer.Option(help="16, or 8 to keep it in half the bytes.")] = None,
    deep_test: Annotated[
        bool | None, typer.Option("--deep-test/--no-deep-test", help="Keep it of test pictures too.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    shard: Annotated[str | None, typer.Option(help="k/N: only this piece, counted from 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the cache goes.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again; by default a run resumes.")] = False,
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    shards: Annotated[int, typer.Option(min=1, help="Pieces for the Ray engine.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Encode a data set's pictures once into its feature cache. What is not given comes from params.yaml."""
    from duplex.config.params import load_params

    require(engine, ENGINES, "engine")
    if engine == "ray" and shard is not None:
        raise UsageError("--shard is for other launchers; the Ray engine takes --shards N and does them all")
    if engine != "ray" and shards != 1:
        raise UsageError("--shards is the Ray engine's; here --shard k/N makes one piece at a time")
    if limit is not None and out is None:
        raise UsageError("--limit makes a cache of the first rows alone; say where it goes with --out")
    tag = weights if encoder is None or weights else ""
    wanted = {"name": encoder, "weights": tag, "precision": precision, "bits": bits, "deep_test": deep_test}
    workers = None if num_workers is None else _parse_workers(num_workers)
    settings = {"batch_size": batch_size, "num_workers": workers, "max_bad": max_bad, "tokens": tokens, "depth": depth}
    params = _override(load_params(), dataset, wanted, settings, device)
    _refuse_slow(params, dataset)
    options: dict[str, Any] = {"limit": limit, "fresh": fresh, **({"shard": _parse_shard(shard)} if shard else {})}
    own = out is None and limit is None  # the data set's own cache, and the views that belong to it
    if own and shard is not None:
        _refuse_few_views(params, dataset, _parse_shard(shard))
    if engine == "ray":
        reports = _extract_on_ray(params, dataset, out, shards, options, views=own)
    else:
        from duplex.stages.extract import extract as stage
        from duplex.stages.extract import extract_views

        reports = [stage(params, dataset, out=out, **options)]
        of_views = extract_views(params, dataset, **options) if own else None
        reports += [] if of_views is None else [of_views]
    _tell(reports, as_json)


def info(path: CachePath, as_json: AsJson = False) -> None:
    """Identity, rows, bad pictures, and rows that look wrong."""
    from duplex.features.inspection import inspect

    _show(inspect(path), as_json)


def verify(
    path: CachePath,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="Whose pictures they are.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="Rows to encode again.")] = 32,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Which rows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Encode a sample of rows again and compare."""
    from duplex.config.artifacts import ArtifactPaths
    from duplex.config.params import load_params
    from duplex.encoders import load_encoder
    from duplex.features.inspection import verify as check
    from duplex.stages.extract import extraction_of, views_of

    params, paths = load_params(), ArtifactPaths()
    if dataset is None:
        places = {place(name).resolve(): name for name in params.datasets for place in (paths.features, paths.views)}
        dataset = places.get(path.resolve())
        if dataset is None:
            raise UsageError(f"{path} is not where params.yaml keeps a cache; say whose it is with --dataset")
    shown = path.resolve() == paths.views(dataset).resolve()
    images, common = (views_of if shown else extraction_of)(params, dataset, paths)
    entry = params.dataset(dataset).encoder
    encoder = load_encoder(entry.name, entry.weights, towers="image", device=params.device, precision=entry.precision)
    where = common["root"], common["manifest_sha256"]
    found = check(path, encoder, images, *where, common.get("augmentation"), sample=sample, seed=seed)
    _show(found, as_json)


def import_(
    features: Annotated[Path, typer.Argument(help="A .npy file [rows, width], one row a manifest row.")],
    manifest: Annotated[Path | None, typer.Option(help="The manifest they follow.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="Instead: a data set's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the cache goes; a data set's own place by default.")] = None,
) -> None:
    """Make a cache from features you already have."""
    from duplex.config.artifacts import ArtifactPaths
    from duplex.data.manifest import manifest_hash, read_manifest
    from duplex.features.importing import import_features
    from duplex.stages.extract import note_extraction

    if (manifest is None) == (dataset is None):
        raise UsageError("name the rows with either --manifest FILE or --dataset NAME")
    paths = ArtifactPaths()
    if dataset is not None:
        manifest, out = paths.manifest(dataset), out or paths.features(dataset)
    if manifest is None or out is None:
        raise UsageError("say where the cache goes with --out PATH")
    import_features(features, len(read_manifest(manifest)), manifest_hash(manifest), out)
    note_extraction(out)
    typer.echo(f"{out} holds {features}", err=True)


def join(
    out: Annotated[Path, typer.Argument(help="The cache whose shards lie beside it.")],
    copy: Annotated[bool, typer.Option("--copy", help="One plain file instead of a view of the shards.")] = False,
) -> None:
    """Make one cache of all shards."""
    from duplex.features.shards import join_shards
    from duplex.stages.extract import note_extraction

    rows = join_shards(out, copy=copy)
    note_extraction(out)
    typer.echo(f"{out} joins {rows} rows", err=True)


def list_encoders(as_json: AsJson = False) -> None:
    """Every encoder: width of its features, weights on disk, number of published weights."""
    from duplex.encoders.catalog import FURTHER, catalog

    entries = catalog()
    if as_json:
        typer.echo(json.dumps([entry.to_dict() for entry in entries], indent=2))
        return
    width = max(len(entry.name) for entry in entries)
    typer.echo(f"{'encoder':{width}}  width  published  on disk")
    for entry in entries:
        typer.echo(f"{entry.name:{width}}  {entry.dim:5}  {len(entry.tags):9}  {', '.join(entry.on_disk) or '-'}")
    typer.echo(f"also: {'; '.join(FURTHER)}")


def convert(
    archive: Annotated[Path, typer.Argument(help="A weights file; OpenAI's TorchScript archives too.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    encoder: Annotated[str, typer.Option(help="The architecture, such as ViT-L-14-quickgelu.")],
    tag: Annotated[str | None, typer.Option(help="The published weights it is, for the preprocessing.")] = None,
) -> None:
    """Turn a weights file into a `local-dir:` folder that loads anywhere, offline. TorchScript archives hold code: only
    convert those you trust."""
    from duplex.encoders.conversion import convert as write

    write(archive, folder, encoder, tag)
    typer.echo(f"the encoder is called local-dir:{folder}", err=True)


def _list_by_default(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        list_encoders(as_json)


def _override(
    params: Params, dataset: str, wanted: dict[str, Any], settings: dict[str, Any], device: str | None
) -> Params:
    """params.yaml with what the command line says instead, checked by the same types."""
    from pydantic import ValidationError

    record = params.model_dump(mode="json", exclude={"methods", "ablations"})
    params.dataset(dataset)
    encoder = record["datasets"][dataset]["encoder"]
    encoder.update({key: None if value == "" else value for key, value in wanted.items() if value is not None})
    record["extraction"].update({key: value for key, value in settings.items() if value is not None})
    encoder["depth"] = settings["depth"] if settings.get("depth") is not None else encoder["depth"]
    record["device"] = device or record["device"]
    try:
        return type(params).model_validate_json(json.dumps(record))
    except ValidationError as error:
        fault = error.errors()[0]
        raise UsageError(f"--{str(fault['loc'][-1]).replace('_', '-')} {fault['input']!r}: {fault['msg']}") from error


def _refuse_few_views(params: Params, dataset: str, shard: tuple[int, int]) -> None:
    """Before anything is encoded: there may be fewer batches of views than of pictures."""
    from duplex.config.artifacts import ArtifactPaths
    from duplex.features.shards import extent
    from duplex.stages.extract import views_of

    augmentation = params.augmentation(dataset)
    if augmentation is not None:
        images, settings = views_of(params, dataset, ArtifactPaths())
        extent(augmentation.count * len(images), settings["batch_size"], shard, ArtifactPaths().views(dataset))


def _refuse_slow(params: Params, dataset: str) -> None:
    """fp16 is ten times slower than float32 on a CPU, and no closer to it than bf16 is by much; tf32 is not there."""
    from duplex.encoders import resolve_device

    precision = params.dataset(dataset).encoder.precision
    faults = {"fp16": "fp16 on a CPU is far slower than fp32", "tf32": "tf32 is arithmetic of GPUs"}
    if precision in faults and resolve_device(params.device) == "cpu":
        raise UsageError(f"{faults[precision]}; choose --precision bf16 or fp32, or --device cuda")


def _parse_workers(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise UsageError(f"--num-workers {text!r} must be a number of processes, such as 0 or 3, or auto")
    return text if text == "auto" else int(text)


def _parse_shard(text: str) -> tuple[int, int]:
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal()):
        raise UsageError(f"--shard {text!r} must read k/N, such as 0/4")
    return int(k), int(n)


def _extract_on_ray(
    params: Params, dataset: str, out: Path | None, shards: int, options: dict[str, Any], *, views: bool
) -> list[ExtractionReport]:
    from duplex.config.artifacts import ArtifactPaths
    from duplex.features.ray_engine import EncoderSpec, extract_on_ray
    from duplex.features.shards import join_shards
    from duplex.stages.extract import extraction_of, note_extraction, note_views, views_of

    paths = ArtifactPaths()
    entry, out = params.dataset(dataset).encoder, out or paths.features(dataset)
    spec = EncoderSpec(entry.name, entry.weights, params.device, entry.precision)
    wanted = {out: extraction_of(params, dataset, paths)}
    if views and params.augmentation(dataset) is not None:
        wanted[paths.views(dataset)] = views_of(params, dataset, paths)
    reports = []
    for place, (images, settings) in wanted.items():
        root = settings.pop("root")
        reports += extract_on_ray(images, root, place, spec, shards=shards, **settings, **options)
        join_shards(place)
    note_extraction(out)
    if views:
        note_views(params, dataset, paths)
    return reports


def _tell(reports: list[ExtractionReport], as_json: bool) -> None:
    """What happened, bad pictures listed; on stdout only what was asked for."""
    for report in reports:
        typer.echo("\n".join(report.lines()), err=True)
    if as_json:
        typer.echo(json.dumps([{"path": str(report.path), **report.to_dict()} for report in reports], indent=2))


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        if isinstance(value, dict) and value:
            for name, part in value.items():
                typer.echo(f"{key}.{name}: {part}")
        else:
            typer.echo(f"{key}: {'none' if value in (None, {}) else value}")
