"""Write the features of images to a feature cache: encode them, or find them in other caches by content.

The last bits of a feature depend on its batch. Images are therefore always grouped into the same batches, and a resumed
extraction gives the same features. An extraction can be divided into shards, files that hold a part of the rows each,
which are joined at the end. Images encoded before are found in caches of the same encoder by their files' content.
Outside of a project, all data sets share a folder of caches:

    FOLDER/features-KEY/LIST.h5    KEY is a hash of the encoder, LIST one of the images and the stored outputs

A cache there that has all wanted images is used as it is. Otherwise a new one is written, into which rows of the others
are copied, and caches that are then superfluous are removed. As a cache may disappear in this way, code that needs
features later keeps a `SharedFeatures`, which searches for the images again, instead of a path.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from duplex.data.contents import change_error, file_digests
from duplex.errors import DuplexError, UsageError, require
from duplex.features import encode
from duplex.features.encode import ImageRows, WantedOutputs, decode_batches, decoding_workers, encode_batches
from duplex.features.file import (
    CONTENTS,
    COPIED,
    DATASETS,
    ENCODED,
    FIRST_BAD,
    PENDING,
    PIXELS,
    REQUIRED,
    ROOT,
    SHA256,
    Contents,
    DamagedCache,
    Features,
    Identity,
    PartialCache,
    Span,
    Statuses,
    cache_identity,
    claim_cache,
    extract_command,
    first_difference,
    open_cache,
    partial_path,
    read_features,
    read_identity,
    read_row_span,
    read_rows,
    row_bytes,
    status_reason,
    value_names,
    verify_checksums,
)
from duplex.labels import Ints
from duplex.system.files import json_digest, replace_file
from duplex.system.processes import ProgressBar

if TYPE_CHECKING:
    from duplex.encoders.base import Encoder

OWN = ("manifest", ROOT, "tokens", "block_inputs", PIXELS)  # settings that do not identify the encoder
CHUNK = 2**26  # bytes copied at once
LARGEST_CHOICE = 1024  # rows that h5py reads at once fast, if they are not neighbours
TOKENS = ("none", "patch")
COMMIT_SECONDS = 1.0  # between commits, which wait for the disk; a killed run repeats at most this long
LISTED_BAD = 5  # bad images that an error lists


@dataclass(frozen=True)
class ExtractionJob:
    """Inputs of one extraction: the cache file's path and rows, the images, the encoder, and the outputs to store."""

    path: Path
    identity: Identity
    span: Span
    rows: ImageRows
    encoder: Encoder
    outputs: WantedOutputs
    batch_size: int
    num_workers: int
    max_bad: float
    reuse: tuple[Path, ...]
    fresh: bool


@dataclass(frozen=True)
class BadImage:
    """An image that has no features because it could not be read or encoded."""

    row: int
    image: str
    reason: str


@dataclass(frozen=True)
class ExtractionReport:
    """Result of an extraction: rows in the cache, how many of them were encoded before, seconds, and bad images."""

    path: Path
    rows: int
    resumed: int
    seconds: float
    bad: list[BadImage] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as text: a summary line, then one line per image without features."""
        resumed = f", {self.resumed} of them encoded before" if self.resumed else ""
        encoded = self.rows - self.resumed
        rate = f", {encoded / self.seconds:.1f} images per second" if encoded and self.seconds else ""
        listed = [f"  bad: row {bad.row}, {bad.image}: {bad.reason}" for bad in self.bad]
        return [f"{self.path}: {self.rows} rows{resumed}{rate}, {len(self.bad)} bad", *listed]

    def to_dict(self) -> dict[str, object]:
        record = {"rows": self.rows, "resumed": self.resumed, "seconds": round(self.seconds, 3)}
        return {**record, "bad": [asdict(image) for image in self.bad]}


def extract(
    images: Sequence[str],
    root: Path,
    out: Path,
    encoder: Encoder,
    *,
    manifest_sha256: str,
    batch_size: int = 64,
    num_workers: int | Literal["auto"] = "auto",
    recorded_root: str | None = None,
    tokens: str = "none",
    block_inputs: int = 0,
    pixels: bool = False,
    shard: tuple[int, int] | None = None,
    max_bad: float = 0.01,
    reuse: Sequence[Path] = (),
    fresh: bool = False,
) -> ExtractionReport:
    """Encode images into the feature cache `out`.

    A finished cache with the same settings is kept, an unfinished one is resumed, except for images whose files have
    changed. Images that are found in a cache of the same encoder, an earlier one at `out` or one in `reuse`, are copied
    from there. Unreadable images keep their row, with the reason as its status.

    Args:
        images: paths relative to `root`, in the order of the manifest.
        num_workers: number of decoding processes; auto: one fewer than cores; 0: decode in this process.
        recorded_root: the images' folder as the cache should record it, such as `root` in params.yaml.
        tokens: "patch" also stores patch tokens; "none" does not.
        block_inputs: number of last blocks of the image tower whose input is stored, too, so that they can be trained.
        pixels: also store the images as they enter the encoder, so that any number of its blocks can be trained.
        shard: (k, n) encodes only the k-th of n shards, counted from 0, into a file beside `out`.
        max_bad: share of unreadable images above which `DuplexError` is raised; the unfinished cache stays.
        fresh: encode all images, even those that were encoded before.
    """
    require(tokens, TOKENS, "tokens")
    if not root.is_dir():
        raise UsageError(f"the image folder {root} does not exist; correct `root` (a project sets it in params.yaml)")
    if out.is_dir():
        raise UsageError(f"{out} is a folder; give --out the path of a file, such as {out / 'features.h5'}")
    span, path = plan_shard(len(images), batch_size, shard, out)
    identity = cache_identity(encoder.identity.to_dict(), manifest_sha256, tokens, block_inputs, recorded_root, pixels)
    job = ExtractionJob(
        path=path,
        identity=identity,
        span=span,
        rows=ImageRows(images[span.start : span.stop], root, encoder.image_transform),
        encoder=encoder,
        outputs=WantedOutputs(tokens == "patch", block_inputs, pixels),
        batch_size=batch_size,
        num_workers=decoding_workers(num_workers),
        max_bad=max_bad,
        reuse=tuple(reuse),
        fresh=fresh,
    )
    with claim_cache(path):
        return _run(job)


def _run(job: ExtractionJob) -> ExtractionReport:
    rows, began = job.span.rows, time.monotonic()
    contents = None
    if not job.fresh and (finished := _read_if_finished(job)):
        statuses, contents_then = finished
        contents = image_contents(job.rows.root, job.rows.images)
        if np.array_equal(contents, contents_then):
            return ExtractionReport(job.path, rows, rows, 0.0, _checked_bad_images(statuses, job))
        with replace_file(partial_path(job.path)) as scratch:  # the cache itself stays as it is
            shutil.copyfile(job.path, scratch)
    with closing(_open_or_create(job)) as cache:
        if not job.fresh:
            _find_encoded(cache, job, contents)
        resumed = cache.done
        _encode_pending(cache, job)
        bad = _checked_bad_images(cache.statuses, job)
        cache.finish()
    return ExtractionReport(job.path, rows, resumed, time.monotonic() - began, bad)


def _read_if_finished(job: ExtractionJob) -> tuple[Statuses, Contents] | None:
    """Statuses and contents of the job's cache if it is finished and sound; otherwise prints why not, returns None."""
    path = job.path
    if not path.exists():
        return None
    try:
        with open_cache(path) as file:
            key = first_difference(read_identity(file), job.identity)
            statuses: Statuses = file["status"][...]
            if key is None and read_row_span(file) == job.span and not (statuses == PENDING).any():
                verify_checksums(file)
                return statuses, file[CONTENTS][...]
        why = f"{path} was made with another {key or 'set of rows'}"
    except DuplexError as error:
        why = str(error).partition(";")[0]
    print(f"{why}; extracting again", file=sys.stderr)
    return None


def _open_or_create(job: ExtractionJob) -> PartialCache:
    partial = partial_path(job.path)
    if not job.fresh and partial.exists():
        try:
            cache = PartialCache(job.path)
        except OSError as error:
            raise DuplexError(f"{partial} cannot be opened ({error}); correct its permissions, or delete it") from error
        except DamagedCache as error:
            print(f"{partial} cannot be continued ({error}); extracting again", file=sys.stderr)
        else:
            key = first_difference(cache.identity, job.identity) or (None if cache.span == job.span else "set of rows")
            if key is None:
                return cache
            cache.close()
            print(f"{partial} was begun with another {key}; extracting again", file=sys.stderr)
    return PartialCache.create(job.path, job.identity, job.span, job.encoder.dim, job.outputs.row_shapes(job.encoder))


def _find_encoded(cache: PartialCache, job: ExtractionJob, contents: Contents | None) -> None:
    """Mark the rows of changed images as pending, and copy pending rows from caches that have them."""
    sources = [path for path in (job.path, *job.reuse) if path.exists()]
    if not sources and not cache.done:
        return
    if contents is None:
        contents = image_contents(job.rows.root, job.rows.images)
    cache.statuses[(cache.contents != contents).any(axis=1)] = PENDING
    copy_equal_rows(cache, contents, sources)


def _encode_pending(cache: PartialCache, job: ExtractionJob) -> None:
    # Batches always hold the same images, so encoded images in a batch with a pending image are encoded again. Rows
    # that were copied are in no batch: a few new images among many are encoded alone.
    batches = encode.split_rows(np.flatnonzero(cache.statuses != COPIED).tolist(), job.batch_size)
    pending = [rows for rows in batches if (cache.statuses[rows] == PENDING).any()]
    workers, pinned = min(job.num_workers, len(pending)), job.encoder.device.type == "cuda"
    encoded = encode_batches(job.encoder, decode_batches(job.rows, pending, workers, pinned=pinned), job.outputs)
    bar = ProgressBar("images", sum(map(len, pending)))
    began = committed = time.monotonic()
    count = 0
    with encode.explain_memory_errors(job.batch_size), bar:
        try:
            for rows, (_, statuses, values) in zip(pending, encoded, strict=True):
                cache.write(rows, statuses, **values)
                count += len(statuses)
                now = time.monotonic()
                bar.show(count, {"per second": count / (now - began)})
                if now - committed >= COMMIT_SECONDS:
                    cache.commit()
                    committed = now
                    _checked_bad_images(cache.statuses, job)
        finally:
            cache.commit()


def check_share_of_bad(bad: Sequence[BadImage], total: int, max_bad: float) -> None:
    """Raise `DuplexError` if the images without features (`bad`) are more than the share `max_bad` of `total`."""
    if len(bad) <= max_bad * total:
        return
    listed = ", ".join(f"{image.image} ({image.reason})" for image in bad[:LISTED_BAD])
    raise DuplexError(
        f"{len(bad)} of {total} images cannot be read, a larger share than max_bad = {max_bad:g}: {listed}"
        f"{', …' if len(bad) > LISTED_BAD else ''}; repair or remove these images, or raise max_bad (in a project: "
        "extraction.max_bad in params.yaml)"
    )


def bad_images(statuses: Statuses, images: Sequence[str], start: int = 0) -> list[BadImage]:
    """List the images whose status says that they have no features; `start`: the first image's row."""
    rows = np.flatnonzero((statuses >= FIRST_BAD) & (statuses != COPIED)).tolist()
    return [BadImage(start + row, images[row], status_reason(statuses[row])) for row in rows]


def _checked_bad_images(statuses: Statuses, job: ExtractionJob) -> list[BadImage]:
    bad = bad_images(statuses, job.rows.images, job.span.start)
    check_share_of_bad(bad, job.span.rows, job.max_bad)
    return bad


def plan_shard(total: int, batch_size: int, shard: tuple[int, int] | None, out: Path) -> tuple[Span, Path]:
    """Rows and file of the shard (k, n), part k (from 0) of a cache's n parts; for None, all rows and the file `out`.

    Shards begin where batches begin, so their features equal those of an extraction without shards. Raises `UsageError`
    if k is not below n, or if there are more shards than batches.
    """
    if total == 0:
        raise UsageError("the manifest lists no images, so there are none to encode; add images to the data set")
    if shard is None:
        return Span(0, total, total), out
    k, n = shard
    if not 0 <= k < n:
        raise UsageError(f"shard {k}/{n} does not exist; expected k/N with k from 0 to N - 1, such as 0/4")
    batches = math.ceil(total / batch_size)
    if n > batches:
        raise UsageError(f"{total} images make {batches} batches, too few for {n} shards; use at most {batches} shards")
    start = batches * k // n * batch_size
    return Span(start, min(total, batches * (k + 1) // n * batch_size), total), shard_path(out, k, n)


def shard_path(out: Path, k: int, n: int) -> Path:
    return out.with_name(f"{out.stem}.shard-{k}-of-{n}{out.suffix}")


def find_shards(out: Path) -> list[Path]:
    """Paths of all shards of the cache `out`, in order; raises `DuplexError` if one is missing."""
    pattern = re.compile(re.escape(out.stem) + r"\.shard-(\d+)-of-(\d+)" + re.escape(out.suffix))
    shards = {path: match for path in out.parent.glob("*") if (match := pattern.fullmatch(path.name))}
    counts = {int(match[2]) for match in shards.values()}
    if not counts:
        raise DuplexError(f"{out} has no shards; run `{extract_command(out, 'k/N')}` for each k from 0 to N - 1")
    if len(counts) > 1:
        raise DuplexError(f"{out} has sets of {' and '.join(map(str, sorted(counts)))} shards; delete all but one set")
    n = counts.pop()
    paths = [shard_path(out, k, n) for k in range(n)]
    for k, path in enumerate(paths):
        if path not in shards:
            command = extract_command(out, f"{k}/{n}")
            raise DuplexError(f"shard {k}/{n} of {out} is not finished; `{command}` finishes it")
    return paths


def join_shards(out: Path) -> int:
    """Join all shards into the cache `out`, identical to one made without shards; returns the number of rows."""
    paths = find_shards(out)
    identity: Identity = {}
    shapes: dict[str, tuple[int, ...]] = {}
    end, total = 0, 0
    again = f"run `{extract_command(out, f'k/{len(paths)}')}` for each k from 0 to {len(paths) - 1}"
    for path in paths:
        with open_cache(path) as file:
            here, span = read_identity(file), read_row_span(file)
            if identity and (key := first_difference(identity, here)):
                raise DuplexError(f"{path} and {paths[0]} differ in their {key}; {again}")
            if (file["status"][...] == PENDING).any():
                raise DuplexError(f"{path} has rows that were never encoded; extract this shard again")
            if span.start != end:
                raise DuplexError(
                    f"{path} starts at row {span.start}, but the shard before it ends at row {end}; extract all shards "
                    "with the same extraction.batch_size"
                )
            identity = identity or here
            end, total = span.stop, span.total
            shapes = {name: file[name].shape[1:] for name in DATASETS if name in file}
    if end != total:
        raise DuplexError(f"{paths[-1]} ends at row {end} of {total}, so it is not the last shard; {again}")
    tokens = {name: shape for name, shape in shapes.items() if name not in REQUIRED}
    step = max(1, CHUNK // sum(row_bytes(name, shape) for name, shape in shapes.items()))  # rows
    whole = Span(0, total, total)
    with claim_cache(out), closing(PartialCache.create(out, identity, whole, int(identity["dim"]), tokens)) as cache:
        for path in paths:
            with open_cache(path) as file:
                span = read_row_span(file)
                for start in range(0, span.rows, step):
                    rows = slice(start, start + step)
                    values = {name: read_rows(file, name, rows) for name in value_names(shapes)}
                    cache.write(span.start + start, file["status"][rows], contents=file[CONTENTS][rows], **values)
        cache.finish()
    return total


def image_contents(root: Path, images: Sequence[str]) -> Contents:
    """Raw sha256 of each image file below `root` [N, 32]; zeros for a file that is missing or unreadable."""
    digests = [bytes.fromhex(digest) or bytes(SHA256) for digest in file_digests(root, images)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, SHA256)


def has_outputs_of(identity: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a cache with the settings `identity` could replace one with the settings `wanted` for equal images.

    The encoder must be the same, and all patch tokens, block inputs and pixels of the wanted cache must be there.
    """
    same_encoder = all(identity.get(key) == wanted.get(key) for key in {*identity, *wanted} - set(OWN))
    needed = [key for key in ("tokens", "block_inputs", PIXELS) if key in wanted]
    return same_encoder and all(identity.get(key) == wanted[key] for key in needed)


def rows_by_content(path: Path, wanted: Mapping[str, str], *, bad: bool = False) -> dict[bytes, int]:
    """Map each encoded image file's sha256 to its row in a cache; `bad` includes images without features.

    Empty if the cache cannot be read, or has another encoder or fewer outputs than the settings `wanted`.
    """
    try:
        with open_cache(path) as file:
            if not has_outputs_of(read_identity(file), wanted):
                return {}
            contents = file[CONTENTS][...]
            statuses = file["status"][...]
            encoded = (statuses != PENDING) & (statuses != COPIED) if bad else statuses == ENCODED
    except DuplexError:  # reported where the cache itself is used
        return {}
    return {contents[row].tobytes(): row for row in np.flatnonzero(encoded & contents.any(axis=1)).tolist()}


def copy_equal_rows(cache: PartialCache, contents: Contents, sources: Iterable[Path]) -> None:
    """Fill pending rows of an unfinished cache with copies from `sources`, other caches that have the same images.

    contents: sha256 of the file of each image in `cache` [N, 32].
    """
    keys = [content.tobytes() for content in contents]
    for source in sources:
        known = rows_by_content(source, cache.identity)
        places = [row for row in np.flatnonzero(cache.statuses == PENDING).tolist() if keys[row] in known]
        if not places:
            continue
        try:
            _copy(cache, contents, places, source, [known[keys[row]] for row in places])
        except DuplexError as error:
            print(f"{str(error).partition(';')[0]}; images not yet copied from this file are encoded", file=sys.stderr)
        cache.commit()


def _copy(cache: PartialCache, contents: Contents, places: list[int], source: Path, rows: list[int]) -> None:
    step = min(LARGEST_CHOICE, max(1, CHUNK // sum(row_bytes(name, cache.shapes[name]) for name in cache.names)))
    with open_cache(source) as file:
        for start in range(0, len(places), step):
            some = np.array(places[start : start + step])
            chosen, back = np.unique(rows[start : start + step], return_inverse=True)
            values = {name: read_rows(file, name, chosen)[back] for name in cache.names}
            cache.write(some, np.full(len(some), COPIED, np.uint8), contents=contents[some], **values)


def user_cache() -> Path:
    """The default folder of feature caches: `duplex` in XDG_CACHE_HOME; if unset, in ~/Library/Caches or ~/.cache."""
    home = Path.home()
    default = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "duplex"


@dataclass(frozen=True)
class SharedFeatures:
    """Finds the features of given images in a folder of caches, whichever cache has them at the time of the call."""

    folder: Path  # of one encoder
    identity: Identity  # the encoder, and what a cache of the images must store
    digests: tuple[str, ...]  # sha256 of each image file; "" for a missing one

    def find(self) -> tuple[Path, Ints] | None:
        """Path of a cache that has all images, and the row of each image in it (-1 for a missing image file).

        Returns None if no single cache has all of them.
        """
        wanted = [bytes.fromhex(digest) for digest in self.digests]
        for path in sorted(self.folder.glob("*.h5")):
            rows = rows_by_content(path, self.identity, bad=True)
            if rows and all(key in rows for key in wanted if key):
                return path, np.array([rows.get(key, -1) for key in wanted], dtype=np.int64)
        return None

    def require(self) -> tuple[Path, Ints]:
        """Path of a cache with all images, and each image's row (-1: missing file); `DuplexError` if there is none."""
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
    """Encode images that no cache in the folder has; returns a `SharedFeatures` of all, and images without features.

    `digests`: sha256 of files, "" if missing; `tokens`: "patch" stores patch tokens, too; `block_inputs`: so many last
    blocks' inputs. Raises `DuplexError` if more than the share `max_bad` is unreadable, or if a file changes meanwhile.
    """
    place = folder / f"features-{json_digest(encoder.identity.to_dict())[:16]}"
    paths = {digest: image for digest, image in zip(digests, images, strict=True) if digest}
    listed = sorted(paths)
    key = hashlib.sha256("\n".join([*listed, ""]).encode()).hexdigest()
    identity = cache_identity(encoder.identity.to_dict(), key, tokens, block_inputs)
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
            max_bad=max_bad,
            reuse=[other for other in others if other.name.removesuffix(".partial") != out.name],
        )
        rows = rows_by_content(out, identity, bad=True)
        if changed := [digest for digest in listed if bytes.fromhex(digest) not in rows]:
            raise change_error(root / paths[changed[0]])
        _remove_superfluous(out, others)
    reasons = ["missing"] * len(images)
    if listed:
        path, places = features.require()
        with open_cache(path) as file:
            statuses = file["status"][...]
        found = np.where(places < 0, FIRST_BAD, statuses[places]).tolist()
        reasons = [status_reason(status) if status >= FIRST_BAD else "" for status in found]
    named = zip(images, reasons, strict=True)
    bad = [BadImage(number, image, reason) for number, (image, reason) in enumerate(named) if reason]
    check_share_of_bad(bad, len(images), max_bad)
    return features, bad


def find_cached_features(folder: Path, digests: Sequence[str]) -> Features | None:
    """CLS features of images with the sha256 `digests`, from the cache with most of them; None if none is cached."""
    best, rows = None, np.full(len(digests), -1)
    for path in sorted(folder.glob("features-*/*.h5"), key=lambda path: -path.stat().st_mtime):
        with suppress(DuplexError):  # of an older version, say
            with open_cache(path) as file:
                places = rows_by_content(path, read_identity(file))
            found = np.array([places.get(bytes.fromhex(digest), -1) for digest in digests])
            if (found >= 0).sum() > (rows >= 0).sum():
                best, rows = path, found
    if best is None:
        return None
    cache = read_features(best)
    statuses = np.where(rows < 0, FIRST_BAD, cache.statuses[rows]).astype(np.uint8)
    return replace(cache, cls=cache.cls[rows], statuses=statuses)


def _remove_superfluous(cache: Path, others: Sequence[Path]) -> None:
    """Remove each cache in `others`, finished or not, whose images and outputs are all in `cache`, too."""
    with open_cache(cache) as file:
        identity = read_identity(file)
    kept = rows_by_content(cache, identity)
    for other in others:
        final = other.with_name(other.name.removesuffix(".partial"))
        with suppress(DuplexError), claim_cache(final):
            with open_cache(other) as file:
                stored = read_identity(file)
            if (
                final != cache
                and has_outputs_of(identity, stored)
                and rows_by_content(other, stored).keys() <= kept.keys()
            ):
                other.unlink()
