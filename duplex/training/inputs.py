"""Read what a run needs from a data set: labels, features, the encoder's text tower, word vectors."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.artifacts import ArtifactPaths
from duplex.config.params import EncoderParams, Params
from duplex.data.tables import COLUMNS, checked_cells, known_columns, manifest_bytes, read_manifest
from duplex.encoders.base import (
    PACKAGED,
    Encoder,
    TextTower,
    encoder_identity,
    has_text,
    joined_parts,
    load_encoder,
    part_widths,
    resolve_device,
)
from duplex.encoders.image_blocks import block_count, select_blocks
from duplex.errors import DuplexError, UsageError
from duplex.features.file import (
    IMPORTED,
    PIXELS,
    ROOT,
    contents_digest,
    open_cache,
    read_cache_digest,
    read_features,
)
from duplex.features.tokens import DiskTokens, Examples, join_labels, read_negatives, read_tokens
from duplex.labels import Bools, Ints, LabelSpace, World
from duplex.methods.base import Method, MethodContext, PrimitiveVectors
from duplex.methods.blocks import FinetunedBlocks, finetuned_blocks_factory
from duplex.methods.prompts import TEMPLATE, encode_words, name_tokens
from duplex.methods.registry import find_method
from duplex.options import FinetuneOptions, TrainingOptions
from duplex.system.files import sha256, sha256_once
from duplex.training.checkpoint import RESIZE, WORD_VECTORS, TrainingRecord

if TYPE_CHECKING:
    from duplex.evaluation.vectors import WordVectors
    from duplex.features.shared import SharedFeatures  # which loads all that encodes images


@dataclass(frozen=True)
class InputRequest:
    """What a run reads from a data set besides labels and CLS features."""

    needs: frozenset[str] = frozenset({"cls", "text"})  # from `Method.needs`; "patch": patch tokens
    precision: str = "fp32"  # of the text tower, in training and evaluation alike
    finetune: FinetuneOptions | None = None  # None: no block inputs are read
    memory: float = TrainingOptions.memory  # GiB of tokens to hold; larger ones stay on disk
    encoder: str | None = None  # name of the one to read of a data set's joined encoders; None: all

    @classmethod
    def of(cls, record: TrainingRecord, training: TrainingOptions) -> InputRequest:
        """What a trained run needs, of its checkpoint's `record` and its `training` options."""
        needs = find_method(record.kind).needs(record.options)
        return cls(needs, training.precision, record.finetune, training.memory, record.encoder["name"])


@dataclass(frozen=True)
class RunInputs:
    """The data that a method is trained and evaluated on; equal requests share one object."""

    manifest: pd.DataFrame
    labels: LabelSpace
    examples: dict[str, Examples]  # split -> features and labels
    tower: TextTower | None  # None for an encoder without text tower, and for imported features
    encoder: dict[str, str]  # identity of the encoder and its name in params.yaml, for checkpoints
    identity: dict[str, str]  # of the feature cache; `features`: digest of its content
    bad: int  # number of unreadable images, which are left out
    read: Mapping[str, str | None] = field(default_factory=dict)  # file of a project -> its checksum
    glove: Path | None = None  # file of word vectors
    make_blocks: Callable[[], FinetunedBlocks] | None = None  # builds the blocks to fine-tune
    member_blocks: Callable[[FinetuneOptions], FinetunedBlocks] | None = None  # with any options
    members: tuple[Method[Any], ...] = ()  # finished runs that the method combines
    negatives: Tensor | None = None  # features [K, d] of drawn images of no pair; None: not in the cache

    def context(self, world: World = "closed") -> MethodContext:
        """What a method's constructor receives; `world` decides the candidates in training."""
        shapes = {name: tuple(values.shape[1:]) for name, values in self.examples["train"].inputs.items()}
        pairs = {split: pairs.copy() for split, pairs in self.labels.pairs.items()}
        labels = replace(self.labels, pairs=pairs)
        return MethodContext(
            labels,
            shapes,
            self.tower,
            self.words,
            world,
            finetuned_blocks=self.make_blocks,
            members=self.members,
            member_blocks=self.member_blocks,
            parts=part_widths(self.encoder),
        )

    @cached_property
    def glove_vectors(self) -> WordVectors | None:
        """Vectors of states, then of objects, from the GloVe file; None without one."""
        if self.glove is None:
            return None
        from duplex.evaluation.vectors import read_word_vectors

        return read_word_vectors(self.glove, [*self.labels.states, *self.labels.objects])

    @cached_property
    def words(self) -> PrimitiveVectors | None:
        """Word vectors of labels, from the GloVe file, else the text tower, else None."""
        table = self.glove_vectors
        if table is not None:
            if table.missing:
                lack = f"{self.glove} has no vector for {', '.join(map(repr, table.missing))}"
                print(f"{lack}; add vectors, or labels use only their other words", file=sys.stderr)
            states, objects = np.split(table.vectors, [len(self.labels.states)])
            return PrimitiveVectors(torch.from_numpy(states), torch.from_numpy(objects))
        if self.tower is None:
            return None
        return PrimitiveVectors(*encode_words(self.labels, self.tower))


@dataclass(frozen=True)
class CachedFeatures:
    """A data set's own feature cache, which has one row per image of the manifest."""

    path: Path
    manifest: Path
    manifest_sha256: str  # of the manifest as it was read
    root: str | None = None  # folder of the images as params.yaml gives it; None: any

    def require(self) -> tuple[Path, None]:
        """The cache's path and rows (None: all); `UsageError` if the manifest has changed."""
        if sha256(self.manifest) != self.manifest_sha256:
            raise UsageError("the data set was prepared again after it was loaded; load it again")
        return self.path, None


@dataclass(frozen=True)
class OpenedFeatures:
    """The CLS features of a data set's images, and the file with its tokens and block inputs."""

    cls: NDArray[np.float32]  # [N, d]
    bad: Bools  # [N] images without features
    identity: dict[str, str]  # of the cache; `manifest`: table's digest, `features`: that of these rows
    path: Path | None = None  # of the cache; None for arrays
    rows: Ints | None = None  # [N] row of each image in the cache; None: all, in order


@dataclass(frozen=True, eq=False)
class Data:
    """The labels and features of a data set, for training and evaluation."""

    manifest: pd.DataFrame  # image, state, object, split
    labels: LabelSpace
    features: CachedFeatures | SharedFeatures | NDArray[np.float32]
    encoder: EncoderParams
    device: str = "auto"
    word_vectors: Path | None = None
    skip_frozen_blocks: bool = False  # run frozen blocks once if the cache starts at an earlier block
    files: Mapping[Path, str] = field(default_factory=dict)  # of a project -> sha256
    kept: dict[InputRequest, RunInputs] = field(default_factory=dict, init=False)  # by `inputs`
    # cache, blocks, precision -> the blocks' inputs
    advanced: dict[tuple[Path, int, str], NDArray[Any]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # a text tower cannot be pickled
        return {**vars(self), "kept": {}, "advanced": {}}

    def is_current(self) -> bool:
        """Whether a project's files are still those that were read."""
        if not isinstance(self.features, CachedFeatures):
            return True
        if any(sha256_once(path) != digest for path, digest in self.files.items()):
            return False
        stored = read_cache_digest(self.features.path) if self.kept else None
        return all(inputs.read[self.features.path.name] == stored for inputs in self.kept.values())

    def inputs(self, request: InputRequest = InputRequest()) -> RunInputs:
        """Read the requested data once: equal requests return the same object, kept in memory."""
        key = replace(request, needs=request.needs & {"patch"}, encoder=self._part(request)[0].name)
        if key not in self.kept:
            self.kept[key] = self.read(request)
        return self.kept[key]

    def read(self, request: InputRequest = InputRequest()) -> RunInputs:
        """Read the requested data; `DuplexError` if the cache is outdated or lacks some."""
        entry, place = self._part(request)
        if request.finetune is not None and len(joined_parts(self.encoder.name)) > 1:
            raise UsageError(
                f"the data set has several encoders ({self.encoder.name}), but blocks of one only can be fine-tuned; "
                "leave out `finetune`, or give the data set one encoder"
            )
        tower: TextTower | None = None
        identity = {"encoder": IMPORTED}
        if entry.name != IMPORTED:
            precision = request.precision
            options: Any = {"precision": precision, "resize": entry.resize}
            encoder = load_encoder(entry.name, entry.weights, towers="text", device=self.device, **options)
            tower = encoder.text
            identity = encoder.identity.to_dict()
        opened = self.open(identity) if place is None else self._open_part(place)
        arrays: dict[str, Any] = {"cls": opened.cls}
        record = {
            **identity,
            **({"weights": opened.identity["weights"]} if entry.name == IMPORTED else {}),
            "precision": entry.precision,
            "text_precision": request.precision,
            "name": entry.name,
            "tag": entry.weights or "",
            **({} if entry.resize is None else {RESIZE: entry.resize}),
            **({} if self.word_vectors is None else {WORD_VECTORS: sha256(self.word_vectors)}),
        }
        make_blocks: Callable[[], FinetunedBlocks] | None = None
        member_blocks: Callable[[FinetuneOptions], FinetunedBlocks] | None = None
        if opened.path is not None and "patch" in request.needs:
            patch = read_tokens(opened.path, "patch", int(request.memory * 2**30), opened.rows)
            if patch is not None:  # `make_method` asks for missing ones
                arrays["patch"] = patch
        if opened.path is not None and request.finetune is not None:
            arrays["block_inputs"], kept = self._block_inputs(opened, request, request.finetune)
            record |= kept
            device = resolve_device(self.device)
            make_blocks = finetuned_blocks_factory(record, request.finetune, device)
            member_blocks = lambda options: finetuned_blocks_factory(record, options, device)()  # noqa: E731
        negatives: Tensor | None = None
        if opened.path is not None:
            with open_cache(opened.path) as file:
                stored = read_negatives(file)
            negatives = None if stored is None else torch.from_numpy(stored).float()
        examples = join_labels(self.manifest, self.labels, arrays, opened.bad)
        read: dict[str, str | None] = {path.name: digest for path, digest in self.files.items()}
        if isinstance(self.features, CachedFeatures):
            read[self.features.path.name] = opened.identity["features"]
        return RunInputs(
            read=read,
            manifest=self.manifest,
            labels=self.labels,
            examples=examples,
            tower=tower,
            encoder=record,
            identity=opened.identity,
            bad=len(self.manifest) - sum(map(len, examples.values())),
            glove=self.word_vectors,
            make_blocks=make_blocks,
            member_blocks=member_blocks,
            negatives=negatives,
        )

    def _part(self, request: InputRequest) -> tuple[EncoderParams, int | None]:
        """The encoder to read, and its place among joined ones; None: the data set's own."""
        parts = joined_parts(self.encoder.name, self.encoder.weights)
        names = [name for name, _ in parts]
        if len(parts) == 1 or request.encoder not in names:
            return self.encoder, None
        place = names.index(request.encoder)
        name, weights = parts[place]
        return self.encoder.model_copy(update={"name": name, "weights": weights}), place

    def _open_part(self, place: int) -> OpenedFeatures:
        """The features of one of joined encoders, which are those of all, cut to its columns."""
        entry = self.encoder
        options: Any = {"precision": entry.precision, "resize": entry.resize}
        identity = encoder_identity(entry.name, **options).to_dict()
        opened = self.open(identity)
        widths = part_widths(identity)
        start = sum(widths[:place])
        return replace(opened, cls=opened.cls[:, start : start + widths[place]], path=None)

    def open(self, encoder: Mapping[str, str] = MappingProxyType({})) -> OpenedFeatures:
        """Read the CLS features; `DuplexError` if another encoder than `encoder` computed them."""
        if isinstance(self.features, np.ndarray):
            weights = f"arrays of width {self.features.shape[1]}"
            identity = {"weights": weights, "manifest": self._table_digest()}
            bad = np.zeros(len(self.manifest), dtype=bool)
            return OpenedFeatures(self.features, bad, identity)
        path, rows = self.features.require()
        expected: dict[str, str | None] = dict(encoder)
        if isinstance(self.features, CachedFeatures):
            expected |= {"manifest": self.features.manifest_sha256, ROOT: self.features.root}
        if self.encoder.name != IMPORTED:
            expected["precision"] = self.encoder.precision
        stored = read_features(path, expect=expected)
        identity = {key: str(value) for key, value in stored.identity.items()}
        if rows is None:
            identity["features"] = stored.contents
            return OpenedFeatures(stored.cls, stored.bad, identity, path)
        with open_cache(path) as file:
            digest = contents_digest(file, rows)
        identity |= {"manifest": self._table_digest(), "features": digest}
        bad = stored.bad[rows] | (rows < 0)
        return OpenedFeatures(stored.cls[rows], bad, identity, path, rows)

    def _table_digest(self) -> str:
        return hashlib.sha256(manifest_bytes(self.manifest)).hexdigest()

    def _block_inputs(
        self, opened: OpenedFeatures, request: InputRequest, finetune: FinetuneOptions
    ) -> tuple[Any, dict[str, str]]:
        """The activations that enter the last image-tower blocks, and what a checkpoint records."""
        path = opened.path
        assert path is not None
        stored = int(opened.identity.get("block_inputs", 0))
        dataset = path.parent.name
        blocks = finetune.depth
        total = blocks
        limit = int(request.memory * 2**30)
        if blocks > stored and self.encoder.name != IMPORTED:
            tower = load_encoder(self.encoder.name, self.encoder.weights, towers="image")
            total = block_count(tower)
            blocks = total if finetune.blocks == "all" else blocks
            select_blocks(tower, blocks)
        if opened.rows is not None and (finetune.augment or blocks > stored):
            needed = f"inputs of {blocks} blocks, but block_inputs is {stored}"
            remedy = f"load images with block_inputs={blocks}"
            if finetune.augment:
                needed = "pixels for augmentation, which only data sets of params.yaml have"
                remedy = "leave out finetune.augment"
            raise UsageError(f"fine-tuning needs {needed}; {remedy}")
        if PIXELS in opened.identity and (finetune.augment or blocks > stored):
            return self._pixels(path, request, blocks, blocks < total and not finetune.augment)
        remedy = f"in params.yaml and run `duplex extract --dataset {dataset}`"
        if finetune.augment:
            raise UsageError(
                f"finetune.augment changes pixels, but {path} has none; set "
                f"datasets.{dataset}.encoder.pixels to true {remedy}"
            )
        if blocks > stored:
            raise UsageError(
                f"finetune.blocks is {finetune.blocks}, but {path} holds the inputs of {stored} "
                f"blocks; set datasets.{dataset}.encoder.block_inputs to {blocks} (or "
                f"encoder.pixels to true) {remedy}"
            )
        record = {"block_inputs": str(stored)}
        if not self.skip_frozen_blocks or opened.rows is None or blocks == stored:
            return read_tokens(path, "block_inputs", limit, opened.rows), record
        chosen, back = np.unique(opened.rows, return_inverse=True)
        key = (path, blocks, self.encoder.precision)
        if key not in self.advanced:
            tokens = read_tokens(path, "block_inputs", limit, chosen)
            if isinstance(tokens, DiskTokens):
                return tokens.at(back), record
            from duplex.training.frozen_blocks import advanced_inputs  # which few runs need

            self.advanced.clear()
            self.advanced[key] = advanced_inputs(tokens, self._image_tower(), stored, blocks, self.encoder.precision)
        return self.advanced[key][back], {**record, "block_inputs": str(blocks)}

    def _pixels(self, path: Path, request: InputRequest, blocks: int, advance: bool) -> tuple[Any, dict[str, str]]:
        """All images' pixels, or inputs of the last `blocks` blocks, if these are wanted and fit into memory."""
        limit = int(request.memory * 2**30)
        pixels = read_tokens(path, PIXELS, limit)
        if advance:
            precision = "bf16" if request.precision == "bf16" else self.encoder.precision
            key = (path, blocks, precision)
            if key not in self.advanced:
                from duplex.training.frozen_blocks import advanced_pixels  # which few runs need

                self.advanced.clear()
                found = advanced_pixels(pixels, self._image_tower(), blocks, precision, limit)
                if found is not None:
                    self.advanced[key] = found
            if key in self.advanced:
                return self.advanced[key], {"block_inputs": str(blocks)}
        return pixels, {PIXELS: "true"}

    def _image_tower(self) -> Encoder:
        device = resolve_device(self.device)
        return load_encoder(self.encoder.name, self.encoder.weights, towers="image", device=device)


def open_data(params: Params, dataset: str, paths: ArtifactPaths) -> Data:
    """Open a data set of params.yaml; features are read and checked by `Data.read`."""
    entry = params.dataset(dataset)
    place = paths.manifest(dataset)
    names = paths.labels(dataset)
    files = {path: sha256_once(path) for path in (place, names) if path.is_file()}
    manifest = read_manifest(place)
    labels = LabelSpace.load(names)
    if any(sha256_once(path) != digest for path, digest in files.items()):
        reason = f"the data set {dataset} was prepared again while it was read"
        raise DuplexError(f"{reason}; run the same command again")
    features = CachedFeatures(paths.features(dataset), place, files[place], entry.source.recorded_root)
    words = params.evaluation.word_vectors
    return Data(manifest, labels, features, entry.encoder, params.device, words, files=files)


NEEDED = ("state", "object")  # columns of a table of labels


def label_table(
    table: pd.DataFrame | Mapping[str, Sequence[str]], rows: int, index: pd.Index | None = None
) -> pd.DataFrame:
    """Check and return a table of labels of `rows` images, which are matched by position.

    index: the features' pandas index, which must equal the table's.
    """
    columns = table.values() if isinstance(table, Mapping) else [table]
    indexes = [each for each in (index, *map(pandas_index, columns)) if each is not None]
    if not all(each.equals(indexes[0]) for each in indexes):
        raise UsageError(
            "rows are matched by position, but the pandas indexes of `features` and the table's "
            "columns differ; put their rows into the same order, then call "
            "`reset_index(drop=True)` on each"
        )
    try:
        frame = pd.DataFrame(table).reset_index(drop=True)
    except ValueError as error:
        reason = f"pandas cannot read the table ({error})"
        raise UsageError(f"{reason}; give each column one entry per image") from None
    frame.columns = frame.columns.map(str)
    known = known_columns(frame.columns.tolist(), "the table", NEEDED, ("image",))
    if len(frame) != rows:
        differ = f"`features` has {rows} rows, but the table has {len(frame)}"
        raise UsageError(f"{differ}; expected one row per image")
    frame = frame[known]
    if "image" not in frame:
        frame = frame.assign(image=[str(row) for row in range(rows)])
    frame = checked_cells(frame, "the table", lambda row: f"the table, row {row}", paths=False)
    if frame["image"].duplicated().any():
        image = frame.loc[frame["image"].duplicated(), "image"].iloc[0]
        raise UsageError(f"the table lists the image {image!r} twice; expected one row per image")
    return frame[[column for column in COLUMNS if column in frame]].astype(object)


def pandas_index(value: object) -> pd.Index | None:
    """A pandas object's index, or a mapping's keys, which pandas treats as an index, or None."""
    index = pd.Index(list(value)) if isinstance(value, Mapping) else getattr(value, "index", None)
    return index if isinstance(index, pd.Index) else None


def missing_needs(params: Params, dataset: str, method: str) -> list[str]:
    """The inputs (`text`, `words`, `patch`) that a method needs and a data set lacks."""
    entry = params.dataset(dataset)
    is_unknown = entry.encoder.name == IMPORTED
    no_text = is_unknown or not has_text(entry.encoder.name)
    lacking = {
        "text": no_text,
        "words": no_text and params.evaluation.word_vectors is None,
        "patch": is_unknown or entry.features is not None,
    }
    needs = set(find_method(params.entry(method).kind).needs(params.method(method, dataset)))
    for member in params.entry(method).members:
        needs.update(missing_needs(params, dataset, member))
    return [need for need in lacking if lacking[need] and need in needs]


def require_configured_inputs(params: Params, dataset: str, method: str) -> None:
    """Raise `UsageError` if params.yaml gives a data set no source for what a method needs."""
    missing = missing_needs(params, dataset, method)
    if not missing:
        return
    remedies = {
        "text": "the text tower of the encoder that made the features: if it has one, name this "
        f"encoder as datasets.{dataset}.encoder in params.yaml",
        "words": "word vectors: set evaluation.word_vectors in params.yaml to a file in GloVe format",
        "patch": f"patch tokens, not imported features: give datasets.{dataset} in params.yaml an encoder instead",
    }
    others = ", ".join(supported_methods(params, dataset)[:3])
    advice = f"or choose a method such as {others}" if others else "or choose another method"
    raise UsageError(f"{method} on {dataset} needs {remedies[missing[0]]}, {advice}")


def supported_methods(params: Params, dataset: str) -> list[str]:
    """Names of the methods of params.yaml whose inputs the data set has."""
    found = []
    for name in params.methods:
        with suppress(DuplexError):  # of a plug-in that cannot be imported
            if not missing_needs(params, dataset, name):
                found.append(name)
    return found


SHORT = 32  # bytes of a pair that every text tower but the packaged one reads


def long_prompts(encoder: str, weights: str | None, labels: LabelSpace) -> list[str]:
    """Pairs whose prompt `a photo of STATE OBJECT` is too long for the encoder's text tower."""
    compositions = labels.candidates("closed", "train")
    names = labels.names(compositions)
    if encoder != PACKAGED and all(len(name.encode()) <= SHORT for name in names):
        return []
    tower = load_encoder(encoder, weights, towers="text").text
    if tower is None:
        return []
    around = len(tower.tokens(TEMPLATE)) + sum(token is not None for token in (tower.start, tower.end))
    states = [len(name_tokens(tower, word)) for word in labels.states]
    objects = [len(name_tokens(tower, word)) for word in labels.objects]
    m = labels.state_of(compositions)
    n = labels.object_of(compositions)
    lengths = around + np.array(states)[m] + np.array(objects)[n]
    return [names[place] for place in np.flatnonzero(lengths > tower.context_length)]
