"""Inspect a feature cache: describe its rows, and compare a random sample of them with images encoded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.linalg import norm
from numpy.typing import NDArray

from duplex.errors import DuplexError, UsageError
from duplex.features.encode import ImageRows, OutputSpec, encode_outputs
from duplex.features.file import (
    BAD_FEATURES,
    ENCODED,
    FIRST_BAD,
    PENDING,
    PIXELS,
    check_identity,
    check_values,
    extract_command,
    open_cache,
    read_blocks,
    read_identity,
    read_row_span,
    repair_hint,
    status_reason,
)
from duplex.features.tokens import read_stored, stored_names

if TYPE_CHECKING:
    from duplex.encoders.base import Encoder

MIN_COSINE = 0.999  # below it a row is of another image or encoder; rounding stays far above
SMALL = 1e-12  # divisor for vectors of zeros


def inspect(path: Path) -> dict[str, Any]:
    """Describe a cache for JSON: settings, shapes, norms, and counts of pending, bad, NaN, zero and duplicate rows."""
    with open_cache(path) as file:
        identity = read_identity(file)
        span = read_row_span(file)
        statuses = file["status"][...]
        good = statuses == ENCODED
        norms = np.empty(len(statuses))
        hashes = np.empty(len(statuses), np.int64)
        nan = 0
        for rows, values in read_blocks(file, "cls"):
            nan += int((np.isnan(values).any(axis=1) & good[rows]).sum())
            norms[rows] = norm(values.astype(np.float32), axis=1)
            hashes[rows] = [hash(row.tobytes()) for row in values]  # two rows collide with chance 2^-64 or so
        stored = {name: stored_names(file, name) for name in ("patch", "block_inputs", PIXELS)}
        shapes = {name: list(file[names[0]].shape[1:]) if names else None for name, names in stored.items()}
    finite = norms[good & np.isfinite(norms) & (norms > 0)]
    return {
        "path": str(path),
        "identity": identity,
        "rows": span.rows,
        "of": span.total,
        "dim": int(identity["dim"]),
        **shapes,
        "pending": int((statuses == PENDING).sum()),
        "bad": dict(sorted(Counter(status_reason(status) for status in statuses[statuses >= FIRST_BAD]).items())),
        "nan_rows": nan,
        "zero_rows": int((good & (norms == 0)).sum()),
        "duplicate_rows": int(good.sum()) - len(np.unique(hashes[good])),
        "norm": {name: float(getattr(finite, name)()) for name in ("min", "mean", "max", "std")} if len(finite) else {},
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
    """Check that a feature cache belongs to its images; raises `DuplexError` for the first row that does not.

    All rows are compared with their checksums. A random `sample` of images is read and encoded again: new and stored
    outputs must have nearly the same direction (cosine), and unreadable images must be the same ones.

    Returns:
        A dict with the number of images `checked`, the `worst_cosine` and, if block inputs are stored, their mean
        relative error `block_inputs_error`.
    """
    with open_cache(path) as file:
        identity = read_identity(file)
        limit = {key: identity[key] for key in ("limit",) if key in identity}
        check_identity(identity, {**encoder.identity.to_dict(), "manifest": manifest_sha256, **limit}, path)
        span, statuses = read_row_span(file), file["status"][...]
        if span.total > len(images):
            raise UsageError(f"{path} has {span.total} rows and the manifest {len(images)}; {repair_hint(path)}")
        rows = np.sort(np.random.default_rng(seed).permutation(span.rows)[:sample])
        check_values(file)
        names = {name: found for name in ("cls", "block_inputs", PIXELS) if (found := stored_names(file, name))}
        stored = {name: read_stored([file[each][rows] for each in pair]) for name, pair in names.items()}
    decoder = ImageRows(images[span.start : span.stop], root, encoder.image_transform)
    outputs = OutputSpec(block_inputs=int(identity.get("block_inputs", 0)))
    remedy = f"`{extract_command(path)} --fresh` encodes all images again"
    worst = 1.0
    errors: list[float] = []
    for number, row in enumerate(rows.tolist()):
        image = decoder.images[row]
        if statuses[row] in BAD_FEATURES:
            continue
        pixels, status, _ = decoder.read(row)
        if (status >= FIRST_BAD) != (int(statuses[row]) >= FIRST_BAD):
            now = status_reason(status) if status >= FIRST_BAD else "readable"
            then = status_reason(statuses[row]) if statuses[row] >= FIRST_BAD else "readable"
            raise DuplexError(f"{path}: {image} (row {row}) is now {now}, but {then} in the cache; {remedy}")
        if statuses[row] != ENCODED:
            continue
        encoded = encode_outputs(encoder, pixels[None].to(encoder.device), outputs) | {PIXELS: pixels}
        again = {name: encoded[name].float().cpu().numpy().ravel() for name in stored}
        cached = {name: values[number].astype(np.float32).ravel() for name, values in stored.items()}
        cosine = min(_cosine(cached[name], again[name]) for name in stored)
        if "block_inputs" in stored:
            difference = cached["block_inputs"] - again["block_inputs"]
            errors.append(float(norm(difference) / max(float(norm(again["block_inputs"])), SMALL)))
        worst = min(cosine, worst)
        if not cosine >= MIN_COSINE:  # NaN is not
            raise DuplexError(f"{path}: row {row} is not the feature of {image} (cosine {cosine:.4f}); {remedy}")
    error = {"block_inputs_error": float(np.mean(errors))} if errors else {}
    return {"path": str(path), "checked": len(rows), "worst_cosine": worst, **error}


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    if np.array_equal(a, b):  # a black image, too
        return 1.0
    return float(a @ b / max(float(norm(a) * norm(b)), SMALL))
