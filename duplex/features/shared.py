"""The user's shared cache: features of images by their files' content, for data outside of a project.

A cache that has all wanted images is used as it is. Otherwise a new one is written, into which
rows of the others are copied, and caches that are then superfluous are removed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from duplex.data.contents import change_error
from duplex.errors import DuplexError
from duplex.features.encode import encoding_code
from duplex.features.extract import (
    BadImage,
    ExtractionSettings,
    check_share_of_bad,
    extract,
    has_outputs_of,
    rows_by_content,
)
from duplex.features.file import (
    ENCODING,
    FIRST_BAD,
    Features,
    Identity,
    claim_cache,
    open_cache,
    read_features,
    read_identity,
    status_reason,
)
from duplex.labels import Ints
from duplex.system.files import json_digest

if TYPE_CHECKING:
    from duplex.encoders.base import Encoder


def user_cache() -> Path:
    """The default folder of caches: `duplex` in XDG_CACHE_HOME, ~/Library/Caches or ~/.cache."""
    home = Path.home()
    default = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "duplex"


@dataclass(frozen=True)
class SharedFeatures:
    """Finds the features of given images in a folder of caches, whichever has them at that time."""

    folder: Path  # of one encoder
    identity: Identity  # the encoder, and what a cache of the images must store
    digests: tuple[str, ...]  # sha256 of each image file; "" for a missing one

    def find(self) -> tuple[Path, Ints] | None:
        """A cache that has all images, and each image's row (-1: missing file); None if there is none."""
        wanted = [bytes.fromhex(digest) for digest in self.digests]
        for path in sorted(self.folder.glob("*.h5")):
            rows = rows_by_content(path, self.identity, bad=True)
            if rows and all(key in rows for key in wanted if key):
                return path, np.array([rows.get(key, -1) for key in wanted], dtype=np.int64)
        return None

    def require(self) -> tuple[Path, Ints]:
        """As `find`; raises `DuplexError` if no cache has all images."""
        if found := self.find():
            return found
        raise DuplexError(f"{self.folder} no longer has the features of all images; `load_dataset` encodes them again")


def encode_shared(
    folder: Path,
    encoder: Encoder,
    root: Path,
    images: Sequence[str],
    digests: Sequence[str],
    *,
    tokens: str = "none",
    block_inputs: int = 0,
    max_bad: float = 0.01,
) -> tuple[SharedFeatures, list[BadImage]]:
    """Encode images that no cache in the folder has; returns all, and images without features.

    `digests`: sha256 of files, "" if missing. Raises `DuplexError` if a file changes meanwhile.
    """
    paths = {digest: image for digest, image in zip(digests, images, strict=True) if digest}
    listed = sorted(paths)
    key = hashlib.sha256("\n".join([*listed, ""]).encode()).hexdigest()
    settings = ExtractionSettings(root, key, tokens=tokens, block_inputs=block_inputs, max_bad=max_bad)
    identity = settings.identity(encoder)
    tower = {**encoder.identity.to_dict(), ENCODING: identity[ENCODING]}
    place = folder / f"features-{json_digest(tower)[:16]}"
    features = SharedFeatures(place, identity, tuple(digests))
    if listed and features.find() is None:
        others = [*place.glob("*.h5"), *place.glob("*.h5.partial")]
        out = place / f"{json_digest(identity)[:16]}.h5"
        reuse = [other for other in others if other.name.removesuffix(".partial") != out.name]
        extract([paths[digest] for digest in listed], out, encoder, settings, reuse=reuse)
        rows = rows_by_content(out, identity, bad=True)
        if changed := [digest for digest in listed if bytes.fromhex(digest) not in rows]:
            raise change_error(root / paths[changed[0]])
        _remove_superfluous(out)
    reasons = ["missing"] * len(images)
    if listed:
        path, places = features.require()
        with open_cache(path) as file:
            statuses = file["status"][...]
        found = np.where(places < 0, FIRST_BAD, statuses[places]).tolist()
        reasons = [status_reason(status) if status >= FIRST_BAD else "" for status in found]
    named = zip(images, reasons, strict=True)
    bad = [BadImage(row, image, reason) for row, (image, reason) in enumerate(named) if reason]
    check_share_of_bad(bad, len(images), max_bad)
    return features, bad


def find_cached_features(folder: Path, digests: Sequence[str]) -> Features | None:
    """CLS features of images by sha256, from the cache with most of them; None if none is cached."""
    best = None
    rows = np.full(len(digests), -1)
    for path in sorted(folder.glob("features-*/*.h5"), key=lambda path: -path.stat().st_mtime):
        with suppress(DuplexError):  # of an older version, say
            with open_cache(path) as file:
                identity = read_identity(file)
            if identity.get(ENCODING) != encoding_code(identity["encoder"]):
                continue
            places = rows_by_content(path, identity)
            found = np.array([places.get(bytes.fromhex(digest), -1) for digest in digests])
            if (found >= 0).sum() > (rows >= 0).sum():
                best = path
                rows = found
    if best is None:
        return None
    cache = read_features(best)
    statuses = np.where(rows < 0, FIRST_BAD, cache.statuses[rows]).astype(np.uint8)
    return replace(cache, cls=cache.cls[rows], statuses=statuses)


def _remove_superfluous(cache: Path) -> None:
    """Remove other caches whose images and outputs are all in `cache`, also those of older code."""
    with open_cache(cache) as file:
        identity = read_identity(file)
    kept = rows_by_content(cache, identity)
    folder = cache.parent.parent
    for other in [*folder.glob("features-*/*.h5"), *folder.glob("features-*/*.h5.partial")]:
        final = other.with_name(other.name.removesuffix(".partial"))
        with suppress(DuplexError):
            with open_cache(other) as file:
                stored = read_identity(file)
            stored_now = {**stored, ENCODING: identity[ENCODING]}
            if final == cache or not has_outputs_of(identity, stored_now):
                continue
            with claim_cache(final):
                if rows_by_content(other, stored).keys() <= kept.keys():
                    other.unlink()
            with suppress(OSError):  # it holds other caches
                other.parent.rmdir()
