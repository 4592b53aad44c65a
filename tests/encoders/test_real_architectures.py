"""Today's families of encoders, with their real code, fewer blocks and random weights: from images to an answer."""

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import duplex
from duplex import Recognizer
from duplex.encoders.base import find_family, load_encoder
from duplex.encoders.libraries import open_clip, timm
from duplex.encoders.open_clip import build_model, offline_model_arguments, open_clip_class
from duplex.features.file import read_features
from duplex.labels import LabelSpace
from duplex.methods.prompts import Prompts
from tests.encoders.small import noise_image, write_gemma_tokenizer

pytestmark = pytest.mark.long
SIZES = (1, 1, 2, 1)  # blocks of the four stages of a convolutional tower


class Family(NamedTuple):
    """An encoder of a family, and what makes its image tower shorter."""

    name: str  # of open_clip, or `timm:MODEL`
    shorter: dict[str, Any]  # arguments of timm


FAMILIES = {
    "SigLIP 2": Family("ViT-B-32-SigLIP2-256", {"depth": 3}),
    "PE-Core": Family("PE-Core-T-16-384", {"depth": 3}),
    "MobileCLIP2": Family("MobileCLIP2-S0", {"layers": SIZES}),
    "DINOv3 ViT": Family("timm:vit_small_patch16_dinov3", {"depth": 3}),
    "DINOv2": Family("timm:vit_small_patch14_reg4_dinov2", {"depth": 2}),
    "DINOv3 ConvNeXt": Family("timm:convnext_tiny", {"depths": SIZES}),
}
Build = Callable[[Family, Path], dict[str, Any]]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """A function that writes a family's random weights and returns `encoder` and `weights` for `load_dataset`."""
    create = timm.create_model

    def write(family: Family, folder: Path) -> dict[str, Any]:
        def shorter(name: str, **options: Any) -> Any:
            return create(name, **{**options, **family.shorter})

        monkeypatch.setattr(timm, "create_model", shorter)
        torch.manual_seed(0)
        folder.mkdir()
        model = family.name.removeprefix("timm:")
        if model != family.name:
            save_file(timm.create_model(model, num_classes=0).state_dict(), folder / "weights.safetensors")
            return {"encoder": family.name, "weights": str(folder / "weights.safetensors")}
        write_open_clip(family.name, folder)
        return {"encoder": f"local-dir:{folder}"}

    yield write


def write_open_clip(name: str, folder: Path) -> None:
    """Write a published architecture of open_clip with two text blocks and random weights."""
    architecture = open_clip.get_model_config(name)
    text = architecture["text_cfg"]
    text["layers"] = 2
    if text.get("hf_tokenizer_name"):
        tokenizer = json.loads(write_gemma_tokenizer(folder).read_text())
        text["vocab_size"] = len(tokenizer["model"]["vocab"])
    (tag,) = open_clip.list_pretrained_tags_by_model(name)
    published = open_clip.get_pretrained_cfg(name, tag)
    preprocess = {key: published[key] for key in ("mean", "std", "interpolation", "resize_mode")}
    config = {"model_cfg": architecture, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    model = open_clip_class(architecture)(**offline_model_arguments(architecture))
    state = {key: value.contiguous().clone() for key, value in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")


def write_images(folder: Path) -> dict[str, Any]:
    """Write 32 images of nine pairs, two of them unseen, and their table; return arguments of `load_dataset`."""
    rows = ["image,state,object,split"]
    pairs = list(product(("red", "blue", "green"), ("star", "heart", "disc")))
    only = {pairs[4]: ["val", "val"], pairs[8]: ["test", "test"]}
    for pair in pairs:
        for split in only.get(pair, ["train", "train", "val", "test"]):
            name = f"{len(rows)}.png"
            noise_image(90, 60, len(rows)).save(folder / name)
            rows.append(f"{name},{pair[0]},{pair[1]},{split}")
    (folder / "table.csv").write_text("\n".join(rows))
    return {"source": folder / "table.csv", "cache": folder / "cache"}


def check_prompts(name: str, labels: LabelSpace) -> None:
    """Prompts joined from words have the features that open_clip gives to the whole text."""
    model = build_model(find_family(name).find(name, None))
    encoder = load_encoder(name, towers="text")
    prompts = Prompts(labels, encoder.text)
    found = next(iter(prompts.encode(labels.candidates("closed", "train"))))
    pairs = labels.names(labels.candidates("closed", "train"))
    tokens = encoder.text.vocabulary.tokenizer([f"a photo of {pair}" for pair in pairs], encoder.text.context_length)
    expected = model.encode_text(tokens, normalize=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_works_from_images_to_an_exported_models_answer(name: str, tmp_path: Path, build: Build) -> None:
    family = FAMILIES[name]
    has_text = not family.name.startswith("timm:")
    place = build(family, tmp_path / "encoder")
    data = duplex.load_dataset(**write_images(tmp_path), **place, block_inputs=2)
    (cache,) = (tmp_path / "cache").rglob("*.h5")
    features = read_features(cache).cls
    assert np.isfinite(features).all() and features.std(axis=0).max() > 0
    if has_text:
        check_prompts(place["encoder"], data.labels)
    options: dict[str, Any] = {"epochs": 1, "batch_size": 512}  # one step
    tuned = {"blocks": 2, "adapter": "full", "learning_rate": 1e-3}
    run = duplex.fit(data, "dual" if has_text else "dual_visual", finetune=tuned, **options)
    pictures = [tmp_path / name for name in data.manifest["image"][:4]]
    expected = Recognizer.load(run.save(tmp_path / "run"))(pictures, top=3)
    found = Recognizer.load(run.export(tmp_path / "export"))(pictures, top=3)
    for one, other in zip(found, expected, strict=True):
        assert one.best.state in data.labels.states
        assert one.best.probability == pytest.approx(other.best.probability, abs=1e-4)
