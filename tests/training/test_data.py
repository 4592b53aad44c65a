"""Block inputs of images that are found by content, for any number of blocks and order of rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from duplex.config.params import EncoderParams
from duplex.data.contents import file_digests
from duplex.data.tables import labels_of
from duplex.encoders.base import load_encoder
from duplex.features.extract import ExtractionSettings, extract
from duplex.features.shared import encode_shared
from duplex.features.tokens import read_tokens
from duplex.options import FinetuneOptions
from duplex.training.inputs import Data, InputRequest
from tests.recognition.drawn_folder import draw_pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for state, thing in (("red", "star"), ("blue", "moon"), ("red", "moon")):
        draw_pair(root, state, thing, range(6))
    return root


@pytest.fixture(scope="module")
def data(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Eighteen training images with the inputs of four blocks."""
    images = sorted(path.relative_to(root).as_posix() for path in root.glob("*/*/*.png"))
    frame = pd.DataFrame({"image": images, "split": "train"})
    frame[["state", "object"]] = [image.split("/")[:2] for image in images]
    tower = load_encoder("tiny", towers="image")
    folder = tmp_path_factory.mktemp("cache")
    features, _ = encode_shared(folder, tower, root, images, file_digests(root, images), block_inputs=4)
    frame = frame[["image", "state", "object", "split"]]
    return Data(frame, labels_of(frame), features, EncoderParams(name="tiny"), "cpu", skip_frozen_blocks=True)


def block_inputs(run: Any) -> Any:
    return run.examples["train"].inputs["block_inputs"]


def test_inputs_of_fewer_blocks_are_those_of_a_cache_of_so_many(data: Data, root: Path, tmp_path: Path) -> None:
    request = InputRequest(finetune=FinetuneOptions(blocks=2))
    run = data.read(request)
    out = tmp_path / "plain.h5"
    tower, images = load_encoder("tiny", towers="image"), data.manifest["image"].tolist()
    extract(images, out, tower, ExtractionSettings(root, "0", block_inputs=2))
    assert run.encoder["block_inputs"] == "2"
    np.testing.assert_allclose(block_inputs(run).numpy(), np.asarray(read_tokens(out, "block_inputs")), atol=2e-2)
    again = replace(data, manifest=data.manifest.assign(split="train")).read(request)  # from what is in memory
    np.testing.assert_array_equal(block_inputs(again).numpy(), block_inputs(run).numpy())
    deeper = data.read(replace(request, finetune=FinetuneOptions(blocks=4)))
    assert deeper.encoder["block_inputs"] == "4"
    assert run.make_blocks is not None and deeper.make_blocks is not None
    shallow, deep = run.make_blocks()(block_inputs(run)), deeper.make_blocks()(block_inputs(deeper))
    np.testing.assert_allclose(shallow.detach().numpy(), deep.detach().numpy(), atol=5e-2)


def test_inputs_too_large_for_memory_stay_on_the_disk(data: Data) -> None:
    without_memory = replace(data, advanced={})  # of what other tests computed
    run = without_memory.read(InputRequest(finetune=FinetuneOptions(blocks=2), memory=1e-9))
    held = data.read(InputRequest(finetune=FinetuneOptions(blocks=4)))
    assert run.encoder["block_inputs"] == "4"
    np.testing.assert_array_equal(block_inputs(run)[slice(0, 3)].numpy(), block_inputs(held)[:3].numpy())
