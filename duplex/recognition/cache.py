"""Feature caches that find an image's features by the content of its file, whatever the file's name, label or split.

    MODEL.cache/features-KEY/LIST/contents.txt    sha256 of each image file, one per line: the rows of features.h5
    MODEL.cache/features-KEY/LIST/features.h5

`MODEL` is the model's folder, `KEY` identifies the encoder and its outputs, `LIST` the lines of contents.txt. After
renaming a file or correcting a label, no image is encoded again. With further images, the existing rows are copied to
the start of a larger cache, only the new images are encoded, and the smaller cache is removed. `contents.txt` is
written last, after the digests of the files were found to be the same as before encoding; without it, a cache is made
again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from duplex.config.params import EncoderParams
from duplex.data.contents import change_error, changed_images
from duplex.encoders.base import Encoder, load_encoder, resolve_device
from duplex.encoders.image_blocks import last_blocks
from duplex.errors import DuplexError
from duplex.features.extract import extract
from duplex.features.file import (
    REQUIRED,
    Features,
    PartialCache,
    Span,
    cache_identity,
    claim_cache,
    first_difference,
    open_cache,
    open_features,
    partial_path,
    read_identity,
    read_rows,
    value_names,
)
from duplex.features.shards import CHUNK, row_types
from duplex.features.tokens import DiskTokens, join, read_tokens
from duplex.labels import Bools, Ints, LabelSpace
from duplex.methods.finetuned import finetuned_blocks_factory
from duplex.system.files import write_text
from duplex.system.threads import float32_arithmetic
from duplex.training.inputs import InputRequest, RunInputs, encoder_record, load_text_tower

CONTENTS, FEATURES = "contents.txt", "features.h5"
BATCH = 256  # images whose block inputs are advanced at once


@dataclass(frozen=True)
class ContentCache:
    """Feature cache of one encoder on disk, in which images are found by the content of their files."""

    folder: Path
    encoder: EncoderParams
    tower: Encoder  # the loaded image tower
    block_inputs: int = 0  # keep the inputs of this many last blocks of the image tower

    @property
    def place(self) -> Path:
        """Folder of one encoder's cached features, named by a hash of the encoder and the kinds of outputs stored."""
        identity = {**self.tower.identity.to_dict(), "block_inputs": str(self.block_inputs)}
        return (
            self.folder / f"features-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]}"
        )

    def fill(self, root: Path, images: Mapping[str, str], max_bad: float = 0.01) -> ContentFeatures:
        """Encode the images whose features are not cached yet; return the cache with the features of all images.

        root: folder of the image files.
        images: sha256 of an image file -> path below `root` of a file with that content.
        max_bad: share of unreadable images above which `DuplexError` is raised.

        Raises `DuplexError` if a file has another sha256 after the encoding than before. The features of such files are
        removed, all others stay.
        """
        caches = {}
        for cache in sorted(self.place.glob("*")):
            if (cache / FEATURES).is_file():
                if (listed := _read_contents(cache)) is None:
                    shutil.rmtree(cache)  # damaged: its images are encoded again
                else:
                    caches[cache] = listed
        for cache, contents in caches.items():
            if images.keys() <= set(contents):
                return ContentFeatures(cache / FEATURES, {digest: row for row, digest in enumerate(contents)})
        known = max(caches, key=lambda cache: len(images.keys() & set(caches[cache])), default=None)
        return self._extend(root, images, known, caches.get(known, []) if known else [], max_bad)

    def _extend(
        self, root: Path, images: Mapping[str, str], known: Path | None, contents: list[str], max_bad: float
    ) -> ContentFeatures:
        """Write a feature cache of all `images`: copy the rows that an older cache has, and encode the other images.

        The older cache is removed.

        known: folder of the older cache, which holds some of the images; None: there is none.
        contents: sha256 of the image of each row of the older cache.
        """
        kept = {digest: row for row, digest in enumerate(contents) if digest in images}
        wanted = [*kept, *sorted(images.keys() - kept.keys())]
        text = "\n".join(wanted) + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()
        folder = self.place / digest[:16]
        file = folder / FEATURES
        for other in self.place.glob("*"):
            if other not in (folder, known) and other.is_dir():
                shutil.rmtree(other)  # of other contents, abandoned
        (folder / CONTENTS).unlink(missing_ok=True)
        if known is not None and kept and not partial_path(file).exists():
            self._copy(known / FEATURES, np.array(list(kept.values())), file, len(wanted), digest)
        extract(
            [images[each] for each in wanted],
            root,
            file,
            self.tower,
            manifest_sha256=digest,
            block_inputs=self.block_inputs,
            bits=self.encoder.bits,
            max_bad=max_bad,
        )
        if changed := changed_images(root, images):  # copied rows too: batches are encoded as a whole
            removed = set(changed)
            if sound := {each: image for each, image in images.items() if image not in removed}:
                self._extend(root, sound, folder, wanted, max_bad)
            else:
                shutil.rmtree(folder)
            raise change_error(root / changed[0])
        write_text(folder / CONTENTS, text)
        if known not in (None, folder):
            shutil.rmtree(known)
        return ContentFeatures(file, {digest: row for row, digest in enumerate(wanted)})

    def _copy(self, source: Path, rows: Ints, out: Path, total: int, digest: str) -> None:
        """Create the feature cache `out` of `total` rows and copy rows of the cache `source` to its start.

        Extraction then encodes the other rows. Nothing is created if the two caches differ in encoder or outputs.

        rows: row numbers in `source`, in the order of their copies.
        digest: sha256 of the list of image contents of `out`.
        """
        encoder = self.tower.identity.to_dict()
        identity = cache_identity(encoder, digest, "none", None, self.block_inputs, self.encoder.bits)
        with open_cache(source) as file, claim_cache(out):
            if first_difference({**read_identity(file), "manifest": digest}, identity):
                return
            types = row_types(file)
            shapes = {name: row.shape for name, row in types.items() if name not in REQUIRED}
            step = max(1, CHUNK // sum(row.itemsize for row in types.values()))  # rows
            with closing(PartialCache.create(out, identity, Span(0, total, total), self.tower.dim, shapes)) as cache:
                for start in range(0, len(rows), step):
                    some = rows[start : start + step]
                    order = np.argsort(some)  # HDF5 reads rising rows
                    back = np.argsort(order)
                    values = {name: read_rows(file, name, some[order])[back] for name in value_names(types)}
                    cache.write(start, file["status"][some[order]][back], **values)
                cache.commit()


def _read_contents(cache: Path) -> list[str] | None:
    """Return the sha256 of the image file of each row of a feature cache; None if this list is missing or damaged.

    cache: folder of the cache.
    """
    try:
        text = (cache / CONTENTS).read_text(encoding="utf-8")
        with open_cache(cache / FEATURES) as file:
            made_of = read_identity(file).get("manifest")
    except (OSError, ValueError, DuplexError):
        return None
    return text.split() if hashlib.sha256(text.encode()).hexdigest() == made_of else None


@dataclass(frozen=True)
class ContentFeatures:
    """A finished feature cache, with a dictionary from the sha256 of an image file to its row."""

    path: Path
    rows: Mapping[str, int]  # sha256 of an image file -> row
    later_inputs: dict[int, np.ndarray] = field(default_factory=dict)  # number of last blocks -> block inputs [N, ...]

    @cached_property
    def stored(self) -> Features:
        """The opened cache: CLS features and statuses (readable or not) of all rows, and identity of the encoder."""
        return open_features(self.path)

    def at(self, digests: Sequence[str]) -> Ints:
        """Return the row number of each image in the cache, given the sha256 of its file."""
        return np.array([self.rows[digest] for digest in digests], dtype=np.int64)


@dataclass(frozen=True)
class ContentInputs:
    """Data set for training runs: a table of labelled images (manifest) and their features, found by file content."""

    manifest: pd.DataFrame
    labels: LabelSpace
    rows: Ints  # [images] row of the cache of each manifest row
    features: ContentFeatures
    encoder: EncoderParams
    device: str
    word_vectors: Path | None = None

    def with_manifest(self, manifest: pd.DataFrame, labels: LabelSpace) -> ContentInputs:
        """Return the data set with other labels or another split: `manifest` lists the same images in the same order.

        Raises `DuplexError` for another number of images.
        """
        if len(manifest) != len(self.manifest):
            raise DuplexError(f"the manifest has {len(manifest)} rows; expected {len(self.manifest)}")
        return replace(self, manifest=manifest, labels=labels)

    @property
    def bad(self) -> Bools:
        """Mask of the manifest's rows [images] whose image file cannot be read."""
        return self.features.stored.bad[self.rows]

    @property
    def block_inputs(self) -> int:
        """Number of the image tower's last blocks whose inputs the cache holds."""
        return int(self.features.stored.identity.get("block_inputs", 0))

    def read(self, request: InputRequest) -> RunInputs:
        """Return labels, features and text tower for a training run, and block inputs if it fine-tunes blocks."""
        stored = self.features.stored
        tower, identity = load_text_tower(self.encoder, self.device, request.precision)
        cache = {key: str(value) for key, value in stored.identity.items()}
        arrays: dict[str, np.ndarray | DiskTokens] = {"cls": stored.cls[self.rows]}
        record = encoder_record(self.encoder, identity, cache, request, self.word_vectors)
        make_blocks = None
        if request.finetune is not None:
            record |= {key: cache[key] for key in ("block_inputs", "bits") if key in cache}
            arrays["block_inputs"], blocks = self._block_inputs(request, request.finetune.blocks)
            record["block_inputs"] = str(blocks)
            make_blocks = finetuned_blocks_factory(record, request.finetune, resolve_device(self.device))
        examples = join(self.manifest, self.labels, arrays, self.bad)
        cache["rows"] = hashlib.sha256(self.rows.tobytes()).hexdigest()
        return RunInputs(
            self.manifest,
            self.labels,
            examples,
            tower,
            record,
            cache,
            int(self.bad.sum()),
            self.word_vectors,
            make_blocks,
        )

    def _block_inputs(self, request: InputRequest, blocks: int) -> tuple[np.ndarray | DiskTokens, int]:
        """Return the activations [images, ...] that enter the last image-tower blocks, and the number of these blocks.

        If memory allows, the inputs of exactly the last `blocks` blocks are computed once from the cached inputs of an
        earlier block, so that no training epoch runs frozen blocks; the latest result stays in memory. Otherwise the
        cached inputs, of more blocks, are returned and read from disk on demand.
        """
        path, stored, later = self.features.path, self.block_inputs, self.features.later_inputs
        if blocks in later:
            return later[blocks][self.rows], blocks
        tokens = read_tokens(path, "block_inputs", int(request.memory * 2**30))
        if tokens is None or blocks > stored:
            raise DuplexError(f"{path} holds the inputs of {stored} blocks, {blocks} are wanted; delete it")
        if isinstance(tokens, DiskTokens):
            return tokens.at(self.rows), stored
        if blocks < stored:
            later.clear()
            tokens = later[blocks] = self._advance(tokens, stored - blocks)
        return tokens[self.rows], blocks

    def _advance(self, values: np.ndarray, blocks: int) -> np.ndarray:
        """Run image-tower blocks on cached activations; return their outputs, the next block's inputs, in float16.

        values: inputs [N, ...] of the first block whose inputs the cache holds.
        blocks: number of blocks to run, from that block on.
        """
        entry, stored = self.encoder, self.block_inputs
        tower = load_encoder(entry.name, entry.weights, towers="image", device=resolve_device(self.device))
        first = last_blocks(tower, stored).blocks[:blocks]
        outputs = []
        with torch.no_grad(), float32_arithmetic(entry.precision):
            for part in torch.from_numpy(values).split(BATCH):
                x = part.to(self.device).float()
                for block in first:
                    x = block(x)
                outputs.append(x.half().cpu().numpy())
        return np.concatenate(outputs)
