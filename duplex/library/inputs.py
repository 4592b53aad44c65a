"""Load the inputs of training and evaluation: labels, cached features, text tower, word vectors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import EncoderParams, Params
from duplex.data.manifest import manifest_bytes, read_manifest
from duplex.data.prepared_source import require_prepared
from duplex.encoders import load_encoder, resolve_device
from duplex.encoders.image_blocks import require_blocks
from duplex.encoders.text_tower import TextTower
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.glove import read_word_vectors
from duplex.features.examples import Arrays, Examples, join
from duplex.features.identity import IMPORTED, ROOT
from duplex.features.importing import require_imported
from duplex.features.store import Features, open_features
from duplex.features.tokens import read_tokens
from duplex.labels import LabelSpace, UnknownLabel, World
from duplex.layers.finetuned_blocks import FinetunedBlocks, finetuned_blocks_factory
from duplex.layers.prompt_paths import word_vectors
from duplex.methods.base import Method, MethodContext, PrimitiveVectors
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


def make_deterministic() -> None:
    """Make PyTorch deterministic: the same seed gives the same checkpoint, on a GPU too.

    Call it before anything runs on the GPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time


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
