"""A data set in pieces: which rows a shard holds, where it lies, and one cache that joins them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from duplex.errors import DuplexError, UsageError
from duplex.features.identity import Identity, difference, extraction
from duplex.features.layout import (
    HELD,
    OPTIONAL,
    PENDING,
    Bools,
    Span,
    kept_rows,
    open_file,
    read_held,
    read_identity,
    read_span,
    refuse_foreign,
)
from duplex.features.store import EXTRACTION, PartialCache, describe
from duplex.system.files import replaced
from duplex.system.lock import sole_writer

CHUNK = 2**26  # bytes copied at once
Shape = tuple[tuple[int, ...], Any]  # of a row, and its dtype


def extent(total: int, batch_size: int, shard: tuple[int, int] | None, out: Path) -> tuple[Span, Path]:
    """Which rows a run writes, and where. Shards begin where blocks do, so that they hold the unsharded features."""
    if total == 0:
        raise UsageError("there is no picture to extract: the manifest is empty, or --limit is 0")
    if shard is None:
        return Span(0, total, total), out
    k, n = shard
    if not 0 <= k < n:
        raise UsageError(f"shard {k}/{n} does not exist; k counts from 0 to {n - 1}")
    blocks = -(-total // batch_size)
    if n > blocks:
        raise UsageError(f"{total} pictures make {blocks} batches, too few for {n} shards; ask for at most {blocks}")
    start, stop = (min(total, blocks * i // n * batch_size) for i in (k, k + 1))
    return Span(start, stop, total), shard_path(out, k, n)


def shard_path(out: Path, k: int, n: int) -> Path:
    return out.with_name(f"{out.stem}.shard-{k}-of-{n}{out.suffix}")


def find_shards(out: Path) -> list[Path]:
    """The finished shards of `out`, in order; all of them or an error."""
    pattern = re.compile(re.escape(out.stem) + r"\.shard-(\d+)-of-(\d+)" + re.escape(out.suffix))
    found = {path: match for path in out.parent.glob("*") if (match := pattern.fullmatch(path.name))}
    counts = {int(match[2]) for match in found.values()}
    if not counts:
        raise DuplexError(f"there is no shard of {out}; `{extraction(out, '0/N')}` writes the first")
    if len(counts) > 1:
        raise DuplexError(f"{out.parent} has shards of {sorted(counts)} pieces; remove those of the wrong count")
    n = counts.pop()
    paths = [shard_path(out, k, n) for k in range(n)]
    absent = [k for k, path in enumerate(paths) if path not in found]
    if absent:
        raise DuplexError(
            f"shard {absent[0]} of {n} of {out} is not finished; `{extraction(out, f'{absent[0]}/{n}')}` does it"
        )
    return paths


def join_shards(out: Path, *, copy: bool = False) -> int:
    """One cache from all shards of `out`: a virtual one that reads them where they lie, or with `copy` a plain file,
    byte for byte that of an extraction in one piece. Returns its rows."""
    paths = find_shards(out)
    identity, spans, shapes = _agree(paths)
    total = spans[-1].total
    refuse_foreign(out)
    with sole_writer(out, *EXTRACTION):
        if copy:
            copy_rows(out, paths, spans, identity, shapes)
        else:
            _link(out, paths, spans, identity, shapes)
    return total


def _agree(paths: list[Path]) -> tuple[Identity, list[Span], dict[str, Shape]]:
    """What the shards have in common; they must follow one another without a gap."""
    identity: Identity | None = None
    spans: list[Span] = []
    shapes: dict[str, Shape] = {}
    for path in paths:
        with open_file(path, joined=False) as file:
            found, span = read_identity(file), read_span(file)
            if identity is not None and (other := difference(identity, found)):
                raise DuplexError(
                    f"{path} was made with another {other} than {paths[0]}; extract it again with --fresh"
                )
            if span.start != (spans[-1].stop if spans else 0) or (file["mark"][...] == PENDING).any():
                raise DuplexError(f"{path} does not follow the shard before it; extract all with one --batch-size")
            identity = found
            spans.append(span)
            shapes = shapes_of(file)
    if spans[-1].stop != spans[-1].total:
        raise DuplexError(f"{paths[-1]} is not the end of its data set; extract all shards from one manifest")
    assert identity is not None
    return identity, spans, shapes


def shapes_of(file: Any) -> dict[str, Shape]:
    return {name: (file[name].shape[1:], file[name].dtype) for name in file if name != "identity"}


def _held(paths: list[Path]) -> Bools | None:
    """Of which rows what enters the last blocks is kept [total]."""
    parts = []
    for path in paths:
        with open_file(path) as file:
            parts.append(read_held(file))
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


def _link(out: Path, paths: list[Path], spans: list[Span], identity: Identity, shapes: dict[str, Shape]) -> None:
    """Shards are named without their folder: HDF5 looks beside the joined file, so the folder may move."""
    total, held = spans[-1].total, _held(paths)
    with replaced(out) as scratch, h5py.File(scratch, "w", locking="best-effort") as file:
        describe(file, identity, Span(0, total, total))
        for name, (row, dtype) in shapes.items():
            layout = h5py.VirtualLayout((kept_rows(name, slice(0, total), held).stop, *row), dtype)
            for path, span in zip(paths, spans, strict=True):
                place = kept_rows(name, slice(span.start, span.stop), held)
                if rows := place.stop - place.start:
                    layout[place] = h5py.VirtualSource(path.name, name, (rows, *row), dtype)
            file.create_virtual_dataset(name, layout)


def copy_rows(out: Path, paths: list[Path], spans: list[Span], identity: Identity, shapes: dict[str, Shape]) -> None:
    """A plain file of the rows of others, which follow one another."""
    total, held = spans[-1].total, _held(paths)
    beside = {name: shapes[name][0] for name in OPTIONAL if name in shapes and name != HELD}
    chunk = max(1, CHUNK // sum(int(np.prod(row)) * dtype.itemsize for row, dtype in shapes.values()))  # rows
    cache = PartialCache.create(out, identity, Span(0, total, total), int(identity["dim"]), beside, held)
    try:
        for path, span in zip(paths, spans, strict=True):
            with open_file(path) as file:
                for start in range(0, span.rows, chunk):
                    rows, own = slice(start, start + chunk), read_held(file)
                    names = [name for name in shapes if name not in ("mark", HELD)]
                    values = {name: file[name][kept_rows(name, rows, own)] for name in names}
                    cache.write(span.start + start, file["mark"][rows], **values)
        cache.finish()
    finally:
        cache.close()
