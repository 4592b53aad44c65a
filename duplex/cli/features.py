"""`duplex extract`, `cache` and `encoders`: extract features, manage caches, list encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from duplex.cli import AsJson, Dataset, Engine, app, dataset_option, load_params, log, print_json, seed_option
from duplex.errors import UsageError

CacheFile = Annotated[Path | None, Option(help="File to write; default: artifacts/DATASET/features.h5.")]
CachePath = Annotated[Path, Argument(help="Feature cache, such as artifacts/shapes/features.h5.")]

cache = typer.Typer(help="Inspect and verify feature caches, and join their shards.", no_args_is_help=True)
app.add_typer(cache, name="cache")
encoders = typer.Typer(help="List frozen encoders, and convert weights files.", invoke_without_command=True)
app.add_typer(encoders, name="encoders")


@app.command()
def extract(
    dataset: Dataset,
    shard: Annotated[str | None, Option(help="k/N: encode only shard k (0 to N-1) of N shards.")] = None,
    out: CacheFile = None,
    fresh: Annotated[bool, Option("--fresh", help="Encode all images again.")] = False,
    engine: Engine = "local",
    shards: Annotated[int, Option(min=1, help="Shards to extract in parallel; needs --engine ray.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Encode a data set's images once, by params.yaml, and write its feature cache.

    If the data set's manifest is missing or outdated, it is written first, as by `duplex prepare`.
    The same command resumes an interrupted extraction.
    """
    from duplex.project.extract import extract as extract_stage
    from duplex.project.prepare import ensure_prepared
    from duplex.project.run import ProjectData

    if engine == "ray" and shard is not None:
        count = _parse_shard(shard)[1]
        raise UsageError(f"--engine ray makes all shards; instead of --shard {shard}, use --shards {count}")
    if engine != "ray" and shards != 1:
        one = f"--shard 0/{shards}, then 1/{shards}, and so on"
        raise UsageError(f"--shards needs --engine ray; add it, or make one shard at a time with {one}")
    data = ProjectData(load_params(), dataset)
    ensure_prepared(data)
    if engine == "ray":
        from duplex.project.ray import extract_dataset_on_ray

        reports = extract_dataset_on_ray(data, shards, out, fresh=fresh)
    else:
        part = _parse_shard(shard) if shard else None
        reports = [extract_stage(data, out=out, shard=part, fresh=fresh)]
    for report in reports:
        log("\n".join(report.lines()))
    if as_json:
        print_json([{"path": str(report.path), **report.to_dict()} for report in reports])


@cache.command()
def info(path: CachePath, as_json: AsJson = False) -> None:
    """Print a cache's settings, number of images, and number of unreadable ones by reason."""
    from duplex.features.inspect import inspect

    _print_record(inspect(path), as_json)


@cache.command()
def verify(
    path: CachePath,
    dataset: Annotated[str | None, dataset_option("Data set; default: the one that PATH names.")] = None,
    sample: Annotated[int, Option(min=1, help="Number of images to encode again.")] = 32,
    seed: Annotated[int, seed_option("Seed of the random choice of images.", "--seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Encode a random sample of a cache's images again, and compare with the cache."""
    from duplex.project.extract import verify_cache
    from duplex.project.runs import data_of_cache

    data = data_of_cache(load_params(), path, dataset)
    _print_record(verify_cache(data, path, sample=sample, seed=seed), as_json)


@cache.command()
def join(out: Annotated[Path, Argument(help="Cache file to write, beside its shards.")]) -> None:
    """Copy all shards (parts encoded separately) of a feature cache to one file."""
    from duplex.features.shards import join_shards
    from duplex.project.extract import write_extraction_summary

    rows = join_shards(out)
    write_extraction_summary(out)
    log(f"joined shards: {out} has {rows} rows")


@encoders.command("list")
def list_encoders(as_json: AsJson = False) -> None:
    """List encoders with feature width, size of the weights, licence, and weights on disk.

    `text`: prompts can be encoded; `blocks`: the last blocks of the image tower can be fine-tuned.
    """
    from duplex.encoders.base import all_families
    from duplex.recognition.offers import list_encoders as described

    families = all_families()
    rows = described(families)
    if as_json:
        print_json(rows)
        return
    width = max(len(row["name"]) for row in rows)
    typer.echo(f"{'encoder':{width}}  width      MB  text  blocks  published  on disk; licences")
    for row in rows:
        abilities = [{True: "yes", False: "no", None: "-"}[row[key]] for key in ("text", "blocks")]
        size = "-" if row["megabytes"] is None else f"{row['megabytes']:,}"
        start = f"{row['name']:{width}}  {row['dim']:5}  {size:>6}  {abilities[0]:4}  {abilities[1]:6}"
        typer.echo(f"{start}  {len(row['tags']):9}  {', '.join(row['on_disk']) or '-'}; {row['licence']}")
    typer.echo(f"other names: {'; '.join(family.usage for family in families if family.usage)}")


@encoders.command("convert")
def convert_encoder(
    archive: Annotated[Path, Argument(help="Weights, or one of OpenAI's TorchScript archives.")],
    folder: Annotated[Path, Argument(help="Folder to write the converted encoder to.")],
    encoder: Annotated[str, Option(help="Architecture, such as ViT-L-14-quickgelu.")],
    tag: Annotated[str | None, Option(help="Published weights with ARCHIVE's preprocessing.")] = None,
) -> None:
    """Convert an encoder's weights to a folder that loads offline as `local-dir:FOLDER`.

    TorchScript archives contain code: convert only those you trust.
    """
    from duplex.encoders.open_clip import convert_weights as write

    write(archive, folder, encoder, tag)
    log(f"wrote {folder}; use it as encoder local-dir:{folder}")


@encoders.callback()
def _list_by_default(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        list_encoders(as_json)


def _parse_shard(text: str) -> tuple[int, int]:
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal()):
        raise UsageError(f"--shard is {text!r}; expected k/N, such as 0/4 for the first of 4 shards")
    return int(k), int(n)


def _print_record(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    for key, value in record.items():
        if isinstance(value, dict) and value:
            for name, part in value.items():
                typer.echo(f"{key}.{name}: {part}")
        else:
            typer.echo(f"{key}: {'none' if value in (None, {}) else value}")
