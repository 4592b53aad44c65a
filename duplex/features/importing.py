"""Import of features that the user already has into a cache."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from duplex.errors import DuplexError, UsageError
from duplex.features.identity import IMPORTED, Identity
from duplex.features.layout import ENCODED, NOT_FINITE, Span
from duplex.features.store import PartialCache, claim_cache
from duplex.system.files import kind_of_path, sha256

CHUNK = 65_536  # rows converted at once
LARGEST = float(np.finfo(np.float16).max)


def import_features(source: Path, rows: int, manifest_sha256: str, out: Path) -> Identity:
    """Write the cache `out` from the `.npy` file `source` [rows, width], one row per manifest row.

    Rows that are not finite count as unreadable images. The encoder is unknown: the returned identity names only the
    file and the manifest. Raises `UsageError` for another number of rows and for values that float16 cannot hold.
    """
    values = _open_array(source)
    if len(values) != rows:
        raise UsageError(f"{source} has {len(values)} rows and the manifest {rows}; they must correspond one to one")
    identity = {
        "encoder": IMPORTED,
        "weights": sha256(source),
        "precision": str(values.dtype),
        "dim": str(values.shape[1]),
        "manifest": manifest_sha256,
    }
    with claim_cache(out), closing(PartialCache.create(out, identity, Span(0, rows, rows), values.shape[1])) as cache:
        try:
            for start in range(0, rows, CHUNK):
                block = np.asarray(values[start : start + CHUNK], dtype=np.float64)
                finite = np.asarray(np.isfinite(block).all(axis=1))
                block = np.where(finite[:, None], block, 0)
                if np.abs(block).max() > LARGEST:
                    raise UsageError(
                        f"{source} has values above {LARGEST:g}, which float16 cannot hold; scale them down"
                    )
                statuses = np.where(finite, ENCODED, NOT_FINITE).astype(np.uint8)
                cache.write(start, statuses, cls=block.astype(np.float16))
            cache.finish()
        except BaseException:
            cache.partial.unlink(missing_ok=True)
            raise
    return identity


def _open_array(source: Path) -> np.ndarray:
    if (kind := kind_of_path(source)) not in ("a file", "missing"):
        raise UsageError(f"{source} is {kind}; expected a .npy file")
    try:
        values = np.load(source, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise UsageError(f"{source} does not exist") from error
    except (ValueError, OSError, EOFError) as error:
        raise DuplexError(f"{source} is not an array that numpy saved: {error}") from error
    if not isinstance(values, np.ndarray) or values.ndim != 2 or values.dtype.kind != "f" or 0 in values.shape:
        shape = getattr(values, "shape", "several arrays")
        raise UsageError(
            f"{source} must hold one array of numbers [rows, width]; it has {shape} {getattr(values, 'dtype', '')}"
        )
    return values
