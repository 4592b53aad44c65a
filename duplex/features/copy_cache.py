"""A cache for another manifest of the same pictures in the same order: rows are copied, not encoded again."""

from __future__ import annotations

from pathlib import Path

from duplex.errors import DuplexError
from duplex.features.identity import Identity, difference
from duplex.features.layout import PENDING, Span, open_file, partial_path, read_identity, read_span, refuse_foreign
from duplex.features.shards import copy_rows, shapes_of
from duplex.features.store import EXTRACTION
from duplex.system.lock import sole_writer


def reuse(source: Path, expected: Identity, out: Path, identity: Identity) -> bool:
    """Copy the finished cache `source` to `out` under another identity, where it is what is `expected` of it and there
    is nothing at `out` yet; whether it was. The file is byte for byte that of an extraction."""
    if out.exists() or partial_path(out).exists():
        return False
    try:
        with open_file(source) as file:
            span, shapes = read_span(file), shapes_of(file)
            fits = span.whole and not (file["mark"][...] == PENDING).any()
            if not fits or difference(read_identity(file), expected):
                return False
    except DuplexError:  # whoever needs that file is told then
        return False
    refuse_foreign(out)
    with sole_writer(out, *EXTRACTION):
        copy_rows(out, [source], [Span(0, span.total, span.total)], identity, shapes)
    return True
