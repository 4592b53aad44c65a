"""Published recipes with adapters in the encoder, trained for two epochs with a small random CLIP."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from duplex.config.params import published_recipes
from duplex.project.evaluate import evaluate_stage
from duplex.project.run import ProjectRun
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
    train_stage(ProjectRun("own", name, 0, params, paths))
    evaluate_stage(ProjectRun("own", name, 0, params, paths))
    run = Recognizer.load(paths.run("own", name, 0).root, device="cpu")
    method: Any = run.trained.method
    assert len(method.blocks.trained) == {"troika": 2 * 4, "caila": 2 * (2 * 2 + 2 * 3)}[name]
    scores = run.scores(sorted((tmp_path / "project" / "pictures").rglob("*.png"))[:4])
    assert torch.isfinite(scores).all() and not torch.equal(scores[0], scores[1])
