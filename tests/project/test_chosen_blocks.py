"""`finetune: auto`: training chooses the fine-tuned blocks by validation, and writes the choice into the run."""

import json
from pathlib import Path

import pytest

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.errors import UsageError
from duplex.options import AutoFinetune, FinetuneOptions
from duplex.project.evaluate import evaluate_stage
from duplex.project.run import ProjectRun
from duplex.project.train import train_stage
from duplex.report.aggregate import DatasetResults, read_run
from duplex.report.costs import auto_finetune_tables
from duplex.training import lineup, recipes
from duplex.training.checkpoint import read_record
from tests.projects import SHIPPED, edited_params, encoded_project, interrupt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of `shapes` with the inputs of two blocks, and a method with `finetune: auto`."""
    folder = tmp_path_factory.mktemp("chosen")

    def rows(record: dict) -> None:
        record["datasets"]["own"]["encoder"]["block_inputs"] = 2
        record["methods"]["auto"] = {"extends": "dual", "finetune": "auto"}
        record["methods"]["visual"] = {"extends": "closed_form_visual", "finetune": "auto"}
        record["methods"]["visual"]["training"] = {"log": "tensorboard"}

    encoded_project(folder, ["auto"], scale=0.08, changes=rows)
    return folder


@pytest.fixture
def params(folder: Path) -> Params:
    return load_params(folder / "params.yaml")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of a fine-tuned recipe, and no longer trainings."""
    for module in (lineup, recipes):
        monkeypatch.setattr(module, "EPOCHS", (2, 2))


def run_of(params: Params, folder: Path, out: str = "artifacts") -> ArtifactPaths:
    paths = ArtifactPaths(folder / "artifacts")
    files = ArtifactPaths(folder / out).run("own", "auto", 0)
    train_stage(ProjectRun("own", "auto", 0, params, paths), files)
    return ArtifactPaths(folder / out)


def test_the_choice_and_its_table_are_in_the_run_and_in_the_report(params, folder):
    paths = run_of(params, folder)
    files = paths.run("own", "auto", 0)
    record = read_record(files.checkpoint)
    (chosen,) = (recipe for recipe in record.recipes if recipe["chosen"])
    assert record.recipes[0]["blocks"] == 0
    assert {recipe["blocks"] for recipe in record.recipes} <= {0, 1, 2}
    assert chosen["auc"] == pytest.approx(100 * record.val_auc, abs=1e-4)
    assert (record.finetune is None) == (chosen["blocks"] == 0)
    if record.finetune is not None:
        assert (record.finetune.blocks, record.finetune.learning_rate) == (chosen["blocks"], chosen["rate"])
    assert not (files.root / "recipes.partial").exists()
    evaluate_stage(ProjectRun("own", "auto", 0, params, paths))
    metrics = json.loads(files.metrics.read_text())
    assert [metrics[f"recipe_{place}"] for place in range(len(record.recipes))] == [
        dict(recipe) for recipe in record.recipes
    ]
    (table,) = auto_finetune_tables(DatasetResults("own", {}, {"auto": {0: read_run(files)}}))
    assert [row.cells[0].rank for row in table.rows].count(1) == 1
    assert [row.cells[0].text for row in table.rows] == [f"{recipe['blocks']:.0f}" for recipe in record.recipes]


def test_without_prompts_blocks_are_tried_beside_the_closed_form_alone(params, folder, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    paths = ArtifactPaths(folder / "artifacts")
    train_stage(ProjectRun("own", "visual", 0, params, paths))
    frozen, *tried = read_record(paths.run("own", "visual", 0).checkpoint).recipes
    logs = {path.parent.name for path in Path("tensorboard/own/visual/0").glob("*/events.*")}
    assert logs >= {"0-blocks", f"1-block-rate-0.0003-{recipes.EPOCHS[0]}-epochs"}
    assert frozen["blocks"] == 0 and {recipe["blocks"] for recipe in tried} >= {1}
    least = frozen["auc"] - frozen["error"]  # two epochs with so few images may lower it
    assert all(recipe["auc"] >= least for recipe in tried)


def test_interrupted_training_ends_in_the_same_bytes(params, folder, monkeypatch):
    whole = run_of(params, folder, "whole").run("own", "auto", 0).checkpoint.read_bytes()
    for number in (3, 5):
        with monkeypatch.context() as patch:
            interrupt(patch, number)
            with pytest.raises(KeyboardInterrupt):
                run_of(params, folder, "broken")
        assert not ArtifactPaths(folder / "broken").run("own", "auto", 0).checkpoint.exists()
    assert run_of(params, folder, "broken").run("own", "auto", 0).checkpoint.read_bytes() == whole


def test_in_little_time_one_block_is_tuned_all_the_same(params, folder, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "block_cost", lambda *_, **__: lineup.BlockCost(1e6, 1e6))
    entry = params.methods["auto"].model_copy(update={"finetune": {"blocks": "auto", "minutes": 0.05}})
    hurried = params.model_copy(update={"methods": {**params.methods, "auto": entry}})
    record = read_record(run_of(hurried, folder, "hurried").run("own", "auto", 0).checkpoint)
    assert [recipe["blocks"] for recipe in record.recipes] == [0, 1]
    assert "fine-tuning of 1 block, 2 epochs each, then the best for longer; in 3 seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        ("auto", {}, AutoFinetune()),
        ({}, {"finetune": "auto"}, AutoFinetune()),
        ({"blocks": 4, "adapter": "full"}, {"finetune": "auto"}, AutoFinetune()),
        ({"blocks": "auto", "minutes": 5.0}, {}, AutoFinetune(minutes=5.0)),
        ({"blocks": "auto", "minutes": 5.0}, {"finetune": {"blocks": 2}}, FinetuneOptions(blocks=2)),
        ({"blocks": 4, "adapter": "full"}, {"finetune": {"blocks": 2}}, FinetuneOptions(blocks=2, adapter="full")),
        ({}, {}, None),
    ],
)
def test_auto_is_written_short_or_in_full(tmp_path, base, changes, expected):
    with edited_params(SHIPPED, tmp_path / "params.yaml") as record:
        record["methods"]["auto"] = {"extends": "dual", "finetune": base, "per_dataset": {"shapes": changes}}
    assert load_params(tmp_path / "params.yaml").finetune("auto", "shapes") == expected


def test_other_words_and_times_are_refused(tmp_path):
    for value, message in (("always", "expected a table"), ({"blocks": "auto", "minutes": 0.0}, "minutes is 0.0")):
        with edited_params(SHIPPED, tmp_path / "params.yaml") as record:
            record["methods"]["auto"] = {"extends": "dual", "finetune": value}
        with pytest.raises(UsageError, match=message):
            load_params(tmp_path / "params.yaml").finetune("auto", "shapes")
