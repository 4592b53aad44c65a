"""A method with fine-tuned blocks, from images to results: training, evaluation and recognition agree."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data.tables import read_manifest
from duplex.errors import UsageError
from duplex.features.tokens import BLOCK, DiskTokens, read_tokens
from duplex.methods.blocks import FINETUNED_PREFIX
from duplex.methods.finetuned import WithFinetuning
from duplex.options import FinetuneOptions
from duplex.project.evaluate import evaluate_stage
from duplex.project.run import LastDatasetLoader, ProjectData, ProjectRun, load_inputs
from duplex.project.runs import load_run
from duplex.project.train import train_stage
from duplex.recognition import numpy_example
from duplex.recognition.export import export, exported_tensors, model_card_facts
from duplex.recognition.recognizer import Recognizer, open_image
from duplex.training import inputs as inputs_module
from duplex.training.checkpoint import load_checkpoint, read_header, read_record, read_tensors
from duplex.training.inputs import InputRequest, RunInputs
from duplex.training.run import initialised_method
from tests.projects import encoded_project, kill_and_resume_training
from tests.recognition.serving import RunningServer
from tests.subprocesses import start_duplex

pytestmark = pytest.mark.slow


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

    def inputs(self, finetune: FinetuneOptions | None) -> RunInputs:
        return load_inputs(ProjectData(self.params(), "own", self.paths), InputRequest(finetune=finetune))

    def pictures(self) -> list[Path]:
        table = read_manifest(self.paths.manifest("own"))
        return [self.folder / "pictures" / image for image in table["image"][table["split"] == "test"]]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    """A twentieth of `shapes`, with two block inputs; a method with one fine-tuned block, trained and evaluated."""
    folder = tmp_path_factory.mktemp("deep")

    def rows(record: dict) -> None:
        record["extraction"]["block_inputs"] = 2
        record["methods"]["deep"] = {"extends": "dual", "finetune": {"blocks": 1}, "training": {"select": "last"}}
        record["methods"]["deeper"] = {"extends": "deep", "finetune": {"blocks": 3}}
        record["methods"]["flat"] = {"extends": "cso"}
        divided = {"devices": 2, "batch_size": 50, "clip": 1.0, "epochs": 5}
        record["methods"]["whole"] = {
            "extends": "duplex", "finetune": {"blocks": 2}, "training": {**divided, "devices": 1}
        }  # fmt: skip
        record["methods"]["divided"] = {"extends": "whole", "training": divided}
        record["methods"]["flat_divided"] = {"extends": "flat", "training": {"devices": 2}}
        record["methods"]["fixed"] = {"extends": "closed_form", "training": {"devices": 2}}
        record["methods"]["tried"] = {"extends": "dual", "finetune": {"blocks": "auto"}, "training": {"devices": 2}}
        record["methods"]["compiled"] = {
            "extends": "cso", "finetune": {"blocks": 1}, "training": {"compile": True, "select": "last"}
        }  # fmt: skip
        record["methods"]["both"] = {"extends": "cso", "finetune": {"blocks": 1, "text": "bottleneck"}}

    params, paths = encoded_project(folder, ["deep"], scale=0.05, changes=rows)
    train_stage(ProjectRun("own", "deep", 0, params, paths))
    evaluate_stage(ProjectRun("own", "deep", 0, params, paths))
    return Project(folder)


def test_the_checkpoint_has_trained_parameters_and_no_frozen_tower(project) -> None:
    record = read_record(project.checkpoint("deep"))
    assert record.finetune is not None and (record.finetune.blocks, record.encoder["block_inputs"]) == (1, "2")
    inputs = project.inputs(record.finetune)
    method = load_checkpoint(project.checkpoint("deep"), inputs.context(), inputs.encoder)
    assert isinstance(method, WithFinetuning)
    names = [name for name in method.state_dict() if name.startswith(FINETUNED_PREFIX)]
    assert len(names) == 4 and all(".up." in name or ".down." in name for name in names)
    assert method.blocks.trained[0].up.weight.abs().max() > 0


def test_scores_of_image_files_equal_those_of_the_evaluation(project) -> None:
    recognizer = Recognizer.load(project.checkpoint("deep").parent, device="cpu")
    inputs = project.inputs(read_record(project.checkpoint("deep")).finetune)
    test, method = inputs.examples["test"], recognizer.trained.method
    columns = inputs.labels.candidates("closed", "train")  # the pairs of all splits
    files = [project.folder / "pictures" / image for image in inputs.manifest["image"].to_numpy()[test.rows][:20]]
    wanted = method.scorer(columns)({name: values[:20] for name, values in test.inputs.items()})
    torch.testing.assert_close(recognizer.scores(files, "closed"), wanted, rtol=3e-4, atol=1e-4)
    plain = method.method.scorer(columns)({"cls": test.inputs["cls"][:20]})
    assert not torch.allclose(plain, wanted, atol=1e-2)
    answers = list(recognizer.stream(files, num_workers=0))
    assert [one.best.name for one in answers] == [one.best.name for one in recognizer(files)]
    with pytest.raises(UsageError, match="also needs block inputs of the image tower; give images instead of features"):
        recognizer.scores(np.ones((1, 128), np.float32))


def test_recognition_encodes_prompts_with_the_adapters_of_the_text_tower(project) -> None:
    train_stage(ProjectRun("own", "both", 0, project.params(), project.paths))
    trained = Recognizer.load(project.checkpoint("both").parent, device="cpu").trained
    assert any(weight.abs().max() > 0 for name, weight in trained.method.state_dict().items() if "text." in name)
    scores = Recognizer(trained).scores(project.pictures()[:8], "closed")
    inputs = project.inputs(trained.record.finetune)
    fresh = load_checkpoint(project.checkpoint("both"), inputs.context(), inputs.encoder)
    columns, test = inputs.labels.candidates("closed", "train"), inputs.examples["test"]
    wanted = fresh.scorer(columns)({name: values[:8] for name, values in test.inputs.items()})
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match=r"has text adapters and cannot be exported; use a run without finetune\.text"):
        exported_tensors(trained, "closed")
    with pytest.raises(UsageError, match="cannot score added pairs"):
        Recognizer(trained, [("red", "cube")]).scores(project.pictures()[:1], "closed")


def test_an_exported_folder_has_the_finetuned_blocks(project, tmp_path: Path) -> None:
    """The same scores of images, with added compositions too; numpy gives them from fine-tuned features."""
    where = project.checkpoint("deep").parent
    run, files = Recognizer.load(where, device="cpu"), project.pictures()[:20]
    export(run.trained, "closed", tmp_path / "out", model_card_facts(where, name=None, licence="mit", repository=None))
    folder = Recognizer.load(tmp_path / "out", device="cpu")
    torch.testing.assert_close(folder.scores(files), run.scores(files), rtol=1e-6, atol=1e-5)
    assert [one.best.name for one in folder(files)] == [one.best.name for one in run(files)]
    words = [("dark", "picture"), ("photo", "star")]
    wide, same = (one.with_compositions(words).scores(files) for one in (folder, run))
    torch.testing.assert_close(wide, same, rtol=1e-6, atol=1e-5)
    own = same[:, : -len(words)]  # more candidates shift all scores of an image by one number
    torch.testing.assert_close(own - own[:, :1], run.scores(files) - run.scores(files)[:, :1], rtol=0, atol=1e-4)
    inputs = run.encode([run.encoder.image_transform(open_image(file)) for file in files])
    tensors = numpy_example.load_model(tmp_path / "out")[0]
    with torch.no_grad():
        moved = run.trained.finetuned(inputs["block_inputs"]).numpy()
    np.testing.assert_allclose(numpy_example.scores(tensors, moved), run.scores(files), rtol=1e-6, atol=1e-5)
    assert np.abs(numpy_example.scores(tensors, inputs["cls"].numpy()) - run.scores(files).numpy()).max() > 1e-2
    assert "with its last block fine-tuned, not rounded" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UsageError, match="also needs block inputs of the image tower; give images instead of features"):
        folder.scores(np.ones((1, 128), np.float32))


@pytest.mark.slow
def test_onnxruntime_runs_the_finetuned_blocks(project, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    where = project.checkpoint("deep").parent
    process = start_duplex("export", where, tmp_path / "plain", cwd=project.folder)
    assert "reads features of the fine-tuned image tower; to export this tower" in process.communicate()[1]
    assert start_duplex("export", where, tmp_path / "out", "--onnx-encoder", cwd=project.folder).wait() == 0
    run, files = Recognizer.load(where, device="cpu"), project.pictures()[:18]
    pixels = torch.stack([run.encoder.image_transform(open_image(file)) for file in files]).numpy()
    tower, trained = (
        onnxruntime.InferenceSession(tmp_path / "out" / f"{name}.onnx") for name in ("encoder", "trained")
    )
    (features,) = tower.run(None, {"pixels": pixels})
    (scores,) = trained.run(None, {"features": features})
    np.testing.assert_allclose(scores, run.scores(files).numpy(), rtol=0, atol=0.02)  # logarithms; float16 within


@pytest.mark.slow
def test_the_server_uses_the_finetuned_blocks(project) -> None:
    """The same composition, and similar training images by the cache's own features."""
    files = project.pictures()[:3]
    wanted = Recognizer.load(project.checkpoint("deep").parent, device="cpu")(files)
    with RunningServer(project.checkpoint("deep").parent, project.folder, "--seconds", "120") as server:
        status, said = server.predict(*((file.name, file.read_bytes()) for file in files), query="?similar=1")
    assert status == 200
    answers = said["answers"]
    assert [f"{one['top'][0]['state']} {one['top'][0]['object']}" for one in answers] == [
        one.best.name for one in wanted
    ]
    assert all(one["similar"][0]["cosine"] > 0.5 for one in answers)


def test_the_report_shows_finetuned_features(project) -> None:
    shown = load_run(ProjectRun("own", "deep", 0, project.params(), project.paths))
    features = shown.method.inspectable().features
    test = shown.inputs.examples["test"]
    assert features is not None and not torch.allclose(
        features(test.inputs), shown.method.method.inspectable().features({"cls": test.cls}), atol=1e-2
    )
    fresh = initialised_method(
        "closed_form", shown.method.options, shown.method.context, shown.inputs, 0, torch.device("cpu")
    )
    assert fresh.blocks.trained[0].up.weight.abs().max() == 0


def test_training_and_evaluation_from_the_disk_equal_those_from_memory(project, monkeypatch) -> None:
    wanted = evaluate_stage(ProjectRun("own", "deep", 0, project.params(), project.paths))
    held = train_stage(
        ProjectRun("own", "deep", 0, project.params(), project.paths), project.paths.run("own", "held", 0)
    )
    monkeypatch.setattr(inputs_module, "read_tokens", lambda path, name, limit, rows: read_tokens(path, name, 0, rows))
    assert evaluate_stage(ProjectRun("own", "deep", 0, project.params(), project.paths)) == wanted
    streamed = train_stage(
        ProjectRun("own", "deep", 0, project.params(), project.paths), project.paths.run("own", "streamed", 0)
    )
    assert streamed.history == held.history  # so few images are one block, in the order that those in memory have


def test_the_memory_budget_decides_which_tokens_stay_on_the_disk(project) -> None:
    """Inputs loaded with another budget are not shared."""
    params, cache = project.params(), LastDatasetLoader()
    request = InputRequest(finetune=params.finetune("deep", "own"))
    data = ProjectData(params, "own", project.paths)
    inputs = cache(data, request)
    assert isinstance(inputs.examples["train"].inputs["block_inputs"], torch.Tensor)
    with h5py.File(project.paths.features("own"), "r") as file:
        assert file["block_inputs"].nbytes < BLOCK  # so that no budget that options allow is below it
    small = load_inputs(data, replace(request, memory=2**-30))
    assert isinstance(small.examples["train"].inputs["block_inputs"], DiskTokens)
    assert cache(data, replace(request, memory=1.0)) is not inputs


def test_too_few_block_inputs_are_reported_with_the_command_to_run(project) -> None:
    with pytest.raises(
        UsageError,
        match=r"finetune\.blocks is 3, but .* holds the inputs of 2 blocks; .*`duplex extract --dataset own`",
    ):
        train_stage(ProjectRun("own", "deeper", 0, project.params(), project.paths))


@pytest.mark.long
def test_killed_training_resumes_to_the_same_bytes(project) -> None:
    kill_and_resume_training(project, "deep")
    assert json.loads(project.paths.run("own", "deep", 7).timing.read_text())["parameters"] > 20_000


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_killed_compiled_training_resumes_to_the_same_bytes(project) -> None:
    kill_and_resume_training(project, "compiled")
    assert json.loads(project.paths.run("own", "compiled", 7).timing.read_text())["compiled"] is True


@pytest.mark.parametrize(
    ("alone", "method", "kills"),
    [pytest.param("whole", "divided", 2, marks=pytest.mark.long), ("flat", "flat_divided", 0)],
)
def test_two_processes_give_the_losses_of_one_and_the_same_files(project, alone: str, method: str, kills: int) -> None:
    """Killed as soon as an epoch is saved, and once more up to 0.3 s after another, they end in the same bytes."""
    if kills:
        kill_and_resume_training(project, method, kills)
    else:
        train_stage(ProjectRun("own", method, 7, project.params(), project.paths))
    train_stage(ProjectRun("own", alone, 7, project.params(), project.paths))
    paths = [project.paths.run("own", name, 7) for name in (alone, method)]
    whole, divided = (pd.read_csv(path.history) for path in paths)
    assert list(whole.columns) == list(divided.columns) and len(whole) > 2
    np.testing.assert_allclose(divided.to_numpy(), whole.to_numpy(), rtol=1e-5, atol=1e-5)
    one, two = (read_tensors(read_header(path.checkpoint, "checkpoint")) for path in paths)
    assert {name: value.shape for name, value in one.items()} == {name: value.shape for name, value in two.items()}
    assert read_record(paths[1].checkpoint).epoch == read_record(paths[0].checkpoint).epoch
    assert not paths[1].unfinished_training.exists()
    evaluate_stage(ProjectRun("own", method, 7, project.params(), project.paths))


def test_what_several_devices_cannot_train_is_refused(project) -> None:
    refused = {
        "fixed": "trains neither blocks of the image tower .* set it to 1",
        "tried": "finetune: auto tries recipes in one process; set it to 1 for tried",
    }
    for method, reason in refused.items():
        with pytest.raises(UsageError, match=f"training.devices is 2, but .*{reason}"):
            train_stage(ProjectRun("own", method, 0, project.params(), project.paths))
