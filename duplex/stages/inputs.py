"""What training and evaluation read: manifest, labels, checked features, and what else a method asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import DatasetParams, Params
from duplex.data.manifest import manifest_hash, read_manifest
from duplex.data.source import ensure_pictures
from duplex.encoders import Encoder, load_encoder, resolve_device
from duplex.encoders.text import TextTower
from duplex.errors import UsageError
from duplex.evaluation.glove import read_word_vectors
from duplex.features.encoding import Kept
from duplex.features.examples import Arrays, Examples, join
from duplex.features.identity import IMPORTED
from duplex.features.interrupts import say
from duplex.features.remade import Remade, Source
from duplex.features.store import Features, open_features
from duplex.features.tokens import Some, read_tokens
from duplex.features.views import Viewed
from duplex.labels import LabelSpace, World
from duplex.layers.finetuned_blocks import Tail, tail_maker
from duplex.layers.word_vectors import word_vectors
from duplex.methods.base import Setting, Words
from duplex.options import TailOptions, TrainingOptions
from duplex.system.files import sha256
from duplex.training.checkpoint import WORDS

ANYTHING = frozenset({"cls", "text"})
MEMORY = TrainingOptions.memory
ALIKE = ("tokens", "depth", "bits")  # in a cache and in that of its training pictures' views


@dataclass(frozen=True)
class Inputs:
    manifest: pd.DataFrame
    labels: LabelSpace
    examples: dict[str, Examples]
    tower: TextTower | None  # None for an encoder without one
    encoder: dict[str, str]  # identity of what made the features and words, and the encoder's name in params.yaml
    identity: dict[str, str]  # of the whole feature cache
    bad: int  # unreadable pictures, left out
    glove: Path | None = None
    image_tail: Callable[[], Tail] | None = None

    def setting(self, world: World = "closed") -> Setting:
        """What a method may know."""
        shapes = {name: tuple(values.shape[1:]) for name, values in self.examples["train"].inputs.items()}
        return Setting(self.labels, shapes, self.tower, self.words, world, self.image_tail)

    @cached_property
    def words(self) -> Words | None:
        """From a GloVe-format file where params.yaml names one, else from the encoder's text tower where it has one."""
        if self.glove is not None:
            found = read_word_vectors(self.glove, [*self.labels.states, *self.labels.objects])
            if found.missing:
                print(f"{self.glove} lacks: {', '.join(found.missing)}", file=sys.stderr)
            states, objects = np.split(found.vectors, [len(self.labels.states)])
            return Words(torch.from_numpy(states), torch.from_numpy(objects))
        return None if self.tower is None else Words(*word_vectors(self.labels, self.tower))


class LoadInputs(Protocol):
    """`load_inputs`, or somebody who has loaded them before."""

    def __call__(
        self,
        params: Params,
        dataset: str,
        paths: ArtifactPaths,
        needs: Collection[str],
        precision: str,
        tail: TailOptions | None = None,
        memory: float = MEMORY,
        views: bool = False,
    ) -> Inputs: ...


class Loaded:
    """The inputs of one data set at a time, loaded once for all runs that follow one another."""

    def __init__(self) -> None:
        self._dataset = ""
        self._held: dict[tuple[bool, str, TailOptions | None, float, bool], Inputs] = {}

    def __call__(
        self,
        params: Params,
        dataset: str,
        paths: ArtifactPaths,
        needs: Collection[str],
        precision: str,
        tail: TailOptions | None = None,
        memory: float = MEMORY,
        views: bool = False,
    ) -> Inputs:
        if dataset != self._dataset:
            self._held.clear()  # before the next ones come
            self._dataset = dataset
        views = views and params.augmentation(dataset) is not None
        key = ("patch" in needs, precision, tail, memory, views)  # all that inputs of one data set differ by
        if key not in self._held:
            self._held[key] = load_inputs(params, dataset, paths, needs, precision, tail, memory, views)
        return self._held[key]


def make_deterministic() -> None:
    """The same seed gives the same checkpoint, on a GPU too. To be called before anything runs there."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no result reads memory that nobody wrote


def load_inputs(
    params: Params,
    dataset: str,
    paths: ArtifactPaths,
    needs: Collection[str] = ANYTHING,
    precision: str = "fp32",
    tail: TailOptions | None = None,
    memory: float = MEMORY,
    views: bool = False,
) -> Inputs:
    """Everything about a data set that a method with these `needs`, and a `tail` where it has one, asks for; tokens in
    memory up to so many GiB. Training asks for `views`, where there are any. The text tower has the `precision` of
    training, in training and evaluation alike: what validation selected is what is evaluated."""
    entry, manifest_path = params.dataset(dataset), paths.manifest(dataset)
    manifest, labels = read_manifest(manifest_path), LabelSpace.load(paths.labels(dataset))
    tower, made_by = _encoder(entry, params.device, precision)
    expected = {**made_by, "precision": entry.encoder.precision, "manifest": manifest_hash(manifest_path)}
    imported = entry.encoder.name == IMPORTED
    if imported:
        del expected["precision"]
    features = open_features(paths.features(dataset), expect=expected)
    identity = {key: str(value) for key, value in features.identity.items()}
    source = _source(params, dataset, manifest, features)
    read = partial(_arrays, dataset=dataset, needs=needs, tail=tail, limit=int(memory * 2**30), source=source)
    viewed, augmentation = None, params.augmentation(dataset) if views else None
    if augmentation is not None:
        alike = {key: features.identity.get(key) for key in ALIKE}
        shown = open_features(paths.views(dataset), expect={**expected, **augmentation.identity, **alike})
        viewed = Viewed(augmentation.count, read(shown), shown.bad)
        identity |= augmentation.identity
    examples = join(manifest, labels, read(features), features.bad, viewed)
    known = {"encoder": IMPORTED, "weights": identity["weights"]} if imported else made_by
    encoder = {**known, "precision": entry.encoder.precision, "text_precision": precision, **_asked(entry)}
    glove, image_tail = params.evaluation.word_vectors, None
    if glove is not None:
        encoder[WORDS] = sha256(glove)
    if tail is not None:
        encoder |= {key: identity[key] for key in ("depth", "bits") if key in identity}  # of what the tail is given
        image_tail = tail_maker(encoder, tail, resolve_device(params.device))
    bad = len(manifest) - sum(map(len, examples.values()))
    return Inputs(manifest, labels, examples, tower, encoder, identity, bad, glove, image_tail)


def _source(params: Params, dataset: str, manifest: pd.DataFrame, features: Features) -> Source:
    """Where what a cache does not keep of its pictures comes from: those and their encoder."""
    entry = params.dataset(dataset)
    seen, identity = entry.encoder, features.identity
    loading = {"device": params.device, "precision": seen.precision}
    kept = Kept(depth=int(identity.get("depth", 0)), bits=int(identity.get("bits", 16)))

    def encoder() -> Encoder:
        say(f"{dataset}: test pictures are encoded from their files whenever they are asked for (deep_test: false)")
        ensure_pictures(entry.source, manifest)
        return load_encoder(seen.name, seen.weights, towers="image", **loading)

    images, batch_size = manifest["image"].tolist(), params.extraction.batch_size
    return Source(images, entry.source.root, features.cls, kept, batch_size, encoder)


def refuse_deeper(dataset: str, path: Path, wished: int, held: int) -> None:
    """A cache serves any depth up to its own."""
    if wished > held:
        raise UsageError(
            f"tail.depth is {wished} and {path} holds depth {held}; set datasets.{dataset}.encoder.depth to {wished} "
            f"in params.yaml and run `duplex extract --dataset {dataset}`"
        )


def _encoder(entry: DatasetParams, device: str, precision: str) -> tuple[TextTower | None, dict[str, str]]:
    """The text tower and the identity of the encoder; one that only sees, or brought features, has no tower."""
    name, weights = entry.encoder.name, entry.encoder.weights
    if name == IMPORTED:
        return None, {"encoder": IMPORTED}
    encoder = load_encoder(name, weights, towers="text", device=device, precision=precision)
    return encoder.text, encoder.identity


def _asked(entry: DatasetParams) -> dict[str, str]:
    """How params.yaml names the encoder, so that somebody else can find it."""
    return {"name": entry.encoder.name, "tag": entry.encoder.weights or ""}


def _arrays(
    features: Features,
    *,
    dataset: str,
    needs: Collection[str],
    tail: TailOptions | None,
    limit: int,
    source: Source,
) -> Arrays:
    """What is read of a cache. Patch tokens where they are asked for and there; a method that lacks them says so
    itself."""
    found: dict[str, Any] = {"cls": features.cls}
    patches = read_tokens(features.path, "patch", limit) if "patch" in needs else None
    if patches is not None:
        found["patch"] = patches
    if tail is not None:
        refuse_deeper(dataset, features.path, tail.depth, int(features.identity.get("depth", 0)))
        deep = read_tokens(features.path, "deep", limit)
        if isinstance(deep, Some):
            deep = replace(deep, others=Remade(source, np.arange(len(features.cls)), deep.row))
        found["deep"] = deep
    return found
