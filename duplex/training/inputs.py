"""Load the inputs of training and evaluation: labels, cached features, text tower, word vectors.

Data sets whose features and labels are arrays in memory: check them, and make from them what training reads.

Inputs that a method needs and a data set lacks, found from params.yaml before anything is loaded.

Find pairs whose prompt is longer than an encoder's text tower accepts, before anything is encoded.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from duplex.artifacts import ArtifactPaths
from duplex.config.params import EncoderParams, Params
from duplex.data.sources import require_prepared
from duplex.data.tables import (
    COLUMNS,
    LabelledImages,
    checked_cells,
    known_columns,
    manifest_bytes,
    read_manifest,
    refuse_unnamed_split,
)
from duplex.encoders.base import PACKAGED, TextTower, load_encoder, resolve_device
from duplex.encoders.image_blocks import require_blocks
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.feasibility import read_word_vectors
from duplex.features.file import IMPORTED, ROOT, Features, open_features
from duplex.features.imported import require_imported
from duplex.features.tokens import Arrays, Examples, join, read_tokens
from duplex.labels import LabelSpace, UnknownLabel, World, prompt_name
from duplex.methods.base import Method, MethodContext, PrimitiveVectors
from duplex.methods.finetuned import FinetunedBlocks, finetuned_blocks_factory
from duplex.methods.paths import TEMPLATE, word_vectors
from duplex.methods.registry import find_method
from duplex.options import FinetuneOptions, TrainingOptions
from duplex.system.files import sha256
from duplex.training.checkpoint import WORD_VECTORS


@dataclass(frozen=True)
class InputRequest:
    """Request for the inputs of a run: kinds of features, text tower's precision, fine-tuned blocks, memory limit."""

    needs: frozenset[str] = frozenset({"cls", "text"})  # `Method.needs`
    precision: str = "fp32"  # of the text tower, in training and evaluation alike
    finetune: FinetuneOptions | None = None
    memory: float = TrainingOptions.memory  # GiB of patch tokens and block inputs to hold; larger ones stay on disk


@dataclass(frozen=True)
class RunInputs:
    """Data that a method is trained and evaluated on: labels, features, text tower, word vectors.

    Runs that request the same data share one object.
    """

    manifest: pd.DataFrame
    labels: LabelSpace
    examples: dict[str, Examples]  # split -> features and labels
    tower: TextTower | None  # None for an encoder without text tower, and for imported features
    encoder: dict[str, str]  # identity of the encoder and its name in params.yaml, for checkpoints
    identity: dict[str, str]  # of the feature cache; `features`: digest of its content
    bad: int  # number of unreadable images, which are left out
    glove: Path | None = None  # file of word vectors
    make_blocks: Callable[[], FinetunedBlocks] | None = None
    member_blocks: Callable[[FinetuneOptions], FinetunedBlocks] | None = None  # the same with any options
    members: tuple[Method[Any], ...] = ()  # finished runs that the method combines

    def context(self, world: World = "closed") -> MethodContext:
        """Return what the constructor of a method receives: labels, shapes of the inputs, text tower and word vectors.

        world: world whose candidates are used in training.
        """
        shapes = {name: tuple(values.shape[1:]) for name, values in self.examples["train"].inputs.items()}
        blocks = self.make_blocks, self.members, self.member_blocks
        labels = replace(self.labels, pairs={split: pairs.copy() for split, pairs in self.labels.pairs.items()})
        return MethodContext(labels, shapes, self.tower, self.words, world, *blocks)

    @cached_property
    def words(self) -> PrimitiveVectors | None:
        """Word vectors of all states and objects: from the GloVe file, else from the text tower; else None."""
        if self.glove is not None:
            table = read_word_vectors(self.glove, [*self.labels.states, *self.labels.objects])
            if table.missing:
                print(f"{self.glove} has no vector for: {', '.join(table.missing)}", file=sys.stderr)
            states, objects = np.split(table.vectors, [len(self.labels.states)])
            return PrimitiveVectors(torch.from_numpy(states), torch.from_numpy(objects))
        return None if self.tower is None else PrimitiveVectors(*word_vectors(self.labels, self.tower))


LoadInputs = Callable[[Params, str, ArtifactPaths, InputRequest], RunInputs]  # `load_inputs`, or an `InputsCache`


class InputsCache:
    """Callable that reads a run's labels, features and text tower, and keeps those of the last data set in memory."""

    def __init__(self) -> None:
        self._dataset = ""
        self._inputs: InputsByRequest | None = None

    def __call__(self, params: Params, dataset: str, paths: ArtifactPaths, request: InputRequest) -> RunInputs:
        if self._inputs is None or dataset != self._dataset:
            self._inputs = None  # frees memory before the next data set is loaded
            self._dataset, self._inputs = dataset, InputsByRequest(DatasetFiles.of(params, dataset, paths).read)
        return self._inputs(request)


class InputsByRequest:
    """Callable that returns features and text tower of one data set for an `InputRequest`, and keeps them in memory.

    Files are read only once for equal requests.

    read: function that reads the data for a request.
    manifest: table of images that the data set must still have, else `UsageError` is raised; None: no check.
    """

    def __init__(self, read: Callable[[InputRequest], RunInputs], manifest: pd.DataFrame | None = None) -> None:
        self._read = read
        self._manifest = manifest
        self._inputs: dict[InputRequest, RunInputs] = {}

    def __call__(self, request: InputRequest) -> RunInputs:
        key = replace(request, needs=request.needs & {"patch"})
        if key not in self._inputs:
            inputs = self._read(request)
            if self._manifest is not None and manifest_bytes(inputs.manifest) != manifest_bytes(self._manifest):
                raise UsageError("the data set was prepared again after it was loaded; load it again")
            self._inputs[key] = inputs
        return self._inputs[key]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the methods' inputs in memory: a text tower cannot be pickled."""
        return {**vars(self), "_inputs": {}}


def load_inputs(
    params: Params, dataset: str, paths: ArtifactPaths, request: InputRequest = InputRequest()
) -> RunInputs:
    """Read labels, cached features and text tower of a data set of params.yaml, to train or evaluate a run."""
    return DatasetFiles.of(params, dataset, paths).read(request)


@dataclass(frozen=True)
class DatasetFiles:
    """A data set on disk: its manifest, labels and cached features, and the encoder that computed the features."""

    manifest: Path
    labels: Path
    features: Path
    encoder: EncoderParams
    device: str = "auto"
    word_vectors: Path | None = None
    recorded_root: str | None = None  # folder of the images as params.yaml gives it; None: any

    @classmethod
    def of(cls, params: Params, dataset: str, paths: ArtifactPaths) -> DatasetFiles:
        """Return the paths of a data set of params.yaml (manifest, labels, features, ...), its encoder and device.

        Raises `DuplexError` if the data set's source was edited after `duplex prepare`, or its file of features after
        `duplex extract`.
        """
        require_prepared(params.dataset(dataset).source, paths.source(dataset))
        require_imported(params.dataset(dataset).features, paths.features(dataset))
        return cls(
            paths.manifest(dataset),
            paths.labels(dataset),
            paths.features(dataset),
            params.dataset(dataset).encoder,
            params.device,
            params.evaluation.word_vectors,
            params.dataset(dataset).source.recorded_root,
        )

    def read(self, request: InputRequest) -> RunInputs:
        """Read labels, cached features and text tower as a run requests them.

        Raises `UsageError` if the cache lacks requested patch tokens or block inputs, `DuplexError` if the cache is
        outdated.
        """
        manifest, labels = read_manifest(self.manifest), LabelSpace.load(self.labels)
        tower, identity = load_text_tower(self.encoder, self.device, request.precision)
        expected = {**identity, "manifest": sha256(self.manifest), ROOT: self.recorded_root}
        if self.encoder.name != IMPORTED:
            expected["precision"] = self.encoder.precision
        features = open_features(self.features, expect=expected)
        cache_identity = {key: str(value) for key, value in features.identity.items()}
        cache_identity["features"] = features.contents
        try:
            examples = join(manifest, labels, _read_arrays(features, self.encoder, request), features.bad)
            fits = all(np.isin(each.compositions, labels.pairs[split]).all() for split, each in examples.items())
        except UnknownLabel:
            fits = False
        if not fits:
            raise DuplexError(
                f"{self.labels} does not list all pairs of {self.manifest}; "
                f"`duplex prepare --dataset {self.manifest.parent.name}` writes both again"
            )
        encoder = encoder_record(self.encoder, identity, cache_identity, request, self.word_vectors)
        make_blocks: Callable[[], FinetunedBlocks] | None = None
        member_blocks: Callable[[FinetuneOptions], FinetunedBlocks] | None = None
        if request.finetune is not None:
            encoder |= {key: cache_identity[key] for key in ("block_inputs", "bits") if key in cache_identity}
            device = resolve_device(self.device)
            make_blocks = finetuned_blocks_factory(encoder, request.finetune, device)
            member_blocks = lambda options: finetuned_blocks_factory(encoder, options, device)()  # noqa: E731
        bad = len(manifest) - sum(map(len, examples.values()))
        blocks = make_blocks, member_blocks
        return RunInputs(manifest, labels, examples, tower, encoder, cache_identity, bad, self.word_vectors, *blocks)


def encoder_record(
    entry: EncoderParams,
    identity: Mapping[str, str],
    cache: Mapping[str, str],
    request: InputRequest,
    word_vectors: Path | None,
) -> dict[str, str]:
    """Return what a checkpoint stores on its encoder: identity, name, precisions, digest of the word-vector file.

    identity: name, weights, preprocessing and other settings that the features depend on (`EncoderIdentity`).
    cache: identity of the feature cache, for imported features, whose encoder is unknown.
    """
    return {
        **identity,
        **({"weights": cache["weights"]} if entry.name == IMPORTED else {}),
        "precision": entry.precision,
        "text_precision": request.precision,
        "name": entry.name,
        "tag": entry.weights or "",
        **({} if word_vectors is None else {WORD_VECTORS: sha256(word_vectors)}),
    }


def load_text_tower(entry: EncoderParams, device: str, precision: str) -> tuple[TextTower | None, dict[str, str]]:
    """Return an encoder's text tower (None if it has none), and the encoder's identity as a dictionary.

    precision: number format of the text tower, such as fp32.
    """
    if entry.name == IMPORTED:
        return None, {"encoder": IMPORTED}
    encoder = load_encoder(entry.name, entry.weights, towers="text", device=device, precision=precision)
    return encoder.text, encoder.identity.to_dict()


def _read_arrays(features: Features, encoder: EncoderParams, request: InputRequest) -> Arrays:
    """Read from a feature cache the arrays that a run needs: CLS features, and patch tokens or block inputs on request.

    Raises `UsageError` if the cache lacks requested patch tokens or block inputs.

    encoder: the encoder of the cache, whose image tower is loaded to count its blocks for an error message.
    """
    limit, dataset = int(request.memory * 2**30), features.path.parent.name
    arrays: dict[str, Any] = {"cls": features.cls}
    patches = read_tokens(features.path, "patch", limit) if "patch" in request.needs else None
    if patches is not None:
        arrays["patch"] = patches
    elif "patch" in request.needs:
        raise UsageError(
            f"the method needs patch tokens, and {features.path} has none; set extraction.tokens to patch in "
            f"params.yaml and run `duplex extract --dataset {dataset}`"
        )
    if request.finetune is not None:
        wanted, stored = request.finetune.blocks, int(features.identity.get("block_inputs", 0))
        if wanted > stored:
            if encoder.name != IMPORTED:
                require_blocks(load_encoder(encoder.name, encoder.weights, towers="image"), wanted)
            raise UsageError(
                f"finetune.blocks is {wanted} and {features.path} holds the inputs of {stored} blocks; set "
                f"datasets.{dataset}.encoder.block_inputs to {wanted} in params.yaml and run "
                f"`duplex extract --dataset {dataset}`"
            )
        arrays["block_inputs"] = read_tokens(features.path, "block_inputs", limit)
    return arrays


NEEDED = ("state", "object")


@dataclass(frozen=True)
class ArrayFeatures:
    """Data set of labelled images whose features are an array in memory; `read` returns them for training."""

    data: LabelledImages
    features: NDArray[np.float32]  # [N, d]
    encoder: EncoderParams
    device: str
    word_vectors: Path | None

    def read(self, request: InputRequest) -> RunInputs:
        """Return what a training run needs: features and labels of each split, text tower, and identity of the encoder.

        Patch tokens and block inputs (activations for fine-tuning) are never included, even if `request` asks for them.
        """
        manifest, labels = self.data.manifest, self.data.labels
        tower, identity = load_text_tower(self.encoder, self.device, request.precision)
        examples = join(manifest, labels, {"cls": self.features}, np.zeros(len(manifest), dtype=bool))
        table = hashlib.sha256(manifest_bytes(manifest)).hexdigest()
        cache = {"weights": f"arrays of width {self.features.shape[1]}", "manifest": table}
        encoder = encoder_record(self.encoder, identity, cache, request, self.word_vectors)
        return RunInputs(manifest, labels, examples, tower, encoder, cache, 0, self.word_vectors)


def checked_table(
    table: pd.DataFrame | Mapping[str, Sequence[str]], rows: int, index: pd.Index | None = None
) -> pd.DataFrame:
    """Check a user's table of labels and return its columns image, state, object and, if present, split.

    Without a column image, images are named by their row numbers. Raises `DuplexError` for a wrong table.

    rows: number of images in the array of features.
    index: the pandas index of the features, if they have one. Rows are matched to features by position, so different
        indexes raise `UsageError`.
    """
    columns = table.values() if isinstance(table, Mapping) else [table]
    _require_equal([index, *map(pandas_index, columns)])
    try:
        frame = pd.DataFrame(table).reset_index(drop=True)
    except ValueError as error:
        raise UsageError(f"the table is not one row per image: {error}") from None
    frame.columns = frame.columns.map(str)
    known = known_columns(frame.columns.tolist(), "the table", NEEDED, ("image",))
    refuse_unnamed_split(frame, "the table")
    if len(frame) != rows:
        raise UsageError(f"features has {rows} rows and the table {len(frame)}; expected one row per image in both")
    frame = frame[known]
    if "image" not in frame:
        frame = frame.assign(image=[str(row) for row in range(rows)])
    frame = checked_cells(frame, "the table", lambda row: f"the table, row {row}", paths=False)
    if frame["image"].duplicated().any():
        image = frame.loc[frame["image"].duplicated(), "image"].iloc[0]
        raise UsageError(f"the table lists the image {image!r} twice; expected one row per image")
    return frame[[column for column in COLUMNS if column in frame]].astype(object)


def _require_equal(indexes: Sequence[pd.Index | None]) -> None:
    """Raise `UsageError` unless the pandas indexes of the features and of the table's columns are equal.

    indexes: one per array or column; None, for one without an index, is skipped.
    """
    present = [index for index in indexes if index is not None]
    if not all(index.equals(present[0]) for index in present):
        raise UsageError(
            "features and the table's columns have different pandas indexes, but rows are matched by position; "
            "bring all into one order and call reset_index(drop=True) on each"
        )


def pandas_index(value: object) -> pd.Index | None:
    """Return a pandas object's index, or a mapping's keys (pandas aligns rows by both); None for other values."""
    index = pd.Index(list(value)) if isinstance(value, Mapping) else getattr(value, "index", None)
    return index if isinstance(index, pd.Index) else None


def missing_needs(params: Params, dataset: str, method: str) -> list[str]:
    """Return which of `text` tower, `words` (word vectors), `patch` tokens a method needs and a data set lacks.

    Features of an unknown encoder have no text tower, and no word vectors unless params.yaml names a file; imported
    features have no patch tokens. Encoders are not loaded, so an encoder without a text tower is not noticed.
    """
    entry = params.dataset(dataset)
    is_unknown = entry.encoder.name == IMPORTED
    lacking = {
        "text": is_unknown,
        "words": is_unknown and params.evaluation.word_vectors is None,
        "patch": is_unknown or entry.features is not None,
    }
    needs = set(find_method(params.entry(method).kind).needs(params.method(method, dataset)))
    for member in params.entry(method).members:
        needs.update(missing_needs(params, dataset, member))
    return [need for need in lacking if lacking[need] and need in needs]


def require_inputs(params: Params, dataset: str, method: str) -> None:
    """Raise UsageError if, by params.yaml, a data set lacks an input that a method needs; the message has a remedy."""
    missing = missing_needs(params, dataset, method)
    if not missing:
        return
    remedies = {
        "text": f"the text tower of the encoder that made the features: name it as datasets.{dataset}.encoder",
        "words": "word vectors: set evaluation.word_vectors to a file in GloVe format",
        "patch": f"patch tokens, which imported features lack: let datasets.{dataset} encode its images",
    }
    others = supported_methods(params, dataset)
    advice = f"or choose a method such as {', '.join(others[:3])}" if others else "or choose another method"
    raise UsageError(f"{method} on {dataset} needs {remedies[missing[0]]} in params.yaml, {advice}")


def supported_methods(params: Params, dataset: str) -> list[str]:
    """Return the names of the methods of params.yaml that can be trained with the inputs that a data set has."""
    return [name for name in params.methods if _is_supported(params, dataset, name)]


def _is_supported(params: Params, dataset: str, method: str) -> bool:
    try:
        return not missing_needs(params, dataset, method)
    except DuplexError:  # of a plug-in that cannot be imported
        return False


SHORT = 32  # bytes of state and object that every text tower but the packaged one reads: no token is below a byte


def long_prompts(encoder: str, weights: str | None, labels: LabelSpace) -> list[str]:
    """Return the pairs whose prompt `a photo of STATE OBJECT` has more tokens than an encoder's text tower accepts.

    The tower is not loaded if all names are so short that they fit. Without a text tower, the list is empty.
    """
    compositions = labels.candidates("closed", "train")
    names = labels.names(compositions)
    if encoder != PACKAGED and all(len(name.encode()) <= SHORT for name in names):
        return []
    tower = load_encoder(encoder, weights, towers="text").text
    if tower is None:
        return []
    around = 2 + len(tower.tokens(TEMPLATE))  # start, end, context
    states, objects = (
        [len(tower.tokens(prompt_name(word))) for word in words] for words in (labels.states, labels.objects)
    )
    pairs = zip(labels.state_of(compositions).tolist(), labels.object_of(compositions).tolist(), strict=True)
    lengths = (around + states[m] + objects[n] for m, n in pairs)
    return [name for name, length in zip(names, lengths, strict=True) if length > tower.context_length]
