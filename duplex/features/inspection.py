"""Is this cache what it seems? What it holds, in numbers, and a sample of it encoded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from duplex.encoders.image_blocks import entering
from duplex.errors import DuplexError, UsageError
from duplex.features.augmentation import Augmentation
from duplex.features.decoding import Pictures
from duplex.features.identity import check_identity, repair
from duplex.features.layout import (
    ENCODED,
    FIRST_BAD,
    PENDING,
    kept_places,
    open_file,
    read_held,
    read_identity,
    read_span,
    reason,
)
from duplex.features.tokens import stored_as, whole

if TYPE_CHECKING:
    from torch import Tensor

    from duplex.encoders import Encoder

CHUNK = 65_536  # rows in memory at once
AGREE = 0.999  # cosine under which a row is another picture's or another encoder's, far below what rounding does


def inspect(path: Path) -> dict[str, Any]:
    """Identity, rows, bad rows by reason, and rows that look wrong: NaN, zero, or equal to an earlier row."""
    with open_file(path) as file:
        identity, span, marks = read_identity(file), read_span(file), file["mark"][...]
        good = marks == ENCODED
        norms, keys, nan = np.empty(len(marks)), np.empty(len(marks), np.int64), 0
        for start, values in _chunks(file["cls"]):
            rows = slice(start, start + len(values))
            nan += int((np.isnan(values).any(axis=1) & good[rows]).sum())
            norms[rows] = np.linalg.norm(values.astype(np.float32), axis=1)
            keys[rows] = [hash(row.tobytes()) for row in values]  # two others share one with chance 2^-64 or so
        parts = {name: stored_as(file, name) for name in ("patch", "deep")}
        beside: dict[str, Any] = {
            name: list(file[found[0]].shape[1:]) if found else None for name, found in parts.items()
        }
        if (held := read_held(file)) is not None:
            beside["deep_rows"] = int(held.sum())
    finite = norms[good & np.isfinite(norms) & (norms > 0)]
    return {
        "path": str(path),
        "identity": identity,
        "rows": span.rows,
        "of": span.total,
        "dim": int(identity["dim"]),
        **beside,
        "pending": int((marks == PENDING).sum()),
        "bad": dict(sorted(Counter(reason(mark) for mark in marks[marks >= FIRST_BAD]).items())),
        "nan_rows": nan,
        "zero_rows": int((good & (norms == 0)).sum()),
        "duplicate_rows": int(good.sum()) - len(np.unique(keys[good])),
        "norm": {name: float(getattr(finite, name)()) for name in ("min", "mean", "max", "std")} if len(finite) else {},
    }


def verify(
    path: Path,
    encoder: Encoder,
    images: Sequence[str],
    root: Path,
    manifest_sha256: str,
    augmentation: Augmentation | None = None,
    *,
    sample: int = 32,
    seed: int = 0,
) -> dict[str, Any]:
    """Encode a random sample of rows again and compare: cosine for pictures, the mark for bad ones. Raises where a
    row disagrees. With an `augmentation` it is a cache of the images' views."""
    images = images if augmentation is None else augmentation.rows(images)
    with open_file(path) as file:
        identity = read_identity(file)
        limit = {key: identity[key] for key in ("limit",) if key in identity}
        shown = {} if augmentation is None else augmentation.identity
        check_identity(identity, {**encoder.identity, "manifest": manifest_sha256, **limit, **shown}, path)
        span, marks = read_span(file), file["mark"][...]
        if span.total > len(images):
            raise UsageError(f"{path} has {span.total} rows and the manifest {len(images)}; {repair(path)}")
        rows = np.sort(np.random.default_rng(seed).permutation(span.rows)[:sample])
        stored = _stored(file, rows)
    part = images[span.start : span.stop]
    pictures = Pictures(part, root, encoder.image_transform, augmentation, span.start)
    worst, off = 1.0, list[float]()
    for row in rows.tolist():
        image = images[span.start + row]
        pixels, decoded = pictures.read(row)
        if (decoded >= FIRST_BAD) != (int(marks[row]) >= FIRST_BAD):
            found, held = (reason(mark) if mark >= FIRST_BAD else "readable" for mark in (decoded, marks[row]))
            raise DuplexError(f"{path}: {image} (row {row}) is {found}, in the cache {held}; {repair(path)}")
        if marks[row] == ENCODED:
            kept = stored[row]
            with entering(encoder, int(identity["depth"]) if len(kept) > 1 else 0) as seen:
                again = [_flat(encoder.encode_images(pixels[None])), *map(_flat, seen)]
            near = min(cosine(one, other) for one, other in zip(kept, again, strict=True))
            off += [_error(one, other) for one, other in zip(kept[1:], again[1:], strict=True)]
            worst = min(near, worst)
            if not near >= AGREE:  # NaN is not
                raise DuplexError(f"{path}: row {row} is not {image} (cosine {near:.4f}); {repair(path)}")
    return {
        "path": str(path),
        "checked": len(rows),
        "worst_cosine": worst,
        **({"deep_error": float(np.mean(off))} if off else {}),
    }


def _stored(file: Any, rows: NDArray[np.int64]) -> dict[int, list[NDArray[np.float32]]]:
    """Of each of these rows what is kept: its features, and what enters the last blocks where that is."""
    found: dict[int, list[NDArray[np.float32]]] = {row: [] for row in rows.tolist()}
    held = read_held(file)
    deep = rows if held is None else rows[held[rows]]
    for name, some, places in (
        ("cls", rows, rows),
        ("deep", deep, kept_places(deep, held)),
    ):
        if names := stored_as(file, name):
            values = whole(names, lambda part, places=places: file[part][places])  # type: ignore[misc]
            for row, value in zip(some.tolist(), values, strict=True):
                found[row].append(value.astype(np.float32).ravel())
    return found


def _chunks(data: Any) -> Iterator[tuple[int, NDArray[np.float16]]]:
    for start in range(0, len(data), CHUNK):
        yield start, data[start : start + CHUNK]


def _flat(values: Tensor) -> NDArray[np.float32]:
    return values.float().cpu().numpy().ravel()


def _error(held: NDArray[np.float32], true: NDArray[np.float32]) -> float:
    """Of what is kept of the last blocks' input, relative to its size: ||held - true|| / ||true||."""
    return float(np.linalg.norm(held - true) / max(float(np.linalg.norm(true)), 1e-12))


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
