"""The library trains and measures what the pipeline does, on data of every form."""

import base64
import json
import shutil
import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import duplex
from duplex.artifacts import ArtifactPaths
from duplex.cli import app
from duplex.data.contents import split_at_random
from duplex.errors import UsageError
from duplex.features.file import read_features
from duplex.labels import WORLDS
from duplex.methods.kg_sp import KgSp
from duplex.options import SplitOptions
from duplex.system.files import sha256
from tests.projects import inside, make_project

METHODS = ("cso", "duplex")
SETTINGS: dict[str, Any] = {"learning_rate": 0.001, "batch_size": 64, "epochs": 2, "threads": 1}  # of the project
HEADLINE = ("seen", "unseen", "hm", "auc", "auc_low", "auc_high", "state_accuracy", "bias")


@dataclass(frozen=True)
class Project:
    folder: Path
    empty: Path

    @property
    def paths(self) -> ArtifactPaths:
        return ArtifactPaths(self.folder / "artifacts")

    def metrics(self, method: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.paths.run("own", method, 0).metrics.read_text())
        return record

    def data(self, form: str) -> duplex.Dataset:
        if form == "params.yaml":
            with inside(self.folder):
                return duplex.load_dataset("own")
        with inside(self.empty):
            pictures = self.folder / "pictures"
            if form == "table":
                table = self.folder / "pictures.csv"
                return duplex.load_dataset(table, images=pictures, encoder="tiny", cache=self.empty / "cache")
            features = read_features(self.paths.features("own")).cls
            return duplex.Dataset.from_arrays(features, pd.read_csv(self.folder / "pictures.csv"), encoder="tiny")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder, empty = (tmp_path_factory.mktemp(name) for name in ("project", "empty"))
    make_project(folder, seeds=(0,), methods=METHODS)
    return Project(folder, empty)


def arrays(**changes: Any) -> dict[str, Any]:
    """Return arguments of `from_arrays` for 3 states x 3 objects, with pairs unseen in training; `changes` to them."""
    pairs = list(product(("red", "blue", "green"), ("star", "heart", "ring")))
    rows = [(*pair, "train") for pair in pairs[:7] for _ in range(4)]
    rows += [(*pair, "val") for pair in (pairs[0], pairs[7])] + [(*pair, "test") for pair in (*pairs[1:3], pairs[8])]
    table = {
        name: list(column) for name, column in zip(("state", "object", "split"), zip(*rows, strict=True), strict=True)
    }
    features = np.random.default_rng(0).normal(size=(len(rows), 8)).astype(np.float32)
    return {"features": features, "table": table, **changes}


def small(**changes: Any) -> duplex.Dataset:
    return duplex.Dataset.from_arrays(**arrays(**changes))


def test_word_vectors_are_recorded_and_a_missing_file_of_them_is_refused(tmp_path: Path) -> None:
    glove = tmp_path / "words.txt"
    glove.write_text("red 1 2\nblue 1 3\ngreen 2 2\nstar 0 1\nheart 1 0\nring 2 1\n")
    run = duplex.fit(small(word_vectors=glove), "kg_sp", epochs=1)
    assert run.record.encoder["words"] == sha256(glove)
    with pytest.raises(UsageError, match=r"word_vectors: none\.txt does not exist; expected a text file"):
        small(word_vectors="none.txt")


def test_ten_lines_go_from_a_data_set_to_an_answer(project):
    with inside(project.folder):
        data = duplex.load_dataset("own")
        run = duplex.fit(data, "cso", seed=0, epochs=3)
        result = duplex.evaluate(run, data, world="closed", split="test")
        assert result.interval[0] <= result.auc <= result.interval[1] <= 100
        assert 0 < result.hm <= max(result.seen, result.unseen)
        assert result.table().loc["AUC"].tolist() == [result.auc, *result.interval]
        assert result.curve["seen"].iloc[0] == result.seen
        assert result.curve["hm"].max() == pytest.approx(result.hm)
        gain = duplex.compare(duplex.evaluate(duplex.fit(data, "clip"), data), result)
        difference, low, high, _ = gain.loc["AUC"].tolist()
        assert low <= difference <= high
        run.save("model")
        image = Path("pictures", data.manifest["image"][0])
        (answer,) = duplex.Recognizer.load("model")(image)
    assert (answer.best.state, answer.best.object) in set(
        zip(data.manifest["state"], data.manifest["object"], strict=True)
    )
    assert len(run.history) == 4
    assert run.record.epoch <= 3


@pytest.mark.parametrize("world", WORLDS)
def test_written_scores_have_the_metrics_of_the_run(project, tmp_path, world):
    data = project.data("arrays")
    run = duplex.fit(data, "closed_form")
    result = duplex.evaluate(run, data, world=world)
    file = run.write_scores(data, tmp_path / "scores.npz", world=world)
    done = CliRunner().invoke(app, ["score", str(file), "--json", "--rounds", "0"])
    found = json.loads(done.stdout)
    for name in ("seen", "unseen", "hm", "auc", "bias"):
        assert found[name] == pytest.approx(getattr(result, name, result.metrics[name]), rel=1e-9), name
    assert found["state_accuracy"] == pytest.approx(result.metrics["state_accuracy"])
    with pytest.raises(UsageError, match=r"scores\.npz exists"):
        run.write_scores(data, file, world=world)
    with pytest.raises(
        UsageError, match=r"scores\.csv: scores are written as \.npz; give a file such as .*scores\.npz"
    ):
        run.write_scores(data, tmp_path / "scores.csv")


def test_written_scores_name_the_feasible_pairs(project, tmp_path):
    data = project.data("arrays")
    run = duplex.fit(data, "closed_form", world="open")
    chosen = replace(run.record.calibration["open"], threshold=0.5)
    run = replace(run, record=replace(run.record, calibration={"open": chosen}))
    with np.load(run.write_scores(data, tmp_path / "scores.npz", world="open")) as file:
        feasible = int(file["feasible_mask"].sum())
        assert 0 < feasible < len(file["seen"]) and file["feasible_mask"][file["seen"]].all()
    assert feasible == duplex.evaluate(run, data, world="open").metrics["feasible"]


@pytest.mark.parametrize("form", ["params.yaml", "table", "arrays"])
@pytest.mark.parametrize("method", METHODS)
def test_every_form_gives_the_metrics_of_the_pipeline(project, method, form):
    """To the last digit from the pipeline's features; a table's images are encoded again, in batches of other sizes."""
    data, expected = project.data(form), project.metrics(method)

    def near(value: Any) -> Any:
        return pytest.approx(value, rel=0.01) if form == "table" else value

    with inside(project.empty):
        run = duplex.fit(data, method, **({} if form == "params.yaml" else SETTINGS))
        for world in set(WORLDS) & set(run.record.calibration or {}):
            found = duplex.evaluate(run, data, world=world).metrics
            assert {key: found[key] for key in HEADLINE} == near({key: expected[world][key] for key in HEADLINE})
        assert run.val_auc == near(expected["val_auc"])
        if form == "params.yaml":
            checkpoint = run.save(project.empty / method) / "checkpoint.safetensors"
            assert checkpoint.read_bytes() == project.paths.run("own", method, 0).checkpoint.read_bytes()
            assert found == expected[world]


def test_a_folder_is_split_like_data_add_and_encoded_once(project, tmp_path):
    table = pd.read_csv(project.folder / "pictures.csv")
    for number, (image, state, thing) in enumerate(table[["image", "state", "object"]].itertuples(index=False)):
        (tmp_path / "photos" / state / thing).mkdir(parents=True, exist_ok=True)
        shutil.copy(project.folder / "pictures" / image, tmp_path / "photos" / state / thing / f"{number}.png")
    first, again = (duplex.load_dataset(tmp_path / "photos", encoder="tiny", cache=tmp_path / "c") for _ in range(2))
    split = split_at_random(first.manifest.drop(columns="split"), SplitOptions()).split
    assert first.manifest["split"].tolist() == split.tolist()
    (cache,) = (tmp_path / "c").glob("*/*.h5")
    time = cache.stat().st_mtime_ns
    shutil.move(tmp_path / "photos", tmp_path / "moved")
    duplex.load_dataset(tmp_path / "moved", encoder="tiny", cache=tmp_path / "c")
    assert cache.stat().st_mtime_ns == time, "equal images in another folder are not encoded again"
    first_image, second_image = (tmp_path / "moved" / image for image in again.manifest["image"][:2])
    shutil.copy(second_image, first_image)
    duplex.load_dataset(tmp_path / "moved", encoder="tiny", cache=tmp_path / "c")
    assert cache.stat().st_mtime_ns == time, "nor is a file with the content of another"


class Own(KgSp):
    """A user's method."""


def test_a_class_is_trained_and_found_again(tmp_path):
    data = small()
    run = duplex.fit(data, Own, epochs=1)
    assert run.record.kind == f"{__name__}:Own"
    assert duplex.fit(data, KgSp, epochs=1).record.kind == "kg_sp"
    result = duplex.evaluate(run, data)
    assert result.auc == duplex.evaluate(duplex.fit(data, "kg_sp", epochs=1), data).auc


def test_several_seeds_are_compared_as_lists():
    data = small()
    first, second = ([duplex.evaluate(duplex.fit(data, "kg_sp", seed=seed, epochs=epochs), data) for seed in (0, 1)]
                     for epochs in (1, 5))  # fmt: skip
    mean = np.mean([after.auc - before.auc for before, after in zip(first, second, strict=True)])
    assert duplex.compare(first, second).loc["AUC", "difference"] == pytest.approx(mean)
    table = duplex.compare(first, second, [first[1], first[0]])
    assert table["other"].tolist() == 8 * ["kg_sp"] and table.loc["AUC"].shape == (2, 5)
    assert table[:4].drop(columns="other").equals(duplex.compare(first, second))
    names = duplex.compare(first[0], second[1], second[0])["other"]
    assert names.loc["AUC"].tolist() == ["kg_sp seed 1", "kg_sp seed 0"]
    for same in ((first[0], first[0]), (first[0], second[0], first[0]), (first, [second[0], first[1]])):
        with pytest.raises(UsageError, match="compared with itself"):
            duplex.compare(*same)


def test_a_notebook_shows_table_and_curve():
    result = duplex.evaluate(duplex.fit(small(), "kg_sp", epochs=1), small())
    page = result._repr_html_()
    svg = base64.b64decode(page.partition("base64,")[2].partition('"')[0])
    assert ET.fromstring(svg).tag.endswith("svg")
    assert f"{result.auc:.2f}" in page


def with_value(column: str, row: int, value: object) -> dict[str, Any]:
    table = arrays()["table"]
    table[column] = [value if number == row else old for number, old in enumerate(table[column])]
    return table


def only_seen(split: str) -> dict[str, Any]:
    table = arrays()["table"]
    for row in range(len(table["split"])):
        if table["split"][row] == split:
            table["state"][row], table["object"][row] = "red", "star"
    return table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": np.ones((5, 8))}, "`features` has 5 rows, but the table has 33"),
        ({"features": np.zeros(33)}, "expected a float array"),
        (
            {"features": np.where(np.arange(264).reshape(33, 8) == 20, np.nan, 1.0)},
            "1 of 33 rows with only zeros, NaN, .* row 2",
        ),
        ({"table": {"state": ["red"] * 33}}, "no column 'object'"),
        ({"table": with_value("split", 4, "dev")}, "row 4: the split 'dev' is not one of"),
        ({"table": with_value("state", 2, None)}, "row 2: the column 'state' holds (None|nan)"),
        ({"table": with_value("state", 2, "...")}, "contains no word"),
        ({"encoder": "tiny"}, "the width 8, but those of tiny have the width 128"),
        ({"encoder": "tiny", "table": with_value("state", 0, "zyzzyva")}, "does not know the label words zyzzyva"),
    ],
)
def test_wrong_arrays_are_one_line(changes, message):
    with pytest.raises(UsageError, match=message) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("twin", ["Red", "red ", "re\u200bd"])
def test_labels_that_read_alike_are_named(twin, capsys):
    small(table=with_value("state", 2, twin))
    assert "2 states have the same text in prompts" in capsys.readouterr().err
    small()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("compcoss", {}, "unknown method 'compcoss'"),
        ("kg_sp", {"epoch": 3}, "unknown setting of training or of kg_sp 'epoch'"),
        ("kg_sp", {"epochs": "3"}, "epochs: .*'3'"),
        ("cso", {}, "needs the text tower"),
        ("compcos", {}, "compcos. needs word vectors"),
        ("troika", {}, "troika. needs patch tokens"),
        ("kg_sp", {"select": "aux"}, "select: .*'auc', 'hm'"),
        ("kg_sp", {"log": "wand"}, "unknown training.log 'wand'; known: dvclive, tensorboard, wandb, mlflow, none"),
        ("kg_sp", {"precision": "bf16"}, "precision is for the text tower, which kg_sp does not use"),
    ],
)
def test_wrong_settings_are_one_line(method, settings, message):
    data = small()
    with pytest.raises(UsageError, match=message) as caught:
        duplex.fit(data, method, **settings)
    assert "\n" not in str(caught.value)


def test_undefined_and_unpaired_results_are_one_line(tmp_path):
    with pytest.raises(UsageError, match="has no val images of unseen pairs, so AUC is undefined"):
        duplex.fit(small(table=only_seen("val")), "kg_sp", epochs=1)
    seen_only = small(table=only_seen("test"))
    with pytest.raises(UsageError, match="has no test images of unseen pairs"):
        duplex.evaluate(duplex.fit(seen_only, "kg_sp", epochs=1), seen_only)
    data, narrow = small(), small(features=arrays()["features"][:, :4])
    run = duplex.fit(data, "kg_sp", world="closed", epochs=1)
    result = duplex.evaluate(run, data)
    with pytest.raises(UsageError, match="arrays of width 8', but 'arrays of width 4"):
        duplex.evaluate(run, narrow)
    with pytest.raises(UsageError, match="other states, objects or pairs"):
        duplex.evaluate(run, seen_only)
    with pytest.raises(UsageError, match="not trained for the open world"):
        duplex.evaluate(run, data, world="open")
    with pytest.raises(UsageError, match="unknown split 'train'"):
        duplex.evaluate(run, data, split="train")
    with pytest.raises(UsageError, match="differ in split: test and val; evaluate both"):
        duplex.compare(result, duplex.evaluate(run, data, split="val"))
    renamed = small(table={**arrays()["table"], "image": [f"{row}.jpg" for row in range(33)]})
    with pytest.raises(UsageError, match="different images"):
        duplex.compare(result, duplex.evaluate(run, renamed))


def test_a_data_set_that_is_not_there_is_one_line(project, tmp_path):
    with inside(tmp_path), pytest.raises(UsageError, match="no params"):
        duplex.load_dataset("own")
    with inside(tmp_path), pytest.raises(UsageError, match="own does not exist; give a folder of images or a table"):
        duplex.load_dataset("own", encoder="tiny")
    with inside(project.folder), pytest.raises(UsageError, match="unknown data set 'owl'"):
        duplex.load_dataset("owl")
    with inside(project.folder), pytest.raises(UsageError, match="'pictures' is a path, not a data set"):
        duplex.load_dataset("pictures")
    with inside(project.folder), pytest.raises(UsageError, match="`weights=` and `cache=` can be used only with"):
        duplex.load_dataset("own", weights="openai", cache="cache")
