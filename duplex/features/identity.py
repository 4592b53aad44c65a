"""What a cache was made by, and whether that is what is asked for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError

Identity = dict[str, str]
LIBRARIES = ("torch", "open_clip_torch", "pillow")  # recorded; they decide the last bits, not the meaning
SHARD = re.compile(r"(?P<stem>.+)\.shard-(?P<k>\d+)-of-(?P<n>\d+)(?P<suffix>\.\w+)?")  # a shard's name
IMPORTED = "imported"  # the encoder's name in a cache made from somebody's own features
SPOKEN = {
    "encoder": "encoder",
    "architecture": "encoder architecture",
    "weights": "weights file",
    "preprocessing": "preprocessing",
    "precision": "precision",
    "manifest": "manifest",
    "dim": "feature width",
    "tokens": "token choice",
    "depth": "depth",
    "bits": "number of bits",
    "deep_rows": "choice of deep rows",
    "views": "number of views",
    "flip": "choice of mirrored views",
}


def check_identity(stored: Mapping[str, str], expect: Mapping[str, str | None], path: Path) -> None:
    """Refuse a cache that is not what is expected, naming what differs and the command that repairs it. What is None
    must not be there; library versions may differ. Of imported features only what their owner vouched for is known:
    the rows and their width."""
    imported = stored.get("encoder") == IMPORTED
    compared = ("manifest", "dim") if imported else [*SPOKEN, *sorted(set(expect) - set(SPOKEN) - set(LIBRARIES))]
    for key in compared:
        if key in expect and stored.get(key) != expect[key]:
            differs = f"another {SPOKEN.get(key, key)} ({_short(stored.get(key))}, not {_short(expect[key])})"
            raise DuplexError(f"{path} was made with {differs}; {repair(path, imported=imported)}")
    if "views" in stored and "views" not in expect:
        raise DuplexError(f"{path} holds views of training pictures, not the pictures; {repair(path)}")
    if "limit" in stored and "limit" not in expect:
        raise DuplexError(f"{path} holds only the first {stored['limit']} rows; {repair(path)}")


def cache_identity(
    encoder: Identity,
    manifest_sha256: str,
    tokens: str = "none",
    limit: int | None = None,
    depth: int = 0,
    bits: int = 16,
    held: NDArray[np.bool_] | None = None,
) -> Identity:
    """All that a cache's bytes depend on; `held` are the rows of which what enters the last blocks is kept."""
    found = {**encoder, "manifest": manifest_sha256}
    if tokens != "none":
        found["tokens"] = tokens
    if limit is not None:
        found["limit"] = str(limit)
    if depth:
        found["depth"] = str(depth)
        if bits != 16:
            found["bits"] = str(bits)
        if held is not None:
            found["deep_rows"] = hashlib.sha256(np.packbits(held).tobytes()).hexdigest()
    return found


def difference(stored: Mapping[str, str], expect: Mapping[str, str]) -> str | None:
    """The first key, spoken, in which two identities differ, library versions included; what others follow from comes
    before them."""
    for key in [*SPOKEN, *sorted({*stored, *expect} - set(SPOKEN))]:
        if stored.get(key) != expect.get(key):
            return SPOKEN.get(key, f"{key} version" if key in LIBRARIES else key)
    return None


def repair(path: Path, *, imported: bool = False) -> str:
    """The command that makes a cache, or a shard of one, again."""
    if imported:
        return f"`duplex cache import FILE --dataset {_dataset(path) or 'NAME'}` makes it again"
    shard = SHARD.fullmatch(path.name)
    if shard is None:
        return f"`{extraction(path)}` makes it again"
    whole, piece = path.with_name(shard["stem"] + (shard["suffix"] or "")), f"{shard['k']}/{shard['n']}"
    return f"`{extraction(whole, piece)}` makes it again"


def extraction(path: Path, shard: str | None = None) -> str:
    """The command that makes a cache, or a shard of it, `k/n`."""
    dataset, piece = _dataset(path), "" if shard is None else f" --shard {shard}"
    place = dataset or f"NAME --out {path}"
    return f"duplex extract --dataset {place}{piece}"


def _dataset(path: Path) -> str:
    """Whose cache lies there, where the place tells it."""
    return path.parent.name if path.name == "features.h5" else ""


def _short(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= 40 else f"{value[:12]}…"
