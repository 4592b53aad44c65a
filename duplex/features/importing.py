"""Import features that were computed elsewhere into a feature cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from duplex.errors import DuplexError, UsageError
from duplex.features.checks import open_cache, read_identity
from duplex.features.feature_file import FeatureFile
from duplex.features.identity import IMPORTED, Identity, extract_command
from duplex.features.layout import ALL_ZERO, ENCODED, NOT_FINITE, Span
from duplex.features.store import PartialCache, claim_cache
from duplex.system.files import sha256, sha256_once

CHUNK = 65_536  # rows converted at once


def import_features(
    source: Path,
    rows: int,
    manifest_sha256: str,
    out: Path,
    images: Sequence[str] | None = None,
    max_bad: float = 1.0,
) -> Identity:
    """Write the feature cache `out` from a user's file of features (`features.feature_file`).

    Images whose features are zero or not finite count as unreadable. Returns the cache's identity, which names only the
    file and the manifest, since the encoder is unknown.

    Args:
        source: the .npy or .npz file.
        rows: number of manifest rows.
        manifest_sha256: sha256 of the manifest file.
        out: the cache's file.
        images: the manifest's image paths, by which the rows of a file with names are found.
        max_bad: largest share of images that may count as unreadable.

    Raises:
        UsageError: the file lacks an image, has another number of rows, or has values that float16 cannot hold.
        DuplexError: too many images count as unreadable; an existing cache stays as it is.
    """
    file = FeatureFile.open(source)
    if images is None and file.names is not None:
        raise UsageError(f"{source} has image names and no manifest to find them in; give its array alone, as .npy")
    places = file.rows_of(images if images is not None else [""] * rows)
    unusable = file.unusable(places)
    if unusable.sum() > max_bad * rows:
        first = int(unusable.argmax())
        raise DuplexError(
            f"{source}: {int(unusable.sum())} of {rows} rows are zero or not finite, the first that of "
            f"{first if images is None else images[first]}; leave these images out, or raise extraction.max_bad in "
            "params.yaml"
        )
    identity = {
        "encoder": IMPORTED,
        "weights": sha256(source),
        "precision": str(file.values.dtype),
        "dim": str(file.width),
        "manifest": manifest_sha256,
    }
    with claim_cache(out), closing(PartialCache.create(out, identity, Span(0, rows, rows), file.width)) as cache:
        try:
            for start in range(0, rows, CHUNK):
                bad = unusable[start : start + CHUNK]
                values = file.values[places[start : start + CHUNK]]
                reason = np.where(np.isfinite(values).all(axis=1), ALL_ZERO, NOT_FINITE)
                statuses = np.where(bad, reason, ENCODED).astype(np.uint8)
                cache.write(start, statuses, cls=np.where(bad[:, None], 0, values).astype(np.float16))
            cache.finish()
        except BaseException:
            cache.partial.unlink(missing_ok=True)
            raise
    return identity


def require_imported(source: Path | None, cache: Path) -> None:
    """Raise `DuplexError` if `cache` was not made from a user's file of features `source` as the file is now.

    Nothing is checked if there is no such file, or no cache yet.
    """
    if source is None or not source.is_file() or not cache.is_file():
        return
    with open_cache(cache) as file:
        identity = read_identity(file)
    if identity.get("weights") == sha256_once(source):
        return
    earlier = "has changed since" if identity.get("encoder") == IMPORTED else "was added to params.yaml after"
    raise DuplexError(
        f"{source} {earlier} `duplex extract` wrote {cache}; `{extract_command(cache)}` reads the features again, and "
        "`dvc repro` runs everything that depends on them"
    )
