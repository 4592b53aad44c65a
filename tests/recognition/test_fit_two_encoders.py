"""`duplex fit` with two encoders: each is extracted once, and validation chooses one or both at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from duplex import Recognizer
from duplex.encoders.base import joined_name
from duplex.errors import UsageError
from duplex.features import shared
from duplex.recognition import fit, folder_fit, numpy_example, onnx_files
from duplex.recognition.export import read_fit
from duplex.recognition.fit import checked_encoders
from duplex.recognition.labelled_folder import read_labelled_folder
from duplex.recognition.update import update_model
from duplex.training import lineup, recipes
from tests.encoders.small_timm import SMALL, write_weights
from tests.recognition.drawn_folder import draw_pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is fine-tuned, for one epoch and for two."""
    monkeypatch.setattr(lineup, "DEPTHS", (1,))
    for module in (lineup, recipes):
        monkeypatch.setattr(module, "EPOCHS", (1, 2))
    monkeypatch.setattr(lineup, "RATES", (1e-3,))


def test_both_at_once_are_exported_predict_as_in_the_run_and_are_updated(drawn, tmp_path, monkeypatch, weights, short):
    encoders = ["tiny", f"{SMALL} @ {weights}"]
    wanted = f"closed form times regressions, {folder_fit.ALL}"

    def chosen(candidates):
        (found,) = [each for each in candidates if each.recipe.name == wanted]
        return found

    extracted = []
    extract = shared.extract

    def counted(images, out, encoder, *rest, **options):
        extracted.append(encoder.name)
        return extract(images, out, encoder, *rest, **options)

    monkeypatch.setattr(shared, "extract", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "features"))
    monkeypatch.setattr(recipes, "choose", chosen)
    monkeypatch.setattr(folder_fit, "choose", lambda candidates: candidates[-1])
    lines: list[str] = []
    model = fit.fit_folder(drawn, tmp_path / "model", encoder=encoders, say=lines.append)
    assert extracted == ["tiny", SMALL]
    record = read_fit(model)
    assert record["chosen"] == wanted
    names = [row["recipe"] for row in record["recipes"]]
    for recipe in ("nothing trained", "two logistic regressions", "closed form times regressions"):
        assert [name for name in names if name.startswith(recipe)] == [
            f"{recipe}, {label}" for label in ("encoder 1", "encoder 2", folder_fit.ALL)
        ]
    assert "text prompts, rate 0.001, all encoders" in names and any(row["blocks"] for row in record["recipes"])
    recognizer = Recognizer.load(model, device="cpu", exact=True)
    stored = recognizer.trained.backbone.record
    assert stored["name"] == joined_name([("tiny", None), (SMALL, str(weights))])
    assert len(stored["weights"].split(" + ")) == 2
    images = sorted(drawn.glob("*/*/0000.png"))
    found = recognizer.scores(images, "open")
    (checkpoint,) = fit.fit_cache_folder(model).glob("recipes-*/*/all/checkpoint.safetensors")
    run = Recognizer.load(checkpoint.parent, device="cpu", exact=True)
    torch.testing.assert_close(found, run.scores(images, "open"), rtol=1e-4, atol=1e-4)
    # features as the cache has them, by the script of the export
    pixels = [recognizer.encoder.image_transform(Image.open(path).convert("RGB")) for path in images]
    features = recognizer.encode(pixels)["cls"].numpy()
    tensors = {name: tensor.numpy() for name, tensor in load_file(model / "model.safetensors").items()}
    np.testing.assert_allclose(numpy_example.scores(tensors, features), found, rtol=1e-3, atol=1e-3)
    right = [answer.best.state == path.parts[-3] for answer, path in zip(recognizer(images), images, strict=True)]
    assert sum(right) > len(images) / 2
    with pytest.raises(UsageError, match=r"cannot be written as ONNX") as caught:
        onnx_files.write_tower(tmp_path, recognizer.trained)
    assert "\n" not in str(caught.value)
    draw_pair(tmp_path / "more", "checkered", "star", range(3))
    updated = Recognizer.load(update_model(model, tmp_path / "more", tmp_path / "updated"), device="cpu")
    assert "checkered" in updated.labels.states


@pytest.mark.long
def test_the_encoder_alone_is_chosen_where_validation_says_so(drawn, tmp_path, weights, short):
    """The random network only adds noise."""
    encoders = ["tiny", f"{SMALL} @ {weights}"]
    model = fit.fit_folder(drawn, tmp_path / "model", encoder=encoders, say=lambda _: None)
    record = read_fit(model)
    aucs = {row["recipe"]: row["auc"] for row in record["recipes"]}
    assert aucs["nothing trained, encoder 1"] > aucs["nothing trained, encoder 2"]
    name = Recognizer.load(model, device="cpu").trained.backbone.record["name"]
    is_alone = not record["chosen"].endswith(folder_fit.ALL)
    assert name == ("tiny" if is_alone else joined_name([("tiny", None), (SMALL, str(weights))]))


def test_weights_and_repeated_encoders_are_refused_in_one_line(drawn):
    labels = read_labelled_folder(drawn).labels
    with pytest.raises(UsageError, match=r"could belong to any of 2 encoders; .*'NAME @ WEIGHTS'"):
        checked_encoders(["tiny", SMALL], "file", labels)
    with pytest.raises(UsageError, match="'tiny' is given twice"):
        checked_encoders(["tiny", "tiny"], None, labels)
