"""A data set of params.yaml that lists two encoders: which methods read both, and which name one."""

from pathlib import Path

import pytest
import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.errors import UsageError
from duplex.project.evaluate import evaluate_stage
from duplex.project.extract import extract
from duplex.project.prepare import prepare
from duplex.project.run import ProjectData, ProjectRun
from duplex.project.train import train_stage
from duplex.recognition.recognizer import Recognizer
from tests.encoders.small_timm import SMALL, write_weights
from tests.projects import draw_project, edited_params

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    write_weights(folder)

    def two(record):
        listed = [{"name": "tiny"}, {"name": SMALL, "weights": str(folder / "weights.safetensors")}]
        record["datasets"]["own"]["encoder"] = listed
        record["methods"]["one"] = {"extends": "csp", "encoder": "tiny"}
        record["methods"]["other"] = {"extends": "linear", "encoder": SMALL}

    draw_project(folder, ["closed_form", "dual", "one", "other", "csp"], changes=two, epochs=1)
    params, paths = load_params(folder / "params.yaml"), ArtifactPaths(folder / "artifacts")
    prepare(ProjectData(params, "own", paths))
    extract(ProjectData(params, "own", paths))
    return folder


def run(folder: Path, method: str) -> ProjectRun:
    return ProjectRun("own", method, 0, load_params(folder / "params.yaml"), ArtifactPaths(folder / "artifacts"))


@pytest.mark.parametrize("method", ["closed_form", "dual", "one", "other"])
def test_runs_read_both_encoders_or_the_one_that_they_name(folder: Path, tmp_path: Path, method: str) -> None:
    own = run(folder, method)
    train_stage(own)
    evaluate_stage(own)
    inputs = own.data.open().read(own.spec.request)
    record = own.checkpoint().record.encoder
    names = {"one": "tiny", "other": SMALL}
    if method in names:
        assert record["name"] == names[method] and "parts" not in record
    else:
        assert record["name"] == f"joined:tiny + {SMALL} @ {folder / 'weights.safetensors'}"
        assert tuple(map(int, record["parts"].split(" + "))) == (128, inputs.examples["test"].cls.shape[1] - 128)
    recognizer = Recognizer.load(own.files.root, device="cpu", exact=True)
    test = inputs.examples["test"]
    images = [folder / "pictures" / inputs.manifest["image"].iloc[row] for row in test.rows[:9].tolist()]
    cached = recognizer.candidates("closed").scorer({"cls": test.cls[:9]}).softmax(-1)
    found = recognizer.scores(images, "closed").softmax(-1)
    # cut from both, features of one encoder are rounded after they have the length 1
    torch.testing.assert_close(found, cached, rtol=0.0, atol=0.02 if method in names else 1e-4)
    if method != "one":
        recognizer.save_pretrained(tmp_path / "export")
        exported = Recognizer.load(tmp_path / "export", device="cpu", exact=True)
        torch.testing.assert_close(exported.scores(images, "closed").softmax(-1), found, rtol=0.0, atol=1e-4)
        assert exported.trained.backbone.record == recognizer.trained.backbone.record


def test_a_method_that_reads_one_encoder_says_so_in_one_line(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"name one .*closed_form, linear, dual or dual_visual") as caught:
        train_stage(run(folder, "csp"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "ViT-B-32"}, r"unknown encoder of own in params.yaml, methods\.one\.encoder"),
        ({"finetune": {"blocks": 1}}, "blocks of one only can be fine-tuned"),
    ],
)
def test_unfitting_settings_are_refused(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    with edited_params(folder / "params.yaml", tmp_path / "params.yaml") as record:
        record["methods"]["one"] |= changes
    params = load_params(tmp_path / "params.yaml")
    with pytest.raises(UsageError, match=message):
        train_stage(ProjectRun("own", "one", 0, params, ArtifactPaths(folder / "artifacts")))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([{"name": "tiny"}], "needs two or more"),
        ([{"name": "tiny"}, {"name": SMALL, "precision": "bf16"}], "differ in"),
    ],
)
def test_wrong_lists_are_refused(folder: Path, tmp_path: Path, listed: list, message: str) -> None:
    with edited_params(folder / "params.yaml", tmp_path / "params.yaml") as record:
        record["datasets"]["own"]["encoder"] = listed
    with pytest.raises(UsageError, match=message):
        load_params(tmp_path / "params.yaml")
