"""Shards of a feature cache: files beside it that each hold some of its rows, joined at the end."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from duplex.errors import DuplexError, UsageError
from duplex.features.file import (
    BLOCK,
    CONTENTS,
    DATASETS,
    NEGATIVE_CHECKSUMS,
    NEGATIVES,
    PENDING,
    Identity,
    PartialCache,
    Span,
    claim_cache,
    extract_command,
    first_difference,
    open_cache,
    read_identity,
    read_row_span,
    read_rows,
    row_bytes,
    value_names,
)


def plan_shard(total: int, batch_size: int, shard: tuple[int, int] | None, out: Path) -> tuple[Span, Path]:
    """Rows and file of the shard (k, n), part k (from 0) of n; for None, all rows and `out`.

    Shards begin where batches begin, so their features equal those of a whole extraction.
    """
    if total == 0:
        raise UsageError("the manifest lists no images, so there are none to encode; add images to the data set")
    if shard is None:
        return Span(0, total, total), out
    k, n = shard
    if not 0 <= k < n:
        raise UsageError(f"shard {k}/{n} does not exist; expected k/N with k from 0 to N - 1, such as 0/4")
    batches = math.ceil(total / batch_size)
    if n > batches:
        raise UsageError(f"{total} images make {batches} batches, too few for {n} shards; use at most {batches} shards")
    start = batches * k // n * batch_size
    stop = min(total, batches * (k + 1) // n * batch_size)
    return Span(start, stop, total), shard_path(out, k, n)


def shard_path(out: Path, k: int, n: int) -> Path:
    return out.with_name(f"{out.stem}.shard-{k}-of-{n}{out.suffix}")


def find_shards(out: Path) -> list[Path]:
    """Paths of all shards of the cache `out`, in order; raises `DuplexError` if one is missing."""
    pattern = re.compile(re.escape(out.stem) + r"\.shard-(\d+)-of-(\d+)" + re.escape(out.suffix))
    found = {path: pattern.fullmatch(path.name) for path in out.parent.glob("*")}
    shards = {path: match for path, match in found.items() if match}
    counts = {int(match[2]) for match in shards.values()}
    if not counts:
        raise DuplexError(f"{out} has no shards; run `{extract_command(out, 'k/N')}` for each k from 0 to N - 1")
    if len(counts) > 1:
        raise DuplexError(f"{out} has sets of {' and '.join(map(str, sorted(counts)))} shards; delete all but one set")
    n = counts.pop()
    paths = [shard_path(out, k, n) for k in range(n)]
    for k, path in enumerate(paths):
        if path not in shards:
            command = extract_command(out, f"{k}/{n}")
            raise DuplexError(f"shard {k}/{n} of {out} is not finished; `{command}` finishes it")
    return paths


def join_shards(out: Path) -> int:
    """Join all shards into the cache `out`, as if made without shards; returns the number of rows."""
    paths = find_shards(out)
    identity: Identity = {}
    shapes: dict[str, tuple[int, ...]] = {}
    constants: dict[str, NDArray[Any]] = {}
    end = total = 0
    again = f"run `{extract_command(out, f'k/{len(paths)}')}` for each k from 0 to {len(paths) - 1}"
    for path in paths:
        with open_cache(path) as file:
            here = read_identity(file)
            span = read_row_span(file)
            key = first_difference(identity or here, here)
            if key:
                raise DuplexError(f"{path} and {paths[0]} differ in their {key}; {again}")
            if (file["status"][...] == PENDING).any():
                raise DuplexError(f"{path} has rows that were never encoded; extract this shard again")
            if span.start != end:
                raise DuplexError(
                    f"{path} starts at row {span.start}, but the shard before it ends at row {end}; extract all shards "
                    "with the same extraction.batch_size"
                )
            identity = identity or here
            end = span.stop
            total = span.total
            constants = {name: file[name][...] for name in (NEGATIVES, NEGATIVE_CHECKSUMS) if name in file}
            shapes = {name: file[name].shape[1:] for name in DATASETS if name in file}
    if end != total:
        raise DuplexError(f"{paths[-1]} ends at row {end} of {total}, so it is not the last shard; {again}")
    tokens = {name: shapes[name] for name in value_names(shapes) if name != "cls"}
    step = max(1, BLOCK // sum(row_bytes(name, shape) for name, shape in shapes.items()))  # rows
    whole = Span(0, total, total)
    with (
        claim_cache(out),
        closing(PartialCache.create(out, identity, whole, int(identity["dim"]), tokens, constants)) as cache,
    ):
        for path in paths:
            with open_cache(path) as file:
                span = read_row_span(file)
                for start in range(0, span.rows, step):
                    rows = slice(start, start + step)
                    values = {name: read_rows(file, name, rows) for name in value_names(shapes)}
                    values[CONTENTS] = file[CONTENTS][rows]
                    cache.write(span.start + start, file["status"][rows], **values)
        cache.finish()
    return total
