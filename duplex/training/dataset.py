"""Data sets for `duplex.fit`: from params.yaml, from a folder or a table of images, or from arrays of features."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from duplex.artifacts import ArtifactPaths
from duplex.config.params import EncoderParams, EvaluationParams, Params, load_params, shipped_project
from duplex.data.check import alike_labels, content_issues
from duplex.data.contents import file_digests, row_keys
from duplex.data.sources import detect_source, load_source
from duplex.data.tables import from_rows
from duplex.encoders.base import encoder_identity, is_random, load_encoder, resolve_device, unknown_words
from duplex.errors import DuplexError, UsageError, require, require_whole
from duplex.features.extract import encode_shared, user_cache
from duplex.features.file import IMPORTED
from duplex.features.imported import FEATURES, checked_features
from duplex.labels import SPLITS, LabelSpace, prompt_name
from duplex.options import DEFAULT_TRAINING, SplitOptions, TrainingOptions
from duplex.system.entry import LARGEST_SEED
from duplex.system.files import checked_path
from duplex.system.threads import initial_modes
from duplex.training.inputs import Data, checked_table, open_data, pandas_index


class Dataset:
    """Data set for training and evaluation: images as encoder features, with labels and a train, val and test split.

    `load_dataset` and `Dataset.from_arrays` make one.
    """

    def __init__(
        self,
        name: str,
        data: Data,
        *,
        patches: bool = False,
        project: Params | None = None,
    ) -> None:
        """Make a data set from its parts; users call `load_dataset` or `Dataset.from_arrays` instead.

        name: for messages, and in a project the data set's name in params.yaml.
        patches: whether the data set has patch tokens.
        project: the project's params.yaml, where `fit` finds methods by name; None: the one that the package ships.
        """
        self.name = name
        self.labels = data.labels
        self._data = data
        self.in_project = project is not None
        self.params = project or _shipped_params()
        self.evaluation = project.evaluation if project else EvaluationParams()
        # Training options where neither the method nor the caller sets others
        self.training = project.dataset(name).training if project else TrainingOptions.from_dict(DEFAULT_TRAINING)
        self.inputs = data.inputs
        self.device = data.device
        offers = {"cls": True, "text": data.encoder.name != IMPORTED, "patch": patches}
        offers["words"] = offers["text"] or data.word_vectors is not None
        self.offers = frozenset(name for name, is_there in offers.items() if is_there)  # as `Method.needs` names them

    @property
    def manifest(self) -> pd.DataFrame:
        """Copy of the data set's table (columns image, state, object, split); pass a changed one to `from_arrays`."""
        return self._data.manifest.copy()

    @property
    def features(self) -> NDArray[np.float32]:
        """CLS features [images, width], one row per line of `manifest`, not normalised; zero for unreadable images."""
        opened = self._data.open()
        return np.where(opened.bad[:, None], np.float32(0), opened.cls)

    @classmethod
    @initial_modes()
    def from_arrays(
        cls,
        features: Any,
        table: pd.DataFrame | Mapping[str, Sequence[str]],
        *,
        encoder: str | None = None,
        weights: str | None = None,
        word_vectors: str | Path | None = None,
        device: str = "auto",
        name: str = "arrays",
    ) -> Dataset:
        """Return a data set of features that are already computed.

        features: numbers [images, width], as an array or a tensor, not normalised.
        table: one row per image with the columns state, object and split (train, val or test), and optionally image,
            the names of the images. Without a split column, images are split at random as by `duplex data add`, which
            holds out some pairs as unseen and keeps images of equal features together. Rows belong to features by
            position; if both are pandas objects, their indexes must be equal.
        encoder: name of the encoder that computed the features (`duplex encoders`). Without it there is no text tower,
            and only methods without prompts can be trained.
        weights: the encoder's weights, a published tag or a file.
        word_vectors: file in GloVe format, for methods that use word vectors, and to exclude implausible unseen pairs
            in the open world.
        device: device for training and evaluation: auto, cpu or cuda.
        name: name of the data set, for messages.
        """
        if encoder is None and weights is not None:
            raise UsageError("weights are given without their encoder; name it with `encoder=`")
        if is_random(weights):
            raise UsageError(
                f"random weights ({weights!r}) did not make these features; name those that did, or no encoder"
            )
        values = checked_features(features)
        try:
            rows = checked_table(table, len(values), pandas_index(features))
            keys = row_keys(values)
            data = from_rows(rows, SplitOptions(), "the table", lambda images: keys)  # `checked_table` keeps all rows
        except DuplexError as error:
            raise UsageError(str(error)) from None
        for line in alike_labels(data):
            print(f"{name}: {line}", file=sys.stderr)
        for issue in content_issues(data.manifest, dict(zip(rows["image"], keys, strict=True)), FEATURES):
            if issue.count:
                print(f"{name}: {issue}", file=sys.stderr)
        entry = EncoderParams(name=IMPORTED) if encoder is None else _known_encoder(encoder, weights, data.labels)
        if encoder is not None and (width := encoder_identity(encoder, weights).dim) != values.shape[1]:
            raise UsageError(
                f"the features have a width of {values.shape[1]} and {encoder} makes features of {width}; "
                "name the encoder that made them, or leave `encoder=` out"
            )
        words = _word_file(word_vectors)
        return cls(name, Data(data.manifest, data.labels, values, entry, _checked_device(device), words))

    def __repr__(self) -> str:
        images = {split: int((self.manifest["split"] == split).sum()) for split in SPLITS}
        counts = ", ".join(f"{count:,} {split}" for split, count in images.items())
        return (
            f"Dataset({self.name}: {counts} images; {len(self.labels.states)} states, {len(self.labels.objects)} "
            f"objects, {len(self.labels.pairs['train'])} seen pairs)"
        )


@initial_modes()
def load_dataset(
    source: str | Path,
    *,
    encoder: str | None = None,
    weights: str | None = None,
    images: str | Path | None = None,
    split_seed: int | None = None,
    tokens: Literal["none", "patch"] = "none",
    word_vectors: str | Path | None = None,
    cache: str | Path | None = None,
    device: str | None = None,
) -> Dataset:
    """Load a data set: one of params.yaml in the current folder or, if `encoder` is given, one of image files.

    Features of image files are computed once: the cache, which `duplex fit` shares, recognises the files by content.
    All arguments but `source` and `device` are for image files; params.yaml describes its own data sets.

    source: name of a data set of params.yaml; or a folder `state/object/*.jpg`, the folder of a published benchmark, or
        a table (CSV or Parquet) with the columns image, state, object and optionally split.
    encoder: name of the frozen encoder (`duplex encoders` lists those on disk).
    weights: the encoder's weights, a published tag or a file.
    images: folder that a table's image paths start from; by default the table's folder.
    split_seed: seed of the random split, for data without a split. None: 0.
    tokens: "patch" also keeps patch tokens, for the methods that need them.
    word_vectors: file in GloVe format, for methods that use word vectors, and to exclude implausible unseen pairs in
        the open world.
    cache: folder of the feature caches; by default `duplex` in the user's cache folder.
    device: device for encoder, training and evaluation: auto, cpu or cuda. None: as in params.yaml, else auto.
    """
    if encoder is None:
        given: dict[str, object] = {"weights": weights, "images": images, "word_vectors": word_vectors, "cache": cache}
        given |= {"split_seed": split_seed, "tokens": None if tokens == "none" else tokens}
        if names := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(names)}: only for image files; add `encoder=`, or leave this out")
        return _project_dataset(str(source), device)
    seed = SplitOptions.seed if split_seed is None else require_whole(split_seed, "split_seed", 0, LARGEST_SEED)
    place, device = checked_path(source, "source").resolve(), _checked_device(device or "auto")
    image_folder = None if images is None else checked_path(images, "images").resolve()
    try:
        description = detect_source(place, SplitOptions(seed=seed), image_folder)
        data = load_source(description)
    except DuplexError as error:
        raise UsageError(str(error)) from None
    if split_seed is not None and not data.made_split:
        raise UsageError(f"split_seed is {seed}, but {place} has a split of its own; leave split_seed out")
    for note, count in data.notes.items():
        print(f"{place.name}: {note}: {count:,}", file=sys.stderr)
    for line in alike_labels(data):
        print(f"{place.name}: {line}", file=sys.stderr)
    entry, words = _known_encoder(encoder, weights, data.labels), _word_file(word_vectors)
    folder = user_cache() if cache is None else checked_path(cache, "cache").resolve()
    names, root = data.manifest["image"].tolist(), description.root
    digests = file_digests(root, names)
    present = {image: digest for image, digest in zip(names, digests, strict=True) if digest}
    for issue in content_issues(data.manifest, present):
        if issue.count:
            print(f"{place.name}: {issue}", file=sys.stderr)
    tower = load_encoder(entry.name, entry.weights, towers="image", device=device)
    features, bad = encode_shared(folder, tower, root, names, digests, tokens=tokens)
    if bad:
        print(
            f"{len(bad)} of {len(names)} images cannot be encoded and are left out, the first {bad[0].image} "
            f"({bad[0].reason})",
            file=sys.stderr,
        )
    loaded = Data(data.manifest, data.labels, features, entry, device, words)
    return Dataset(place.stem, loaded, patches=tokens == "patch")


@lru_cache(maxsize=1)
def _shipped_params() -> Params:
    return load_params(shipped_project() / "params.yaml")


def _project_dataset(name: str, device: str | None) -> Dataset:
    if not Path("params.yaml").is_file():
        raise UsageError(f"the current folder has no params.yaml with a data set {name!r}; image files need `encoder=`")
    params, paths = load_params(), ArtifactPaths(ArtifactPaths.root.resolve())
    if name not in params.datasets and Path(name).exists():
        raise UsageError(f"{name} is no data set of params.yaml; image files need `encoder=`")
    data = open_data(params, name, paths)
    if device is not None:
        data = replace(data, device=_checked_device(device))
    patches = params.extraction.tokens == "patch" and params.dataset(name).features is None
    return Dataset(name, data, patches=patches, project=params)


def _checked_device(device: str | torch.device) -> str:
    device = str(device)
    require(device.partition(":")[0], ("auto", "cpu", "cuda"), "device")
    resolve_device(device)  # raises for a GPU that is not there
    return device


def _word_file(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    file = checked_path(path, "word_vectors")
    if not file.is_file():
        raise UsageError(f"word_vectors: {path} is not a file; expected one in GloVe format")
    return file.resolve()


def _known_encoder(name: str, weights: str | None, labels: LabelSpace) -> EncoderParams:
    encoder_identity(name, weights)
    if unknown := unknown_words(name, map(prompt_name, (*labels.states, *labels.objects))):
        raise UsageError(f"{name} does not know the words {', '.join(unknown[:5])}; choose another encoder")
    return EncoderParams(name=name, weights=weights)
