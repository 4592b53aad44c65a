"""A data set in pieces: which rows a shard holds, where it lies, and one cache that joins them."""

from __future__ import annotations

from pathlib import Path

from duplex.errors import UsageError
from duplex.features.store import Span


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
