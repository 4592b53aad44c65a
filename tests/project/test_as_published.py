"""Published recipes with adapters in the encoder, trained for two epochs with a small random CLIP."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from duplex.config.params import load_params, published_recipes
from duplex.methods.finetuned import WithFinetuning
from duplex.project import stages
from duplex.project.train import train_stage
from duplex.recognition.recognizer import Recognizer
from tests.encoders import small
from tests.projects import encoded_project


@pytest.mark.slow
@pytest.mark.parametrize("name", ["troika", "caila"])
def test_two_epochs_as_published(name: str, tmp_path, monkeypatch) -> None:
    deeper: Any = deepcopy(small.ARCHITECTURE)
    deeper["vision_cfg"]["layers"], deeper["text_cfg"]["layers"] = 4, 2
    monkeypatch.setattr(small, "ARCHITECTURE", deeper)
    encoder = small.write_folder(tmp_path / "clip")
    recipe = deepcopy(published_recipes()[name])
    own = recipe.pop("per_dataset")["ut-zappos"]
    training = {**recipe.pop("training"), **own.pop("training"), "epochs": 2, "batch_size": 16, "learning_rate": 1e-3}

    def published(record: dict[str, Any]) -> None:
        record["datasets"]["own"]["encoder"] = {"name": encoder, "pixels": True}
        record["extraction"]["tokens"] = "patch"
        record["methods"][name] = {**recipe, **own, **({"heads": 2} if name == "troika" else {}), "training": training}

    params, paths = encoded_project(tmp_path / "project", [name], scale=0.02, changes=published)
    assert load_params(tmp_path / "project" / "params.yaml").finetune(name, "own").depth > 4
    train_stage(params, "own", name, 0, paths)
    stages.evaluate_stage(params, "own", name, 0, paths)
    run = Recognizer.load(paths.run("own", name, 0).root, device="cpu")
    method = run.trained.method
    assert isinstance(method, WithFinetuning)
    counts = {"troika": (8, 0), "caila": (2 * 2 * 2 + 2 * 2 * 3, 2 * 2 * 3)}
    assert (len(method.blocks.trained), 0 if method.text is None else len(method.text)) == counts[name]
    pictures = sorted((tmp_path / "project" / "pictures").rglob("*.png"))[:4]
    scores = run.scores(pictures)
    assert torch.isfinite(scores).all() and not torch.equal(scores[0], scores[1])
