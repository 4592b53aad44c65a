"""Copy rows from one cache to another.

Images encoded before are found by the content of their files, in caches of the same encoder. Shards, files with a part
of a cache's rows each, are joined to the whole.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from duplex.data.contents import file_digests
from duplex.errors import DuplexError, UsageError
from duplex.features.file import (
    CONTENTS,
    COPIED,
    DATASETS,
    ENCODED,
    PENDING,
    REQUIRED,
    ROOT,
    SHA256,
    Contents,
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

CHUNK = 2**26  # bytes copied at once
OWN = ("manifest", ROOT, "limit", "tokens", "block_inputs", "bits")  # settings that do not identify the encoder
LARGEST_CHOICE = 1024  # rows that h5py reads at once fast, if they are not neighbours


def image_contents(root: Path, images: Sequence[str]) -> Contents:
    """The sha256 of each image file below `root` as bytes [N, 32]; zero for one that is missing or may not be read."""
    digests = [bytes.fromhex(digest) or bytes(SHA256) for digest in file_digests(root, images)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, SHA256)


def stores(identity: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a cache with one identity has, from the same encoder, all data sets of a cache with the other."""
    same_encoder = all(identity.get(key) == wanted.get(key) for key in {*identity, *wanted} - set(OWN))
    needed = [key for key in ("tokens", "block_inputs") if key in wanted]
    if "block_inputs" in wanted:
        needed.append("bits")
    return same_encoder and all(identity.get(key) == wanted.get(key) for key in needed)


def rows_by_content(path: Path, wanted: Mapping[str, str], *, bad: bool = False) -> dict[bytes, int]:
    """The row of each encoded image in a cache, by its content; `bad`: also the rows of images without features.

    Empty if the cache lacks something that a cache with the identity `wanted` stores, or cannot be read.
    """
    try:
        with open_cache(path) as file:
            if not stores(read_identity(file), wanted):
                return {}
            contents = file[CONTENTS][...]
            statuses = file["status"][...]
            encoded = (statuses != PENDING) & (statuses != COPIED) if bad else statuses == ENCODED
    except DuplexError:  # reported where the cache itself is used
        return {}
    return {contents[row].tobytes(): row for row in np.flatnonzero(encoded & contents.any(axis=1)).tolist()}


def copy_equal_rows(cache: PartialCache, contents: Contents, sources: Iterable[Path]) -> None:
    """Copy pending rows of an unfinished cache from caches that have the same images.

    contents: sha256 [N, 32] of the cache's images.
    """
    keys = [content.tobytes() for content in contents]
    for source in sources:
        known = rows_by_content(source, cache.identity)
        places = [row for row in np.flatnonzero(cache.statuses == PENDING).tolist() if keys[row] in known]
        if not places:
            continue
        try:
            _copy(cache, contents, places, source, [known[keys[row]] for row in places])
        except DuplexError as error:
            print(f"{error}; its other rows are not used", file=sys.stderr)
        cache.commit()


def _copy(cache: PartialCache, contents: Contents, places: list[int], source: Path, rows: list[int]) -> None:
    size = sum(row_bytes(name, cache.shapes[name]) for name in cache.names)
    step = min(LARGEST_CHOICE, max(1, CHUNK // size))
    with open_cache(source) as file:
        for start in range(0, len(places), step):
            some = np.array(places[start : start + step])
            chosen, back = np.unique(rows[start : start + step], return_inverse=True)
            values = {name: read_rows(file, name, chosen)[back] for name in cache.names}
            cache.write(some, np.full(len(some), COPIED, np.uint8), contents=contents[some], **values)


RowTypes = dict[str, np.dtype[Any]]  # by data set: type of a whole row, such as 16 x float16


def plan_shard(total: int, batch_size: int, shard: tuple[int, int] | None, out: Path) -> tuple[Span, Path]:
    """The rows of a shard (k, n), the k-th of n from 0, and the path of its file; None: all rows, and `out`.

    A shard begins where a batch begins, so that its features equal those of an extraction without shards. Raises
    `UsageError` for a shard that does not exist and for more shards than batches.
    """
    if total == 0:
        raise UsageError("there is no image to extract: the manifest is empty, or --limit is 0")
    if shard is None:
        return Span(0, total, total), out
    k, n = shard
    if not 0 <= k < n:
        raise UsageError(f"shard {k}/{n} does not exist; expected k/N with k from 0 to N - 1, such as 0/4")
    batches = math.ceil(total / batch_size)
    if n > batches:
        raise UsageError(f"{total} images make {batches} batches, too few for {n} shards; use at most {batches}")
    start = batches * k // n * batch_size
    stop = min(total, batches * (k + 1) // n * batch_size)
    return Span(start, stop, total), shard_path(out, k, n)


def shard_path(out: Path, k: int, n: int) -> Path:
    return out.with_name(f"{out.stem}.shard-{k}-of-{n}{out.suffix}")


def find_shards(out: Path) -> list[Path]:
    """The paths of all shards of the cache `out`, in order. Raises `DuplexError` if one is missing."""
    pattern = re.compile(re.escape(out.stem) + r"\.shard-(\d+)-of-(\d+)" + re.escape(out.suffix))
    shards = {path: match for path in out.parent.glob("*") if (match := pattern.fullmatch(path.name))}
    counts = {int(match[2]) for match in shards.values()}
    if not counts:
        raise DuplexError(f"there is no shard of {out}; `{extract_command(out, '0/N')}` writes the first")
    if len(counts) > 1:
        raise DuplexError(f"{out.parent} has shards k-of-n with n in {sorted(counts)}; remove those of the wrong n")
    n = counts.pop()
    paths = [shard_path(out, k, n) for k in range(n)]
    for k, path in enumerate(paths):
        if path not in shards:
            command = extract_command(out, f"{k}/{n}")
            raise DuplexError(f"shard {k} of {n} of {out} is not finished; `{command}` finishes it")
    return paths


def join_shards(out: Path) -> int:
    """Join all shards of the cache `out`, byte for byte as an extraction without shards; returns its number of rows."""
    paths = find_shards(out)
    identity, spans, types = _read_headers(paths)
    with claim_cache(out):
        copy_rows(out, paths, spans, identity, types)
    return spans[-1].total


def _read_headers(paths: list[Path]) -> tuple[Identity, list[Span], RowTypes]:
    """Identity and row types that all shards share, and each one's rows; raises `DuplexError` if they differ."""
    identities: list[Identity] = []
    spans: list[Span] = []
    types: RowTypes = {}
    for path in paths:
        with open_cache(path) as file:
            identity = read_identity(file)
            span = read_row_span(file)
            if identities and (key := first_difference(identities[0], identity)):
                raise DuplexError(f"{path} was made with another {key} than {paths[0]}; extract it again with --fresh")
            if span.start != (spans[-1].stop if spans else 0) or (file["status"][...] == PENDING).any():
                raise DuplexError(f"{path} does not continue the shard before it; extract all with one --batch-size")
            identities.append(identity)
            spans.append(span)
            types = row_types(file)
    if spans[-1].stop != spans[-1].total:
        end = f"ends at row {spans[-1].stop} of {spans[-1].total}"
        raise DuplexError(f"{paths[-1]}, the last shard, {end}; extract all shards from one manifest")
    return identities[-1], spans, types


def row_types(file: Any) -> RowTypes:
    """The dtype of a whole row, such as 16 x float16, of each data set of an open cache."""
    return {name: np.dtype((file[name].dtype, file[name].shape[1:])) for name in DATASETS if name in file}


def copy_rows(out: Path, paths: list[Path], spans: list[Span], identity: Identity, types: RowTypes) -> None:
    """Write the cache `out` from all rows of the caches at `paths`, one after another."""
    total = spans[-1].total
    token_shapes = {name: row.shape for name, row in types.items() if name not in REQUIRED}
    step = max(1, CHUNK // sum(row.itemsize for row in types.values()))  # rows
    whole = Span(0, total, total)
    with closing(PartialCache.create(out, identity, whole, int(identity["dim"]), token_shapes)) as cache:
        for path, span in zip(paths, spans, strict=True):
            with open_cache(path) as file:
                for start in range(0, span.rows, step):
                    rows = slice(start, start + step)
                    values = {name: read_rows(file, name, rows) for name in value_names(types)}
                    values[CONTENTS] = file[CONTENTS][rows]
                    cache.write(span.start + start, file["status"][rows], **values)
        cache.finish()
