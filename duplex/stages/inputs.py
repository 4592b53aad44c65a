"""What training and evaluation read: manifest, labels, checked features, the frozen text tower."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pandas as pd
import torch

from duplex.artifacts import ArtifactPaths
from duplex.data.manifest import manifest_hash, read_manifest
from duplex.encoders import load_encoder
from duplex.encoders.text import TextTower
from duplex.errors import UsageError
from duplex.features.examples import Examples, join
from duplex.features.store import open_features
from duplex.labels import LabelSpace
from duplex.params import Params


@dataclass(frozen=True)
class Inputs:
    manifest: pd.DataFrame
    labels: LabelSpace
    examples: dict[str, Examples]
    tower: TextTower
    encoder: dict[str, str]  # identity of the encoder that made the features
    identity: dict[str, str]  # of the whole feature cache
    bad: int  # unreadable pictures, left out


def pick_device(wish: str) -> torch.device:
    if wish == "cuda" and not torch.cuda.is_available():
        raise UsageError("params.yaml: device is cuda, but torch sees no GPU; set it to auto or cpu")
    return torch.device("cuda" if wish != "cpu" and torch.cuda.is_available() else "cpu")


def make_deterministic() -> None:
    """The same seed gives the same checkpoint, on a GPU too. To be called before anything runs there."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def load_inputs(params: Params, dataset: str, paths: ArtifactPaths) -> Inputs:
    """Everything about a data set that learning needs. The text tower has the precision that training asks for, in
    training and evaluation alike: what validation selected is what is evaluated."""
    entry, precision = params.dataset(dataset).encoder, params.dataset(dataset).training.precision
    manifest_path = paths.manifest(dataset)
    manifest, labels = read_manifest(manifest_path), LabelSpace.load(paths.labels(dataset))
    device = pick_device(params.device)
    encoder = load_encoder(entry.name, entry.weights, towers="text", device=str(device), precision=precision)
    expected = {**encoder.identity, "precision": entry.precision, "manifest": manifest_hash(manifest_path)}
    features = open_features(paths.features(dataset), expect=expected)
    examples = join(manifest, labels, features.cls, features.bad)
    identity = {key: str(value) for key, value in features.identity.items()}
    return Inputs(manifest, labels, examples, encoder.text, encoder.identity, identity, int(features.bad.sum()))
