"""Features of images that are found by the content of their files, for all data sets that share a folder of caches.

    FOLDER/features-KEY/LIST.h5    KEY stands for an encoder, LIST for the images and for what is stored of them

A cache that has all wanted images is used as it is. Otherwise one with these images is written, with rows from the
others where possible, and those that it makes superfluous are removed. Who keeps features for later therefore keeps
`SharedFeatures`, which finds the images again, and no path.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from duplex.data.contents import change_error
from duplex.encoders.base import Encoder
from duplex.errors import DuplexError
from duplex.features.copies import rows_by_content, stores
from duplex.features.extract import BadImage, check_share_of_bad, extract
from duplex.features.file import (
    FIRST_BAD,
    Identity,
    cache_identity,
    claim_cache,
    open_cache,
    read_identity,
    status_reason,
)
from duplex.labels import Ints
from duplex.system.files import json_digest


def user_cache() -> Path:
    """The default folder of feature caches: `duplex` in XDG_CACHE_HOME, else in ~/Library/Caches or ~/.cache."""
    home = Path.home()
    default = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "duplex"


@dataclass(frozen=True)
class SharedFeatures:
    """The features of some images in a folder of caches."""

    folder: Path  # of one encoder
    identity: Identity  # the encoder, and what a cache of the images must store
    digests: tuple[str, ...]  # sha256 of each image file; "" for a missing one

    def find(self) -> tuple[Path, Ints] | None:
        """A cache that has all images, and each one's row; -1 for a missing file. None if no cache has all."""
        wanted = [bytes.fromhex(digest) for digest in self.digests]
        for path in sorted(self.folder.glob("*.h5")):
            rows = rows_by_content(path, self.identity, bad=True)
            if rows and all(key in rows for key in wanted if key):
                return path, np.array([rows.get(key, -1) for key in wanted], dtype=np.int64)
        return None

    def require(self) -> tuple[Path, Ints]:
        """As `find`; raises `DuplexError` if no cache has all images, for example because the folder was emptied."""
        if found := self.find():
            return found
        raise DuplexError(f"{self.folder} no longer has the features of all images; encode them again")


def encode_shared(
    folder: Path,
    encoder: Encoder,
    root: Path,
    images: Sequence[str],
    digests: Sequence[str],
    *,
    tokens: str = "none",
    block_inputs: int = 0,
    bits: int = 16,
    max_bad: float = 0.01,
) -> tuple[SharedFeatures, list[BadImage]]:
    """Encode those images that no cache in a folder has; return the features of all, and the images without features.

    Options are those of `extract`; `digests` has the sha256 of each image file, "" for a missing one. Raises
    `DuplexError` if too many images cannot be read, or one changed while it was being encoded.
    """
    place = folder / f"features-{json_digest(encoder.identity.to_dict())[:16]}"
    paths = {digest: image for digest, image in zip(digests, images, strict=True) if digest}
    listed = sorted(paths)
    key = hashlib.sha256("\n".join([*listed, ""]).encode()).hexdigest()
    identity = cache_identity(encoder.identity.to_dict(), key, tokens, None, block_inputs, bits)
    features = SharedFeatures(place, identity, tuple(digests))
    if listed and features.find() is None:
        others = [*place.glob("*.h5"), *place.glob("*.h5.partial")]
        out = place / f"{json_digest(identity)[:16]}.h5"
        extract(
            [paths[digest] for digest in listed],
            root,
            out,
            encoder,
            manifest_sha256=key,
            tokens=tokens,
            block_inputs=block_inputs,
            bits=bits,
            max_bad=max_bad,
            reuse=[other for other in others if other.name.removesuffix(".partial") != out.name],
        )
        rows = rows_by_content(out, identity, bad=True)
        if changed := [digest for digest in listed if bytes.fromhex(digest) not in rows]:
            raise change_error(root / paths[changed[0]])
        _remove_superfluous(out, others)
    bad = (
        _bad_images(features, images)
        if listed
        else [BadImage(row, image, "missing") for row, image in enumerate(images)]
    )
    check_share_of_bad(bad, len(images), max_bad)
    return features, bad


def _bad_images(features: SharedFeatures, images: Sequence[str]) -> list[BadImage]:
    path, rows = features.require()
    with open_cache(path) as file:
        statuses = file["status"][...]
    bad = []
    for number, (row, image) in enumerate(zip(rows.tolist(), images, strict=True)):
        if row < 0:
            bad.append(BadImage(number, image, "missing"))
        elif statuses[row] >= FIRST_BAD:
            bad.append(BadImage(number, image, status_reason(statuses[row])))
    return bad


def _remove_superfluous(cache: Path, others: Sequence[Path]) -> None:
    """Remove those of the other caches of an encoder, finished or not, of which `cache` has all rows and data sets."""
    with open_cache(cache) as file:
        identity = read_identity(file)
    kept = rows_by_content(cache, identity)
    for other in others:
        final = other.with_name(other.name.removesuffix(".partial"))
        with suppress(DuplexError), claim_cache(final):
            with open_cache(other) as file:
                stored = read_identity(file)
            if final != cache and stores(identity, stored) and rows_by_content(other, stored).keys() <= kept.keys():
                other.unlink()
