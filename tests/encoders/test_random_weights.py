"""Random weights of an architecture: drawn from their seed, part of every identity, refused where they mean nothing."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import duplex
from duplex.cli.data import _encoder_entry
from duplex.encoders.base import encoder_identity, load_encoder, missing_weights
from duplex.errors import DuplexError, UsageError
from duplex.features.file import read_features
from tests.commands import command, project
from tests.encoders.small import add_architecture, noise_image
from tests.projects import draw_table

__all__ = ["command", "project"]
NAME = "small-clip"


@pytest.fixture(autouse=True)
def architecture(tmp_path_factory, monkeypatch) -> None:
    add_architecture(monkeypatch, tmp_path_factory.mktemp("architecture"), NAME)


def encoded(name: str, weights: str) -> torch.Tensor:
    encoder = load_encoder(name, weights, towers="image")
    return encoder.encode_images(torch.stack([encoder.image_transform(noise_image(40, 50, seed)) for seed in (0, 1)]))


@pytest.mark.parametrize("name", [NAME, "timm:test_resnet"])
def test_the_seed_decides_the_weights_and_the_identity(name):
    first, again, other = (encoded(name, weights) for weights in ("random:3", "random:3", "random:4"))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.isfinite().all()
    identities = {weights: encoder_identity(name, weights) for weights in ("random", "random:0", "random:3")}
    assert identities["random"] == identities["random:0"] != identities["random:3"]
    assert identities["random:3"].weights == "random:3"
    assert missing_weights(name, "random:3") is None


def test_loading_leaves_the_generator_of_torch_as_it_was():
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    load_encoder(NAME, "random:3")
    assert torch.equal(torch.randn(3), expected)


def test_an_architecture_is_tried_offline_from_images_to_an_answer(tmp_path, command):
    place = {**draw_table(tmp_path, 0.03), "encoder": NAME}
    data, _ = (duplex.load_dataset(**place, weights=weights) for weights in ("random:3", "random:4"))
    caches = [read_features(path) for path in sorted((tmp_path / "cache").glob("*/*.h5"))]
    assert {cache.identity["weights"] for cache in caches} == {"random:3", "random:4"}
    with pytest.raises(DuplexError, match="was made with another weights file"):
        read_features(caches[0].path, expect={"weights": caches[1].identity["weights"]})
    run = duplex.fit(data, "prompts", epochs=1)
    recognizer = duplex.Recognizer.load(run.save(tmp_path / "model"))
    (answer,) = recognizer(tmp_path / "pictures" / data.manifest["image"][0])
    assert answer.best.state in data.labels.states
    assert command("export", tmp_path / "model", tmp_path / "out").refused("has random encoder weights, so it")


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [(NAME, "random:x", "expected random or random:SEED"), ("tiny", "random:0", "'tiny' has its own weights"),
     ("local-dir:somewhere", "random", "has its own weights"), ("blip:somewhere", "random", "has its own weights")],
)  # fmt: skip
def test_random_weights_are_refused_where_they_make_no_sense(name, weights, message):
    with pytest.raises(UsageError, match=message):
        load_encoder(name, weights)


def test_features_of_a_file_need_the_weights_that_made_them():
    table = pd.DataFrame({"state": ["red"], "object": ["star"], "split": ["train"]})
    with pytest.raises(UsageError, match="only for images"):
        duplex.Dataset.from_arrays(np.zeros((1, 16)), table, encoder=NAME, weights="random:1")
    with pytest.raises(UsageError, match="random weights cannot match features"):
        _encoder_entry(NAME, "random:1", None, Path("X.npy"))
