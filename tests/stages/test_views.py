"""Views from params.yaml to a checkpoint: extracted beside the features, drawn in training, never evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data.manifest import read_manifest
from duplex.errors import DuplexError
from duplex.features.store import open_features
from duplex.features.tokens import Streamed
from duplex.features.views import Views
from duplex.options import TailOptions
from duplex.stages import evaluate, train
from duplex.stages.extract import extract, extract_views
from duplex.stages.inputs import load_inputs
from duplex.stages.prepare import prepare
from duplex.training import loop
from tests.projects import draw_project, interrupt

VIEWS, EPOCHS = 3, 3
TAIL = TailOptions(depth=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A twentieth of `shapes` at depth 1, with three views of each training picture."""
    folder = tmp_path_factory.mktemp("viewed")

    def rows(record: dict) -> None:
        record["datasets"]["own"] |= {"views": VIEWS, "flip": True}
        record["datasets"]["own"]["encoder"]["depth"] = 1
        record["methods"]["deep"] = {"of": "cso", "tail": TAIL.to_dict()}

    draw_project(folder, ["csp", "deep"], scale=0.05, changes=rows, epochs=EPOCHS, threads=1)
    params, paths = load_params(folder / "params.yaml"), ArtifactPaths(folder / "artifacts")
    prepare(params, "own", paths)
    extract(params, "own", paths, num_workers=0)
    extract_views(params, "own", paths, num_workers=0)
    return folder


@pytest.fixture
def params(folder: Path) -> Params:
    return load_params(folder / "params.yaml")


@pytest.fixture
def paths(folder: Path) -> ArtifactPaths:
    return ArtifactPaths(folder / "artifacts")


def without(params: Params) -> Params:
    plain = params.dataset("own").model_copy(update={"views": 0})
    return params.model_copy(update={"datasets": {**params.datasets, "own": plain}})


def test_training_pictures_alone_have_views_and_they_are_noted(params, paths) -> None:
    split = read_manifest(paths.manifest("own"))["split"]
    assert open_features(paths.views("own")).span.total == VIEWS * (split == "train").sum() < VIEWS * len(split)
    noted = paths.views("own").with_name("views.json")
    assert json.loads(noted.read_text()) == {"views": "3", "flip": "true"}
    assert extract_views(params, "own", paths).resumed == open_features(paths.views("own")).span.total


def test_without_views_there_is_a_note_and_no_cache(params, paths, tmp_path: Path) -> None:
    elsewhere = ArtifactPaths(tmp_path)
    assert extract_views(without(params), "own", elsewhere) is None
    assert [path.name for path in elsewhere.views("own").parent.iterdir()] == ["views.json"]


def held(views: Views | None, name: str) -> torch.Tensor:
    assert views is not None
    values = views.inputs[name]
    assert isinstance(values, torch.Tensor)
    return values


def test_an_image_is_joined_with_its_own_views(params, paths) -> None:
    inputs = load_inputs(params, "own", paths, tail=TAIL, views=True)
    images, cache = inputs.examples["train"], open_features(paths.views("own"))
    assert {split for split, found in inputs.examples.items() if found.views} == {"train"}
    assert torch.equal(held(images.views, "cls"), torch.from_numpy(cache.cls))
    shown = torch.nn.functional.normalize(held(images.views, "cls").view(len(images), VIEWS, -1), dim=-1)
    plain = torch.nn.functional.normalize(images.z, dim=-1)
    near = torch.einsum("ivd,jd->ivj", shown, plain)
    assert (near.argmax(-1) == torch.arange(len(images))[:, None]).float().mean() > 0.5  # by chance 1 in 150
    assert held(images.views, "deep").shape == (len(images) * VIEWS, *images.inputs["deep"].shape[1:])


def test_a_bad_view_takes_its_image_out_of_training_and_none_other(params, paths, tmp_path: Path) -> None:
    shutil.copytree(paths.root, tmp_path / "artifacts")
    there = ArtifactPaths(tmp_path / "artifacts")
    with h5py.File(there.views("own"), "a") as file:
        file["mark"][VIEWS * 4 + 1] = 10  # features not finite
    before, after = (load_inputs(params, "own", one, views=True) for one in (paths, there))
    assert (
        after.bad == 1 and np.delete(before.examples["train"].rows, 4).tolist() == after.examples["train"].rows.tolist()
    )
    views = held(before.examples["train"].views, "cls")
    kept = torch.cat([views[: 4 * VIEWS], views[5 * VIEWS :]])
    assert torch.equal(held(after.examples["train"].views, "cls"), kept)


def test_an_epoch_reads_one_view_an_image_and_what_comes_before_it_the_plain_picture(
    params, paths, monkeypatch
) -> None:
    seen, epoch = [], loop._epoch
    monkeypatch.setattr(loop, "_epoch", lambda state, images, *rest: seen.append(images) or epoch(state, images, *rest))
    train.run(params, "own", "csp", 0, paths)
    images = load_inputs(params, "own", paths, views=True).examples["train"]
    everything = held(images.views, "cls").view(len(images), VIEWS, -1)
    assert len(seen) == EPOCHS
    for one in seen:
        matches = (one.inputs["cls"][:, None] == everything).all(-1)
        assert matches.any(1).all() and not torch.equal(one.inputs["cls"], images.z)
    assert not torch.equal(seen[0].inputs["cls"], seen[1].inputs["cls"])
    evaluate.run(params, "own", "csp", 0, paths)
    metrics = paths.run("own", "csp", 0).metrics.read_bytes()
    paths.views("own").rename(paths.views("own").with_name("away.h5"))
    try:
        evaluate.run(params, "own", "csp", 0, paths)
    finally:
        paths.views("own").with_name("away.h5").rename(paths.views("own"))
    assert paths.run("own", "csp", 0).metrics.read_bytes() == metrics


def test_views_of_another_depth_are_refused(params, paths, tmp_path: Path) -> None:
    """They would enter the tail a block too early."""
    elsewhere = ArtifactPaths(tmp_path)
    shutil.copytree(paths.root, elsewhere.root, dirs_exist_ok=True)
    own = params.dataset("own")
    deeper = own.model_copy(update={"encoder": own.encoder.model_copy(update={"depth": 2})})
    changed = params.model_copy(update={"datasets": {**params.datasets, "own": deeper}})
    extract(changed, "own", elsewhere, num_workers=0, fresh=True)
    with pytest.raises(DuplexError, match=r"views/own/features.h5 was made with another depth \(1, not 2\)"):
        train.run(changed, "own", "deep", 0, elsewhere)


@pytest.mark.parametrize("method", ["csp", "deep"])
def test_a_killed_run_goes_on_to_the_same_bytes(params, paths, method: str, monkeypatch) -> None:
    out = paths.run("own", method, 1)
    train.run(params, "own", method, 1, paths)
    whole = out.checkpoint.read_bytes(), out.history.read_bytes()
    out.checkpoint.unlink()
    begun = interrupt(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train.run(params, "own", method, 1, paths)
    train.run(params, "own", method, 1, paths)
    assert len(begun) == EPOCHS + 1
    assert (out.checkpoint.read_bytes(), out.history.read_bytes()) == whole


def test_views_on_the_disk_train_too(params, paths) -> None:
    """The tokens of the views are streamed where they exceed the budget."""
    inputs = load_inputs(params, "own", paths, tail=TAIL, memory=0, views=True)
    images, row = inputs.examples["train"], params.row("deep")
    assert isinstance(images.views.inputs["deep"], Streamed)
    options, settings = params.method("deep", "own"), params.training("own", "deep")
    method = train.begin(row.kind, options, inputs.setting("closed"), inputs, 0, torch.device("cpu"))
    outcome = loop.train(method, images, settings, 0, lambda trained: float(trained.training))
    assert len(outcome.history) == EPOCHS + 1
    history = [{key: value for key, value in row.items() if key.startswith("loss")} for row in outcome.history[1:]]
    assert all(history) and history[-1] != history[0]


def test_another_number_of_views_asks_for_an_extraction(params, paths) -> None:
    more = params.dataset("own").model_copy(update={"views": 5})
    wish = params.model_copy(update={"datasets": {**params.datasets, "own": more}})
    with pytest.raises(DuplexError, match=r"another number of views \(3, not 5\); `duplex extract --dataset own`"):
        load_inputs(wish, "own", paths, views=True)
