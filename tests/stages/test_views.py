"""Random crops of training images (views): extracted to a cache of their own, used in training alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data.manifest import read_manifest
from duplex.errors import DuplexError
from duplex.features.store import open_features
from duplex.features.tokens import DiskTokens
from duplex.library.inputs import InputRequest, load_inputs
from duplex.library.run_training import start_method
from duplex.options import FinetuneOptions
from duplex.stages import evaluate, train
from duplex.stages.extract import extract, extract_views
from duplex.stages.prepare import prepare
from duplex.training import loop
from tests.projects import draw_project, interrupt

VIEWS, EPOCHS = 3, 3
FINETUNE = FinetuneOptions(blocks=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A twentieth of `shapes` with the inputs of one block, and three views of each training image."""
    folder = tmp_path_factory.mktemp("viewed")

    def rows(record: dict) -> None:
        record["datasets"]["own"] |= {"views": VIEWS, "flip": True}
        record["datasets"]["own"]["encoder"]["block_inputs"] = 1
        record["methods"]["deep"] = {"extends": "cso", "finetune": FINETUNE.to_dict()}

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


def with_views(params: Params, count: int) -> Params:
    own = params.dataset("own").model_copy(update={"views": count})
    return params.model_copy(update={"datasets": {**params.datasets, "own": own}})


def test_only_training_images_have_views_and_their_number_is_written(params, paths, tmp_path: Path) -> None:
    split = read_manifest(paths.manifest("own"))["split"]
    assert len(open_features(paths.views("own")).cls) == VIEWS * (split == "train").sum() < VIEWS * len(split)
    count = paths.views("own").with_name("views.json")
    assert json.loads(count.read_text()) == {"views": "3", "flip": "true"}
    assert extract_views(params, "own", paths).resumed == len(open_features(paths.views("own")).cls)
    elsewhere = ArtifactPaths(tmp_path)
    assert extract_views(with_views(params, 0), "own", elsewhere) is None
    assert [path.name for path in elsewhere.views("own").parent.iterdir()] == ["views.json"]


def test_an_image_is_joined_with_its_own_views(params, paths) -> None:
    inputs = load_inputs(params, "own", paths, InputRequest(finetune=FINETUNE, views=True))
    images, cache = inputs.examples["train"], open_features(paths.views("own"))
    assert {split for split, examples in inputs.examples.items() if examples.views} == {"train"}
    assert torch.equal(torch.as_tensor(images.views.inputs["cls"]), torch.from_numpy(cache.cls))
    shown = torch.nn.functional.normalize(images.views.inputs["cls"].view(len(images), VIEWS, -1), dim=-1)
    plain = torch.nn.functional.normalize(images.cls, dim=-1)
    near = torch.einsum("ivd,jd->ivj", shown, plain)
    assert (near.argmax(-1) == torch.arange(len(images))[:, None]).float().mean() > 0.5  # by chance 1 in 150
    assert images.views.inputs["block_inputs"].shape == (
        len(images) * VIEWS,
        *images.inputs["block_inputs"].shape[1:],
    )


def test_an_image_with_a_bad_view_is_left_out_of_training(params, paths, tmp_path: Path) -> None:
    shutil.copytree(paths.root, tmp_path / "artifacts")
    there = ArtifactPaths(tmp_path / "artifacts")
    with h5py.File(there.views("own"), "a") as file:
        file["status"][VIEWS * 4 + 1] = 10  # features not finite
    before, after = (load_inputs(params, "own", one, InputRequest(views=True)) for one in (paths, there))
    assert (
        after.bad == 1 and np.delete(before.examples["train"].rows, 4).tolist() == after.examples["train"].rows.tolist()
    )
    views = before.examples["train"].views.inputs["cls"]
    kept = torch.cat([views[: 4 * VIEWS], views[5 * VIEWS :]])
    assert torch.equal(torch.as_tensor(after.examples["train"].views.inputs["cls"]), kept)


def test_each_epoch_uses_another_view_per_image_and_evaluation_uses_none(params, paths, monkeypatch) -> None:
    seen, epoch = [], loop._epoch
    monkeypatch.setattr(loop, "_epoch", lambda state, images, *rest: seen.append(images) or epoch(state, images, *rest))
    train.run(params, "own", "csp", 0, paths)
    images = load_inputs(params, "own", paths, InputRequest(views=True)).examples["train"]
    everything = images.views.inputs["cls"].view(len(images), VIEWS, -1)
    assert len(seen) == EPOCHS
    for one in seen:
        matches = (one.inputs["cls"][:, None] == everything).all(-1)
        assert matches.any(1).all() and not torch.equal(one.inputs["cls"], images.cls)
    assert not torch.equal(seen[0].inputs["cls"], seen[1].inputs["cls"])
    evaluate.run(params, "own", "csp", 0, paths)
    metrics = paths.run("own", "csp", 0).metrics.read_bytes()
    paths.views("own").rename(paths.views("own").with_name("away.h5"))
    try:
        evaluate.run(params, "own", "csp", 0, paths)
    finally:
        paths.views("own").with_name("away.h5").rename(paths.views("own"))
    assert paths.run("own", "csp", 0).metrics.read_bytes() == metrics


def test_views_with_another_number_of_block_inputs_are_refused(params, paths, tmp_path: Path) -> None:
    elsewhere = ArtifactPaths(tmp_path)
    shutil.copytree(paths.root, elsewhere.root, dirs_exist_ok=True)
    own = params.dataset("own")
    deeper = own.model_copy(update={"encoder": own.encoder.model_copy(update={"block_inputs": 2})})
    changed = params.model_copy(update={"datasets": {**params.datasets, "own": deeper}})
    extract(changed, "own", elsewhere, num_workers=0, fresh=True)
    with pytest.raises(DuplexError, match=r"views/own/features.h5 was made with another number of block inputs \(1"):
        train.run(changed, "own", "deep", 0, elsewhere)


@pytest.mark.parametrize("method", ["csp", "deep"])
def test_interrupted_training_continues_to_the_same_bytes(params, paths, method: str, monkeypatch) -> None:
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


def test_training_reads_views_from_disk_if_memory_is_small(params, paths) -> None:
    inputs = load_inputs(params, "own", paths, InputRequest(finetune=FINETUNE, memory=0, views=True))
    images, row = inputs.examples["train"], params.entry("deep")
    assert isinstance(images.views.inputs["block_inputs"], DiskTokens)
    options, settings = params.method("deep", "own"), params.training("own", "deep")
    method = start_method(row.kind, options, inputs.task("closed"), inputs, 0, torch.device("cpu"))
    outcome = loop.train(method, images, settings, 0, lambda trained: float(trained.training))
    assert len(outcome.history) == EPOCHS + 1
    history = [{key: value for key, value in row.items() if key.startswith("loss")} for row in outcome.history[1:]]
    assert all(history) and history[-1] != history[0]


def test_another_number_of_views_is_reported_with_the_command_to_run(params, paths) -> None:
    with pytest.raises(DuplexError, match=r"another number of views \(3, not 5\); `duplex extract --dataset own`"):
        load_inputs(with_views(params, 5), "own", paths, InputRequest(views=True))
