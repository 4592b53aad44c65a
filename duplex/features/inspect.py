"""Describe a feature cache, and compare a random sample of its rows with images encoded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.linalg import norm

from duplex.errors import DuplexError
from duplex.features import file as cache_file
from duplex.features.encode import ImageRows
from duplex.features.file import BAD_FEATURES, ENCODED, FIRST_BAD, PENDING, PIXELS, extract_command, status_reason

if TYPE_CHECKING:
    from duplex.encoders.base import Encoder

MIN_COSINE = 0.999  # below it a row is of another image or encoder; rounding stays far above
SMALL = 1e-12  # divisor for vectors of zeros


def inspect(path: Path) -> dict[str, Any]:
    """Describe a cache for JSON: settings, shapes, and numbers of rows, pending and bad ones."""
    with cache_file.open_cache(path) as file:
        identity = cache_file.read_identity(file)
        span = cache_file.read_row_span(file)
        statuses = file["status"][...]
        shapes: dict[str, Any] = dict.fromkeys(("patch", "block_inputs", PIXELS))
        shapes |= {name: list(file[name].shape[1:]) for name in shapes if name in file}
    reasons = Counter(status_reason(status) for status in statuses[statuses >= FIRST_BAD])
    return {
        "path": str(path),
        "identity": identity,
        "rows": span.rows,
        "of": span.total,
        "dim": int(identity["dim"]),
        **shapes,
        "pending": int((statuses == PENDING).sum()),
        "bad": dict(sorted(reasons.items())),
    }


def verify(
    path: Path,
    encoder: Encoder,
    images: Sequence[str],
    root: Path,
    manifest_sha256: str,
    *,
    sample: int = 32,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare all rows with their checksums, and a random `sample` with the images encoded again.

    Raises `DuplexError` for the first difference; returns `checked` (a number) and `worst_cosine`.
    """
    with cache_file.open_cache(path) as file:
        expected = {**encoder.identity.to_dict(), "manifest": manifest_sha256}
        cache_file.check_identity(cache_file.read_identity(file), expected, path)
        span = cache_file.read_row_span(file)
        statuses = file["status"][...]
        rows = np.sort(np.random.default_rng(seed).permutation(span.rows)[:sample])
        cache_file.verify_checksums(file)
        stored = file["cls"][rows].astype(np.float32)
    decoder = ImageRows(images[span.start : span.stop], root, encoder.image_transform)
    remedy = f"restore the image as it was, or run `{extract_command(path)} --fresh` to encode all images again"
    worst = 1.0
    for row, cached in zip(rows.tolist(), stored, strict=True):
        image = decoder.images[row]
        if statuses[row] in BAD_FEATURES:
            continue
        pixels, status, _ = decoder.read(row)
        if (status >= FIRST_BAD) != (int(statuses[row]) >= FIRST_BAD):
            now = status_reason(status) if status >= FIRST_BAD else "readable"
            then = status_reason(statuses[row]) if statuses[row] >= FIRST_BAD else "readable"
            raise DuplexError(f"{path}: {image} (row {row}) is now {now}, but was {then} when encoded; {remedy}")
        if statuses[row] != ENCODED:
            continue
        encoded = encoder.encode_images(pixels[None].to(encoder.device))
        again = encoded[0].detach().float().cpu().numpy()
        cosine = float(cached @ again / max(float(norm(cached) * norm(again)), SMALL))
        worst = min(cosine, worst)
        if not cosine >= MIN_COSINE:  # NaN is not
            raise DuplexError(f"{path}: row {row} differs from the re-encoded {image} (cosine {cosine:.4f}); {remedy}")
    return {"path": str(path), "checked": len(rows), "worst_cosine": worst}
