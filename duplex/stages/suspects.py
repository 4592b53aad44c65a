"""A data set's cached features -> which of its labels are likely wrong."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.manifest import manifest_hash, read_manifest
from duplex.data.text import read_text
from duplex.errors import DuplexError, UsageError
from duplex.features.store import Features, open_features
from duplex.features.tokens import read_tokens
from duplex.labels import Ints, LabelSpace
from duplex.layers.factors import unit
from duplex.methods.with_finetuning import WithFinetuning
from duplex.recognition.suspects import Suspicion, Way, margins
from duplex.stages.trained_runs import best_run

EDITED = ["image", "state", "object"]  # columns that `relabel` reads


def suspects(params: Params, dataset: str, way: Way, run: Path | None = None) -> pd.DataFrame:
    """Every readable image, the most suspicious first, by the sum of its three margins, each in units of its spread."""
    params.dataset(dataset)
    paths = ArtifactPaths()
    manifest, labels = read_manifest(paths.manifest(dataset)), LabelSpace.load(paths.labels(dataset))
    cache = open_features(paths.features(dataset), expect={"manifest": manifest_hash(paths.manifest(dataset))})
    rows = np.flatnonzero(~cache.bad)
    table = manifest.iloc[rows].reset_index(drop=True)
    own = labels.index(table["state"].tolist(), table["object"].tolist())
    spaces = _spaces(cache, rows, way, dataset, run)
    found = {
        "composition": margins(spaces[0], own, way),
        "state": margins(spaces[1], labels.state_of(own), way),
        "object": margins(spaces[2], labels.object_of(own), way),
    }
    return ranked(table, labels, found)


def ranked(table: pd.DataFrame, labels: LabelSpace, found: dict[str, Suspicion]) -> pd.DataFrame:
    """The images with their margins. The better label is the one that its own classes' margins speak for."""
    out = table[["image", "state", "object", "split"]].copy()
    for name, one in found.items():
        out[f"{name}_margin"] = one.margin.round(6)
    state, thing = found["state"], found["object"]
    out["better_state"] = np.where(state.margin < 0, np.array(labels.states)[state.better], out["state"])
    out["better_object"] = np.where(thing.margin < 0, np.array(labels.objects)[thing.better], out["object"])
    total = sum(one.margin / max(float(one.margin.std()), 1e-12) for one in found.values())
    order = np.argsort(total, kind="stable")
    out = out.iloc[order].reset_index(drop=True)
    out.insert(0, "rank", np.arange(1, len(out) + 1))
    return out


def _spaces(cache: Features, rows: Ints, way: Way, dataset: str, run: Path | None) -> list[np.ndarray]:
    """Unit features in which compositions, states and objects are told apart: the cache's, or a run's own."""
    cls = cache.cls[rows]
    plain = cls / np.maximum(np.linalg.norm(cls, axis=1, keepdims=True), 1e-12)
    if way == "knn":
        return [plain] * 3
    from duplex.recognition.recognizer import Recognizer
    from duplex.recognition.trained import Run

    where = run or best_run(dataset=dataset, hint="name one with --run").files.root
    recognizer = Recognizer.load(where, device="cpu")
    recognizer.check_cache(cache)
    trained = recognizer.trained
    if not isinstance(trained, Run):
        raise UsageError(f"{where} is an export; name a run of {dataset}, or use --method knn")
    inputs: dict[str, Any] = {"cls": torch.from_numpy(cls)}
    method = trained.method
    if isinstance(method, WithFinetuning):
        inputs["cls"] = torch.no_grad()(method.tail)(_deep(cache.path, rows, where))
        plain, method = unit(inputs["cls"]).numpy(), method.method
    shown: Any = method.exhibits()
    whole = plain if shown.features is None else shown.features(inputs).numpy()
    factors = [whole, whole] if shown.factors is None else [part.numpy() for part in shown.factors(inputs)]
    return [whole, *factors]


def _deep(path: Path, rows: Ints, where: Path) -> Any:
    """What enters the image tower's last blocks, of some rows."""
    tokens = read_tokens(path, "deep")
    if tokens is None:
        raise UsageError(f"{where} has a tail and {path} no depth; set its encoder's depth and extract again")
    return torch.from_numpy(tokens[rows]) if isinstance(tokens, np.ndarray) else tokens.at(rows)


def relabelled(params: Params, dataset: str, edited: Path) -> pd.DataFrame:
    """The manifest with the labels of an edited list: `image,state,object`, other columns ignored."""
    params.dataset(dataset)
    manifest = read_manifest(ArtifactPaths().manifest(dataset))
    try:
        table = pd.read_csv(io.StringIO(read_text(edited)), dtype=str, keep_default_na=False)
    except (DuplexError, ValueError) as error:
        raise UsageError(f"{edited} cannot be read as CSV ({error})") from error
    if missing := [name for name in EDITED if name not in table]:
        raise UsageError(f"{edited} has no column {missing[0]!r}; it needs {', '.join(EDITED)}")
    if strange := sorted(set(table["image"]) - set(manifest["image"])):
        raise UsageError(f"{edited} names {strange[0]!r}, which is no image of {dataset}")
    if table["image"].duplicated().any():
        raise UsageError(f"{edited} names {table['image'][table['image'].duplicated()].iloc[0]!r} twice")
    if (empty := table[(table["state"].str.strip() == "") | (table["object"].str.strip() == "")]).size:
        raise UsageError(f"{edited} gives {empty['image'].iloc[0]!r} no state or no object")
    new = table.set_index("image")
    out = manifest.copy()
    for name in ("state", "object"):
        out[name] = out["image"].map(new[name].str.strip()).fillna(out[name])
    return out
