"""A row with a tail from pictures to answers: training, evaluation and recognition run the same end of the tower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from ruamel.yaml import YAML

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data.manifest import read_manifest
from duplex.errors import UsageError
from duplex.features.encoding import Kept
from duplex.features.remade import Source
from duplex.features.tokens import BLOCK, Streamed, read_tokens
from duplex.methods.with_finetuning import WithFinetuning
from duplex.options import OptionError, TailOptions, TrainingOptions
from duplex.recognition import numpy_example
from duplex.recognition.export import export
from duplex.recognition.images import encode, open_picture
from duplex.recognition.recognizer import Recognizer
from duplex.stages import evaluate, queries, train
from duplex.stages import inputs as inputs_module
from duplex.stages import suspects as suspects_module
from duplex.stages.extract import extract, views_of
from duplex.stages.featured_run import load_shown
from duplex.stages.inputs import Loaded, load_inputs
from duplex.stages.plan import planned
from duplex.stages.prepare import prepare
from duplex.stages.suspects import suspects
from duplex.stages.trained_runs import facts_of
from duplex.training.checkpoint import load_checkpoint, read_record
from tests.projects import draw_project
from tests.recognition.serving import Served
from tests.subprocesses import ENVIRONMENT


@dataclass(frozen=True)
class Project:
    folder: Path

    @property
    def paths(self) -> ArtifactPaths:
        return ArtifactPaths(self.folder / "artifacts")

    def params(self, **changes: object) -> Params:
        return load_params(self.folder / "params.yaml").model_copy(update=changes)

    def checkpoint(self, method: str) -> Path:
        return self.paths.run("own", method, 0).checkpoint

    def pictures(self) -> list[Path]:
        """Of the test split."""
        table = read_manifest(self.paths.manifest("own"))
        return [self.folder / "pictures" / image for image in table["image"][table["split"] == "test"]]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    """A twentieth of `shapes`, cached at depth 2; a row with a tail of one block, trained and evaluated."""
    folder = tmp_path_factory.mktemp("deep")

    def rows(record: dict) -> None:
        record["extraction"]["depth"] = 2
        record["methods"]["deep"] = {"of": "duplex_plus", "tail": {"depth": 1}}
        record["methods"]["deeper"] = {"of": "deep", "tail": {"depth": 3}}
        record["methods"]["flat"] = {"of": "cso"}

    draw_project(folder, ["deep"], scale=0.05, changes=rows)
    found = Project(folder)
    prepare(found.params(), "own", found.paths)
    extract(found.params(), "own", found.paths, num_workers=0)
    train.run(found.params(), "own", "deep", 0, found.paths)
    evaluate.run(found.params(), "own", "deep", 0, found.paths)
    return found


def test_the_checkpoint_holds_what_was_trained_and_no_frozen_tower(project) -> None:
    record = read_record(project.checkpoint("deep"))
    assert record.tail is not None and (record.tail.depth, record.encoder["depth"]) == (1, "2")
    inputs = load_inputs(project.params(), "own", project.paths, {"cls", "text"}, tail=record.tail)
    method = load_checkpoint(project.checkpoint("deep"), inputs.setting(), inputs.encoder)
    assert isinstance(method, WithFinetuning)
    names = [name for name in method.state_dict() if name.startswith("tail.")]
    assert len(names) == 4 and all(".up." in name or ".down." in name for name in names)
    assert method.tail.trained[0].up.weight.abs().max() > 0


def test_pictures_are_answered_as_the_evaluation_has_them(project) -> None:
    """From files through the whole tower, and from the cache: the same scores."""
    recognizer = Recognizer.load(project.checkpoint("deep").parent, device="cpu")
    record = read_record(project.checkpoint("deep"))
    inputs = load_inputs(project.params(), "own", project.paths, {"cls", "text"}, tail=record.tail)
    test, method = inputs.examples["test"], recognizer.trained.method
    columns = inputs.labels.target("closed", "test")
    files = [project.folder / "pictures" / image for image in inputs.manifest["image"].to_numpy()[test.rows][:20]]
    wanted = method.scorer(columns)({name: values[:20] for name, values in test.inputs.items()})
    torch.testing.assert_close(recognizer.scores(files, "closed"), wanted, rtol=0, atol=1e-4)
    plain = method.method.scorer(columns)({"cls": test.inputs["cls"][:20]})
    assert not torch.allclose(plain, wanted, atol=1e-2)
    answers = list(recognizer.stream(files, num_workers=0))
    assert [one.best.name for one in answers] == [one.best.name for one in recognizer(files)]
    with pytest.raises(UsageError, match="reads what enters the image tower's last blocks too; give it pictures"):
        recognizer.scores(np.zeros((1, 128), np.float32))


def test_pictures_are_answered_as_a_cache_in_eight_bits_has_them(project, tmp_path: Path) -> None:
    """The steps are part of what was trained on; without them the scores are others."""
    record = YAML(typ="safe").load((project.folder / "params.yaml").read_text())
    record["datasets"]["own"]["encoder"]["bits"] = 8
    record["methods"]["eight"] = {"of": "cso", "tail": {"depth": 1}}
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(record, file)
    params, paths = load_params(tmp_path / "params.yaml"), ArtifactPaths(tmp_path / "artifacts")
    prepare(params, "own", paths)
    extract(params, "own", paths, num_workers=0)
    train.run(params, "own", "eight", 0, paths)
    run = paths.run("own", "eight", 0)
    recognizer, kept = Recognizer.load(run.root, device="cpu"), read_record(run.checkpoint)
    assert (kept.encoder["depth"], kept.encoder["bits"]) == ("2", "8")
    inputs = load_inputs(params, "own", paths, {"cls", "text"}, tail=kept.tail)
    test, method = inputs.examples["test"], recognizer.trained.method
    files = [project.folder / "pictures" / image for image in inputs.manifest["image"].to_numpy()[test.rows][:20]]
    cached = {name: values[:20] for name, values in test.inputs.items()}
    wanted = method.scorer(inputs.labels.target("closed", "test"))(cached)
    torch.testing.assert_close(recognizer.scores(files, "closed"), wanted, rtol=0, atol=1e-4)
    pixels = [recognizer.encoder.image_transform(open_picture(file)) for file in files]
    torch.testing.assert_close(recognizer.encode(pixels)["deep"], cached["deep"], rtol=0, atol=0)
    assert not torch.equal(encode(recognizer.encoder, torch.stack(pixels), kept=Kept(depth=2))["deep"], cached["deep"])


def test_without_test_pictures_in_the_cache_the_same_is_trained_and_evaluated(project, tmp_path, monkeypatch) -> None:
    """They are encoded as they are evaluated, and never before."""
    record = YAML(typ="safe").load((project.folder / "params.yaml").read_text())
    record["datasets"]["own"]["encoder"]["deep_test"] = False
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(record, file)
    params, paths = load_params(tmp_path / "params.yaml"), ArtifactPaths(tmp_path / "artifacts")
    prepare(params, "own", paths)
    extract(params, "own", paths, num_workers=0)
    asked = []
    tokens = Source.tokens
    monkeypatch.setattr(Source, "tokens", lambda self, rows: asked.append(rows) or tokens(self, rows))
    held = train.run(project.params(), "own", "deep", 0, project.paths, project.paths.run("own", "held", 0))
    assert train.run(params, "own", "deep", 0, paths).history == held.history
    assert asked == []
    assert evaluate.run(params, "own", "deep", 0, paths) == evaluate.run(
        project.params(), "own", "deep", 0, project.paths
    )
    table = read_manifest(paths.manifest("own"))
    assert set(np.concatenate(asked)) == set(np.flatnonzero(table["split"] == "test"))
    assert paths.features("own").stat().st_size < project.paths.features("own").stat().st_size
    shown = load_shown(params, "own", "deep", 0, paths)
    test, features = shown.inputs.examples["test"], shown.method.exhibits().features
    assert features is not None and features(test.inputs).shape == test.z.shape
    assert views_of(params, "own", paths)[1]["deep_rows"] is None, "views are of training pictures alone"


def test_test_pictures_are_encoded_again_as_the_cache_has_the_others(project, tmp_path) -> None:
    """As many bits, and as deep, whatever params.yaml has said since."""
    record = YAML(typ="safe").load((project.folder / "params.yaml").read_text())
    record["datasets"]["own"]["encoder"] |= {"deep_test": False, "bits": 8, "depth": 3}
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(record, file)
    params, paths = load_params(tmp_path / "params.yaml"), ArtifactPaths(tmp_path / "artifacts")
    prepare(params, "own", paths)
    extract(params, "own", paths, num_workers=0)
    loaded = load_inputs(project.params(), "own", paths, tail=TailOptions(depth=2))
    test: Any = loaded.examples["test"].inputs["deep"]
    assert test.source.kept == Kept(depth=3, bits=8) and test.row == loaded.examples["val"].inputs["deep"].shape[1:]
    assert test[:2].shape == (2, *test.row)


def test_factors_of_two_pictures_move_as_those_of_the_cache(project) -> None:
    shown = load_shown(project.params(), "own", "deep", 0, project.paths)
    picture = shown.root / shown.viewing().images[0]
    (hit, *_) = queries.swap(project.params(), "own", shown, (picture, picture), 3)
    assert hit.image == shown.viewing().images[0] and hit.cosine > 0.999


def test_an_exported_folder_has_its_tail(project, tmp_path: Path) -> None:
    """The same scores from pictures, of further words too; numpy alone gives them from what the tail makes."""
    where = project.checkpoint("deep").parent
    run, files = Recognizer.load(where, device="cpu"), project.pictures()[:20]
    export(run.trained, "closed", tmp_path / "out", facts_of(where, name=None, licence="mit", repository=None))
    folder = Recognizer.load(tmp_path / "out", device="cpu")
    torch.testing.assert_close(folder.scores(files), run.scores(files), rtol=1e-6, atol=1e-5)
    assert [one.best.name for one in folder(files)] == [one.best.name for one in run(files)]
    words = [("dark", "picture"), ("photo", "star")]
    wide, same = (one.with_words(words).scores(files) for one in (folder, run))
    torch.testing.assert_close(wide, same, rtol=1e-6, atol=1e-5)
    own = same[:, : -len(words)]  # over more columns by one number an image
    torch.testing.assert_close(own - own[:, :1], run.scores(files) - run.scores(files)[:, :1], rtol=0, atol=1e-4)
    inputs = run.encode([run.encoder.image_transform(open_picture(file)) for file in files])
    tensors = numpy_example.load_file(tmp_path / "out" / "model.safetensors")
    with torch.no_grad():
        moved = run.trained.tail(inputs["deep"]).numpy()
    np.testing.assert_allclose(numpy_example.scores(tensors, moved), run.scores(files), rtol=1e-6, atol=1e-5)
    assert np.abs(numpy_example.scores(tensors, inputs["cls"].numpy()) - run.scores(files).numpy()).max() > 1e-2
    assert "The image tower's last block had a part in training" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UsageError, match="reads what enters the image tower's last blocks too; give it pictures"):
        folder.scores(np.zeros((1, 128), np.float32))


@pytest.mark.slow
def test_onnxruntime_runs_the_tail(project, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    where = project.checkpoint("deep").parent
    process = start(["export", str(where), str(tmp_path / "plain")], project.folder)
    assert "reads features that the trained tail makes; --onnx-encoder writes" in process.communicate()[1]
    assert start(["export", str(where), str(tmp_path / "out"), "--onnx-encoder"], project.folder).wait() == 0
    run, files = Recognizer.load(where, device="cpu"), project.pictures()[:18]
    pixels = torch.stack([run.encoder.image_transform(open_picture(file)) for file in files]).numpy()
    tower, trained = (
        onnxruntime.InferenceSession(tmp_path / "out" / f"{name}.onnx") for name in ("encoder", "trained")
    )
    (features,) = tower.run(None, {"pixels": pixels})
    (scores,) = trained.run(None, {"features": features})
    np.testing.assert_allclose(scores, run.scores(files).numpy(), rtol=0, atol=0.02)  # logarithms; float16 within


@pytest.mark.slow
def test_a_server_answers_with_the_tail(project) -> None:
    """A real one: the same composition, and training pictures that are near in the cache's own features."""
    files = project.pictures()[:3]
    wanted = Recognizer.load(project.checkpoint("deep").parent, device="cpu")(files)
    with Served(project.checkpoint("deep").parent, project.folder, "--seconds", "120") as server:
        status, said = server.predict(*((file.name, file.read_bytes()) for file in files), query="?similar=1")
    assert status == 200
    answers = said["answers"]
    assert [f"{one['top'][0]['state']} {one['top'][0]['object']}" for one in answers] == [
        one.best.name for one in wanted
    ]
    assert all(one["similar"][0]["cosine"] > 0.5 for one in answers)


def test_labels_are_judged_by_features_that_moved(project, monkeypatch) -> None:
    monkeypatch.chdir(project.folder)
    run = project.checkpoint("deep").parent
    found, frozen = suspects(project.params(), "own", "run", run), suspects(project.params(), "own", "knn")
    assert sorted(found["image"]) == sorted(frozen["image"]) and not found["image"].equals(frozen["image"])
    with monkeypatch.context() as patched:
        patched.setattr(suspects_module, "read_tokens", partial(read_tokens, limit=0))
        again = suspects(project.params(), "own", "run", run)
    np.testing.assert_allclose(again["composition_margin"], found["composition_margin"], atol=1e-5)


def test_what_the_report_looks_at_moves_as_well(project) -> None:
    shown = load_shown(project.params(), "own", "deep", 0, project.paths)
    features = shown.method.exhibits().features
    test = shown.inputs.examples["test"]
    assert features is not None and not torch.allclose(
        features(test.inputs), shown.method.method.exhibits().features({"cls": test.z}), atol=1e-2
    )
    assert shown.at_start("closed_form", 0).tail.trained[0].up.weight.abs().max() == 0


def test_from_the_disk_the_same_is_trained_and_evaluated(project, monkeypatch) -> None:
    wanted = evaluate.run(project.params(), "own", "deep", 0, project.paths)
    held = train.run(project.params(), "own", "deep", 0, project.paths, project.paths.run("own", "held", 0))
    monkeypatch.setattr(inputs_module, "read_tokens", lambda path, name, limit: read_tokens(path, name, 0))
    assert evaluate.run(project.params(), "own", "deep", 0, project.paths) == wanted
    found = train.run(project.params(), "own", "deep", 0, project.paths, project.paths.run("own", "streamed", 0))
    assert found.history == held.history  # so few images are one block, in the order that those in memory have


def test_a_budget_of_memory_decides_what_is_streamed(project) -> None:
    """Of training, of evaluation, and of what a sweep holds: the smallest there is, and one more than the tokens."""
    params, loaded = project.params(), Loaded()
    tail, needs = params.tail("deep", "own"), {"cls", "text"}
    assert tail is not None
    held = loaded(params, "own", project.paths, needs, "fp32", tail).examples["train"].inputs["deep"]
    assert isinstance(held, torch.Tensor)
    with h5py.File(project.paths.features("own"), "r") as file:
        assert file["deep"].nbytes < BLOCK  # so that no budget that options allow is below it
    small = load_inputs(params, "own", project.paths, needs, "fp32", tail, 2**-30)
    assert isinstance(small.examples["train"].inputs["deep"], Streamed)
    assert loaded(params, "own", project.paths, needs, "fp32", tail, 1.0) is not loaded(
        params, "own", project.paths, needs, "fp32", tail
    )


def test_less_memory_than_a_block_is_one_sentence() -> None:
    TrainingOptions(0.1, 4, 2, memory=BLOCK / 2**30)
    with pytest.raises(OptionError, match=r"memory is 0\.001; it is at least 0\.00390625, one block of tokens"):
        TrainingOptions(0.1, 4, 2, memory=0.001)


def test_a_deep_cache_serves_rows_without_a_tail(project) -> None:
    train.run(project.params(), "own", "flat", 0, project.paths)
    assert read_record(project.checkpoint("flat")).tail is None


def test_a_deeper_wish_names_the_command(project) -> None:
    with pytest.raises(UsageError, match=r"tail.depth is 3 and .* holds depth 2; .*`duplex extract --dataset own`"):
        train.run(project.params(), "own", "deeper", 0, project.paths)


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ({"adapter": "lora"}, r"methods\.deep\.tail\.depth: missing"),
        ({"depth": 0}, r"methods\.deep\.tail: depth is 0; it is at least 1"),
        ({"depth": 1, "adapter": "trained", "width": 4}, r"adapter: trained has no width"),
        ({"depth": 1, "adapter": "lora", "dropout": 0.3}, r"adapter: lora has no dropout"),
        ({"depth": 1, "learning_rate": 0.0}, r"learning_rate is 0\.0"),
        ({"deep": 1}, r"methods\.deep\.tail\.deep: unknown key; known: depth, adapter"),
        (3, r"methods\.deep\.tail is 3; it must be a table"),
    ],
)
def test_a_tail_written_wrongly_is_one_sentence(project, tmp_path: Path, tail, said) -> None:
    record = YAML(typ="safe").load((project.folder / "params.yaml").read_text())
    record["methods"]["deep"] = {"of": "cso", "tail": tail}
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(record, file)
    with pytest.raises(UsageError, match=said):
        load_params(tmp_path / "params.yaml").check_rows()


def test_a_run_depends_on_its_tail(project) -> None:
    plain, deep = (planned(project.params(), "own", name)["train"] for name in ("flat", "deep"))
    assert "tail" not in plain and deep["tail"]["depth"] == 1


@pytest.mark.slow
def test_killed_training_ends_in_the_same_bytes(project) -> None:
    """SIGKILL after the first epoch, then the same command again."""
    run, command = project.paths.run("own", "deep", 7), ["train", "--dataset", "own", "--method", "deep", "--seed", "7"]
    files, partial = (run.checkpoint, run.history), run.root / "training.partial"
    assert start(command, project.folder).wait() == 0
    whole = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    process = start(command, project.folder)
    while not partial.exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert partial.exists() and not run.checkpoint.exists()
    last = start(command, project.folder)
    assert "going on after epoch" in last.communicate()[1]
    assert [path.read_bytes() for path in files] == whole
    assert json.loads(run.timing.read_text())["parameters"] > 20_000


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from duplex.cli import main; main()", *words]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)
