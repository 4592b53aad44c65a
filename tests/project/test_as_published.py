"""Every published recipe, trained for two epochs on made data of the benchmarks' layout with a small random CLIP."""

from collections.abc import Iterator
from contextlib import chdir
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from duplex.config.params import Params, parse_params, published_recipes, read_yaml
from duplex.labels import WORLDS
from duplex.project.evaluate import evaluate_stage
from duplex.project.extract import extract
from duplex.project.prepare import prepare
from duplex.project.run import LastDatasetLoader, ProjectData, ProjectRun
from duplex.project.train import train_stage
from duplex.recognition.recognizer import Recognizer
from tests.data.makers import make_standard
from tests.encoders import small
from tests.projects import SHIPPED

LAYOUTS = {"ut-zappos": "archive", "mit-states": "spaces"}  # as the benchmark's archive has it
UNDECIDED = {"learning_rate": 1e-3, "batch_size": 16}  # of methods without published ones
BLOCKS = {"troika": 2 * 4, "caila": 2 * (2 * 2 + 2 * 3)}  # adapters, by positions, layers and concepts


def recipes_of(dataset: str) -> list[str]:
    """The recipes that are run on a data set: on UT-Zappos all that have it."""
    found = {name: recipe["per_dataset"] for name, recipe in published_recipes().items()}
    return [name for name, own in found.items() if ("ut-zappos" if "ut-zappos" in own else "mit-states") == dataset]


class Project:
    """A project with both data sets, extracted once for all recipes."""

    def __init__(self, folder: Path, encoder: str) -> None:
        self.params: dict[str, Params] = {}
        self.load = LastDatasetLoader()
        for dataset, layout in LAYOUTS.items():
            make_standard(folder / "data" / dataset, layout)
            record = read_yaml(SHIPPED)
            record["run"] = {
                "datasets": [dataset],
                "methods": recipes_of(dataset),
                "seeds": [0],
                "recipes": "published",
            }
            record["device"], record["extraction"]["num_workers"], record["extraction"]["tokens"] = "cpu", 0, "patch"
            record["evaluation"]["bootstrap"], record["report"] = 20, {}
            entry = record["datasets"][dataset]
            entry["encoder"] = {"name": encoder, "pixels": True}
            entry["training"]["threads"] = 1
            entry["methods"] = {name: {"training": self.shortened(name, dataset)} for name in recipes_of(dataset)}
            self.params[dataset] = parse_params(record, {}, SHIPPED)
            data = ProjectData(self.params[dataset], dataset)
            prepare(data)
            extract(data)

    @staticmethod
    def shortened(name: str, dataset: str) -> dict[str, Any]:
        recipe = published_recipes()[name]
        training = {**recipe.get("training", {}), **recipe["per_dataset"][dataset].get("training", {})}
        return {"epochs": 2, **{key: value for key, value in UNDECIDED.items() if training.get(key) == "?"}}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    deeper: Any = deepcopy(small.ARCHITECTURE)
    deeper["vision_cfg"]["layers"], deeper["text_cfg"]["layers"] = 4, 2
    deeper["embed_dim"] = deeper["text_cfg"]["width"] = 48  # 12 and 16 heads divide it
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "ARCHITECTURE", deeper)
        encoder = small.write_folder(folder / "clip")
    with chdir(folder):
        yield Project(folder, encoder)


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "name"), [(dataset, name) for dataset in LAYOUTS for name in recipes_of(dataset)])
def test_two_epochs_as_published(dataset: str, name: str, project: Project) -> None:
    run = ProjectRun(dataset, name, 0, project.params[dataset])
    train_stage(run, load=project.load)
    evaluate_stage(run, load=project.load)
    recognizer = Recognizer.load(run.files.root, device="cpu")
    method: Any = recognizer.trained.method
    is_trained = bool(method.groups())
    history = pd.read_csv(run.files.history)
    assert len(history) == (3 if is_trained else 1), "epoch 0 and two more"
    losses = history.filter(like="loss_").iloc[1:].to_numpy()
    assert losses.size > 0 or not is_trained
    assert np.isfinite(losses).all()
    metrics = read_yaml(run.files.metrics)
    worlds = {"closed": ("closed",), "open": ("open",)}.get(published_recipes()[name].get("world", ""), WORLDS)
    assert all(0 <= metrics[world]["auc"] <= 100 for world in worlds)
    scores = recognizer.scores(sorted((Path("data") / dataset).rglob("*.png"))[:4])
    assert torch.isfinite(scores).all() and not torch.equal(scores[0], scores[1])
    if name in BLOCKS:
        assert len(method.blocks.trained) == BLOCKS[name]


def test_every_recipe_is_run() -> None:
    assert sorted(name for dataset in LAYOUTS for name in recipes_of(dataset)) == sorted(published_recipes())
