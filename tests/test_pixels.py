"""Fine-tuned blocks on cached pixels, from images to results: any number of blocks, with and without augmentation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from duplex.artifacts import ArtifactPaths
from duplex.data.tables import read_manifest
from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import capture_block_input
from duplex.errors import UsageError
from duplex.features.tokens import read_tokens
from duplex.methods.blocks import finetuned_blocks_factory
from duplex.options import FinetuneOptions
from duplex.project.evaluate import evaluate_stage
from duplex.project.extract import extract
from duplex.project.prepare import prepare
from duplex.project.run import ProjectData, ProjectRun, load_inputs
from duplex.project.train import train_stage
from duplex.recognition.export import export, model_card_facts
from duplex.recognition.recognizer import Recognizer
from duplex.training.checkpoint import read_record
from duplex.training.inputs import InputRequest
from tests.projects import encoded_project, kill_and_resume_training
from tests.subprocesses import start_duplex

AUGMENT = ["crop", "flip", "perspective", "rotation"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A few of `shapes` with pixels and the inputs of one block; all blocks trained from augmented pixels."""
    folder = tmp_path_factory.mktemp("pixels")

    def rows(record: dict) -> None:
        record["extraction"] |= {"pixels": True, "block_inputs": 1}
        for name, finetune in {"plain": {"blocks": "all"}, "last": {"blocks": 1}, "six": {"blocks": 6}}.items():
            record["methods"][name] = {"extends": "dual", "finetune": finetune}
        record["methods"]["paper"] = {"extends": "duplex_paper", "finetune": {"adapter": "bottleneck"}}
        record["methods"]["varied"] = {"extends": "plain", "finetune": {"blocks": 3, "augment": AUGMENT}}

    params, paths = encoded_project(folder, ["varied"], scale=0.03, changes=rows)
    train_stage(ProjectRun("own", "varied", 0, params, paths))
    return SimpleNamespace(folder=folder, params=params, paths=paths, run=paths.run("own", "varied", 0))


def inputs_of(project, method: str):
    request = InputRequest(finetune=project.params.finetune(method, "own"))
    return load_inputs(ProjectData(project.params, "own", project.paths), request)


def files_of(project, rows) -> list[Path]:
    images = read_manifest(project.paths.manifest("own"))["image"].to_numpy()
    return [project.folder / "pictures" / image for image in images[rows]]


def test_block_inputs_that_suffice_are_preferred_unless_pixels_are_augmented(project) -> None:
    for name, shape in (("last", (224, 4, 4)), ("plain", (3, 64, 64)), ("varied", (3, 64, 64))):
        assert inputs_of(project, name).examples["train"].inputs["block_inputs"].shape[1:] == shape
    record = read_record(project.run.checkpoint).encoder
    assert record["pixels"] == "true" and "block_inputs" not in record
    assert inputs_of(project, "last").encoder["block_inputs"] == "1"
    with pytest.raises(UsageError, match=r"'tiny' has 4 blocks, but its last 6 were requested"):
        inputs_of(project, "six")


def test_features_of_pixels_are_those_of_extraction_bit_for_bit(project) -> None:
    inputs = inputs_of(project, "plain")
    pixels = inputs.examples["train"].inputs["block_inputs"][:64]
    assert inputs.make_blocks is not None and pixels.dtype == torch.uint8
    blocks = inputs.make_blocks()
    encoder = load_encoder("tiny", towers="image")
    with torch.no_grad():
        assert torch.equal(blocks(pixels), encoder.encode_images(pixels))
    torch.testing.assert_close(blocks(pixels), encoder.encode_images(pixels), rtol=0, atol=1e-4)


def test_frozen_blocks_before_the_trained_ones_run_once_where_memory_allows(project) -> None:
    finetune = FinetuneOptions(3)
    data = ProjectData(project.params, "own", project.paths)
    advanced = load_inputs(data, InputRequest(finetune=finetune))
    assert advanced.encoder["block_inputs"] == "3" and "pixels" not in advanced.encoder
    held = advanced.examples["val"].inputs["block_inputs"]
    encoder = load_encoder("tiny", towers="image")
    whole = load_inputs(data, InputRequest(finetune=finetune, memory=0.004))  # GiB: enough for the pixels alone
    pixels = whole.examples["val"].inputs["block_inputs"]
    assert whole.encoder["pixels"] == "true" and pixels.dtype == torch.uint8
    with torch.no_grad(), capture_block_input(encoder, 3) as inputs:
        encoder.encode_images(pixels)
    assert held.dtype == torch.float16
    torch.testing.assert_close(held.float(), inputs[0], rtol=2e-3, atol=1e-3)
    ours, theirs = advanced.make_blocks(), whole.make_blocks()
    with torch.no_grad():
        torch.testing.assert_close(ours(held), theirs(pixels), rtol=0, atol=2e-2)
    rounded = load_inputs(data, InputRequest(finetune=finetune, precision="bf16"))
    assert not torch.equal(rounded.examples["val"].inputs["block_inputs"], held)


def test_only_training_steps_see_augmented_pixels(project) -> None:
    inputs = inputs_of(project, "varied")
    pixels = inputs.examples["train"].inputs["block_inputs"][:8]
    blocks = inputs.make_blocks()
    torch.manual_seed(0)
    augmented = [blocks.train()(pixels) for _ in range(2)]
    assert not torch.allclose(*augmented, atol=1e-3)
    torch.manual_seed(0)
    assert torch.equal(blocks(pixels), augmented[0])
    torch.testing.assert_close(blocks.eval()(pixels), load_encoder("tiny").encode_images(pixels), rtol=0, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(blocks.train()(pixels), blocks.eval()(pixels)), "statistics see plain images"


def test_recognition_and_export_read_pixels(project, tmp_path: Path) -> None:
    recognizer = Recognizer.load(project.run.root, device="cpu")
    inputs = inputs_of(project, "varied")
    test, method = inputs.examples["test"], recognizer.trained.method
    files = files_of(project, test.rows)[:20]
    wanted = method.scorer(inputs.labels.candidates("closed", "train"))(
        {name: values[:20] for name, values in test.inputs.items()}
    )
    torch.testing.assert_close(recognizer.scores(files, "closed"), wanted, rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match="also needs pixels; give images instead of features"):
        recognizer.scores(np.ones((1, 128), np.float32))
    facts = model_card_facts(project.run.root, name=None, licence="mit", repository=None)
    export(recognizer.trained, "closed", tmp_path / "out", facts)
    folder = Recognizer.load(tmp_path / "out", device="cpu")
    torch.testing.assert_close(folder.scores(files), recognizer.scores(files), rtol=1e-6, atol=1e-5)
    assert evaluate_stage(ProjectRun("own", "varied", 0, project.params, project.paths))


def test_pixels_that_cannot_be_used_are_reported_in_one_line(project, tmp_path: Path) -> None:
    encoder = {"name": "tiny", "tag": "", "pixels": "true", "precision": "fp32"}
    blocks = finetuned_blocks_factory(encoder, FinetuneOptions("all"), "cpu")()
    with pytest.raises(UsageError, match=r"have shape \[2, 3, 32, 32\] .* expects shape \[B, 3, 64, 64\]"):
        blocks(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    record = json.loads(project.params.model_dump_json())
    record["extraction"]["pixels"] = False
    bare, paths = type(project.params).model_validate_json(json.dumps(record)), ArtifactPaths(tmp_path / "artifacts")
    prepare(ProjectData(bare, "own", paths))
    extract(ProjectData(bare, "own", paths))
    assert read_tokens(paths.features("own"), "pixels") is None
    messages = {"varied": "changes pixels, but .* has none", "plain": "or encoder.pixels to true"}
    for method, message in messages.items():
        with pytest.raises(UsageError, match=rf"{message}.*`duplex extract --dataset own`"):
            train_stage(ProjectRun("own", method, 0, bare, paths))


@pytest.mark.slow
def test_onnxruntime_reads_pixels(project, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    export_folder = tmp_path / "out"
    assert start_duplex("export", project.run.root, export_folder, "--onnx-encoder", cwd=project.folder).wait() == 0
    run = Recognizer.load(project.run.root, device="cpu")
    pixels = inputs_of(project, "varied").examples["test"].inputs["block_inputs"][:18]
    (features,) = onnxruntime.InferenceSession(export_folder / "encoder.onnx").run(None, {"pixels": pixels.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(features, run.trained.finetuned(pixels).numpy(), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["varied", pytest.param("paper", marks=pytest.mark.long)])
def test_killed_training_from_pixels_resumes_to_the_same_bytes(project, method: str) -> None:
    kill_and_resume_training(project, method)
