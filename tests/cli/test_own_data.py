"""`duplex data add, split, remove`: what would fail in training is refused, and params.yaml stays valid."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from duplex.config.datasets import write_dataset
from duplex.config.params import EncoderParams, load_params, read_yaml
from duplex.data.sources import load_source
from tests.commands import Command
from tests.data.makers import OBJECTS, STATES, make_folder, make_standard, make_table, save


@pytest.mark.parametrize("layout", ["folder", "table"])
def test_add_writes_an_entry_and_remove_deletes_exactly_that(project: Path, command: Command, layout: str) -> None:
    before = (project / "params.yaml").read_text()
    if layout == "folder":
        make_folder(project / "my pictures", "nested")
        words = [project / "my pictures", "--split-seed", "5"]
    else:
        words = [make_table(project / "my pictures", ".parquet", split=True)]
    result = command("data", "add", "mine", *words, "--encoder", "tiny")
    assert (result.code, result.err) == (0, "wrote datasets/mine.yaml; `dvc repro` trains on this data set\n")
    assert "no problems found" in result.out and "images in" in result.out
    assert ("made a split: " in result.out) == (layout == "folder")
    params = load_params()
    assert params.run.datasets == ("shapes", "mine")
    source = params.datasets["mine"].source
    assert (source.kind, source.root) == (layout, project / "my pictures")
    assert source.split.seed == (5 if layout == "folder" else 0)
    assert command("data", "stats", "mine", "--json").code == 0
    assert command("data", "remove", "mine").code == 0
    assert (project / "params.yaml").read_text() == before and len(list((project / "my pictures").rglob("*.png"))) > 0


def test_add_again_changes_only_what_the_options_name(project: Path, command: Command) -> None:
    make_standard(project / "elsewhere", "spaces")
    before = (project / "params.yaml").read_text()
    result = command("data", "add", "mit-states", "elsewhere", "--no-run")
    assert result.code == 0 and "train images: 24, published 30,338" in result.out
    assert read_yaml(Path("datasets/mit-states.yaml")) == {
        "source": {"kind": "standard", "root": str(project / "elsewhere")}
    }
    assert (project / "params.yaml").read_text() == before
    make_folder(project / "mine", "nested")
    assert command("data", "add", "mine", "mine", "--encoder", "tiny", "--split-seed", "3").code == 0
    assert "; changed: source;" in command("data", "add", "mine", "mine", "--val-unseen", "0.2").err
    write_dataset("mine", {"encoder": {"name": "tiny", "block_inputs": 2}}, run=False)
    first = load_params().datasets["mine"]
    assert (first.source.split.seed, first.source.split.val_unseen, first.encoder.name) == (3, 0.2, "tiny")
    result = command("data", "add", "mine", "mine", "--encoder", "ViT-B-32", "--weights", "laion2b_s34b_b79k")
    assert "; changed: source and encoder;" in result.err
    second = load_params().datasets["mine"]
    assert second.encoder == EncoderParams(name="ViT-B-32", weights="laion2b_s34b_b79k", block_inputs=2)
    assert second.source == first.source and second.training == first.training


def test_data_without_text_are_not_added_for_methods_with_text(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    result = command("data", "add", "mine", "mine", "--encoder", "timm:test_resnet", "--weights", "random:0")
    assert "mine was not added to run.datasets, because run.methods has clip, " in result.err
    assert load_params().run.datasets == ("shapes",)


def test_add_again_keeps_the_image_folder_of_a_table(project: Path, command: Command) -> None:
    make_table(project / "shots", ".csv", split=True).rename("list.csv")
    for words in (["--images", "shots", "--encoder", "tiny"], ["--no-run"]):
        assert command("data", "add", "listed", "list.csv", *words).code == 0
        assert load_params().datasets["listed"].source.root == project / "shots"


def test_a_table_with_a_split_replaces_a_folder_whose_split_was_made(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    table = make_table(project / "own", ".csv", split=True)
    for words in (["mine", "--split-seed", "3", "--encoder", "tiny"], [table]):
        assert command("data", "add", "mine", *words).code == 0
    assert command("prepare", "--dataset", "mine").code == 0
    source = read_yaml(Path("datasets/mine.yaml"))["source"]
    write_dataset("mine", {"source": {**source, "split": {"seed": 3}}}, run=False)
    assert command("prepare", "--dataset", "mine").refused("has a split, so none is made; remove `split:` from")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine/table.csv", "--val-unseen", "0.4"], "has a split"),
        (["mine/table.csv", "--split-seed", "9"], "has a split"),
        (["pictures", "--images", "mine"], "is not a table; leave --images out"),
    ],
)
def test_options_without_effect_are_refused(project: Path, command: Command, words: list[str], message: str) -> None:
    make_table(project / "mine", ".csv", split=True)
    make_folder(project / "pictures", "nested")
    before = (project / "params.yaml").read_bytes()
    assert command("data", "add", "own", *words, "--encoder", "tiny").refused(message)
    assert (project / "params.yaml").read_bytes() == before


def test_splits_without_unseen_or_seen_pairs_are_not_added(project: Path, command: Command) -> None:
    lines = ["image,state,object,split"]
    for state in STATES:
        for kind in OBJECTS:
            save(f"{state}_{kind}/0000.png", project / "single" / state / kind / "0.png")
            for number, split in enumerate(("train", "val", "test")):
                save(f"{state}_{kind}/{number:04d}.png", project / "mine" / f"{state}_{kind}_{number}.png")
                lines.append(f"{state}_{kind}_{number}.png,{state},{kind},{split}")
    (project / "mine" / "t.csv").write_text("\n".join(lines) + "\n")
    before = Path("params.yaml").read_bytes()
    for path, message in (
        ("mine/t.csv", "val has no image of an unseen pair"),
        ("single", "val has no image of a seen"),
    ):
        result = command("data", "add", "mine", path, "--encoder", "tiny")
        assert result.code == 1 and "mine was not added" in result.err and message in result.err
    assert Path("params.yaml").read_bytes() == before


def test_missing_images_are_a_problem_and_the_data_set_is_added(project: Path, command: Command) -> None:
    path = make_table(project / "other", ".csv", split=True)
    next((project / "other").rglob("*.png")).unlink()
    result = command("data", "add", "other", path, "--encoder", "tiny")
    assert (
        result.code == 0 and "problem: 1 images are missing" in result.out and "wrote datasets/other.yaml" in result.err
    )
    assert command("data", "check", "other").code == 1


@pytest.mark.parametrize(
    ("state", "says"),
    [("rusty", ["unknown to the encoder tiny", "rusty"]), (" ".join(["red"] * 12), ["too long for tiny", "red red"])],
)
def test_words_that_the_text_tower_cannot_read_are_refused(project: Path, command: Command, state, says) -> None:
    make_folder(project / "mine", "nested")
    (project / "mine" / "red").rename(project / "mine" / state)
    result = command("data", "add", "mine", "mine", "--encoder", "tiny")
    assert result.code == 1 and all(part in result.err for part in says) and "mine" not in load_params().datasets
    (project / "mine" / state).rename(project / "mine" / "red red red")
    assert command("data", "add", "mine", "mine", "--encoder", "tiny").code == 0


def test_unknown_encoders_and_weights_are_refused(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    assert command("data", "add", "mine", "mine", "--encoder", "ViT-Z").refused("--encoder ViT-Z", "unknown encoder")
    assert command("data", "add", "mine", "mine", "--weights", "nope").refused("nope", "tags")
    assert command("data", "add", "mine", "mine", "--encoder", "local-dir:gone").refused("gone")


@pytest.mark.parametrize("name", ["my.set", "1e5", "a--b", "-a", "é", "x" * 101, "report"])
def test_names_that_dvc_yaml_or_the_disk_would_refuse(project: Path, command: Command, name: str) -> None:
    make_folder(project / "mine", "nested")
    before = Path("params.yaml").read_bytes()
    result = command("data", "add", "--encoder", "tiny", "--", name, "mine")
    assert result.refused("not a valid name for a data set") and Path("params.yaml").read_bytes() == before


def test_split_adds_data_sets_that_load_and_changes_nothing_else(project: Path, command: Command) -> None:
    table = make_table(project / "mine", ".csv", split=True)
    command("data", "add", "mine", table, "--encoder", "tiny", "--no-run")
    write_dataset("mine", {"methods": {"duplex": {"training": {"epochs": 3}}}}, run=False)  # duplex_open extends duplex
    result = command("data", "split", "mine", "--splits", "2")
    assert (result.code, result.out) == (0, "")
    lines = result.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["mine-split1", "mine-split2"]
    assert all("12 seen pairs, 2 unseen in validation and 2 in test" in line for line in lines)
    params = load_params()
    assert params.run.datasets == ("shapes", "mine-split1", "mine-split2")
    base, second = params.dataset("mine"), params.dataset("mine-split2")
    assert second.model_copy(update={"source": base.source}) == base
    assert second.source == replace(base.source, resplit=2)
    assert json.loads(command("data", "stats", "mine-split1", "--json").out)["test"]["unseen"] == 2
    written = (project / "params.yaml").read_text()
    assert command("data", "split", "mine", "--splits", "2").code == 0
    assert (project / "params.yaml").read_text() == written
    assert command("data", "split", "mine-split1").refused("is itself a re-split")
    assert command("data", "add", "mine-split1", table).refused("is a re-split, made by `duplex data split`")


def test_split_holds_out_whole_words(project: Path, command: Command) -> None:
    command("data", "add", "mine", make_table(project / "mine", ".csv", split=True), "--encoder", "tiny", "--no-run")
    words = ["--unseen-states", "0.25", "--unseen-objects", "0.25", "--splits", "1"]
    for _ in range(2):
        result = command("data", "split", "mine", *words)
        assert result.code == 0 and "source changed" not in result.err
        assert "mine-words1: " in result.err and "; 1 states and 1 objects without training images" in result.err
    source = load_params().dataset("mine-words1").source
    assert (source.resplit, source.split.unseen_states, source.split.unseen_objects) == (1, 0.25, 0.25)
    assert command("data", "split", "mine", "--images-per-pair", "1", "--splits", "1").code == 0
    assert json.loads(command("data", "stats", "mine-few1-split1", "--json").out)["train"] == {"seen": 12, "images": 12}
    assert command("data", "split", "mine", "--unseen-states", "0.95").refused("lower unseen_states")
    assert command("data", "split", "mine", "--unseen-objects", "1").refused("unseen_objects")


def test_split_counts_the_pairs_of_the_splits_that_are_prepared(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    assert command("data", "add", "mine", "mine", "--encoder", "tiny").code == 0
    source = read_yaml(Path("datasets/mine.yaml"))["source"]
    source["split"] |= {"unseen_states": 0.25, "images_per_pair": 1}
    write_dataset("mine", {"source": source}, run=False)
    said = command("data", "split", "mine", "--splits", "1").err
    labels = load_source(load_params().datasets["mine-few1-words1"].source).labels
    val, test = (int((~labels.seen[labels.pairs[split]]).sum()) for split in ("val", "test"))
    assert f"{labels.pairs['train'].size} seen pairs, {val} unseen in validation and {test} in test" in said


def test_split_keeps_the_options_of_the_data_set(project: Path, command: Command) -> None:
    text = (project / "params.yaml").read_text()
    text = text.replace("seed: 7}", "seed: 8}").replace("epochs: 6, ", "epochs: 6, schedule: cosine, ", 1)
    text = text.replace("{kind: prompts}", "{kind: prompts, per_dataset: {shapes: {context: fixed}}}", 1)
    (project / "params.yaml").write_text(text)
    for count in ("1", "2"):
        result = command("data", "split", "shapes", "--splits", count, "--no-run")
        assert result.code == 0 and "has shapes but not its re-splits" in result.err
    params = load_params()
    assert params.run.datasets == ("shapes",)
    for number in (1, 2):
        entry = params.dataset(f"shapes-split{number}")
        assert (entry.source.seed, entry.source.resplit, entry.training.schedule) == (8, number, "cosine")


def test_split_again_keeps_edited_options_and_copies_a_changed_source(project: Path, command: Command) -> None:
    assert command("data", "split", "shapes", "--splits", "1", "--no-run").code == 0
    write_dataset("shapes-split1", {"training": {"learning_rate": 0.1, "batch_size": 8, "epochs": 9}}, run=False)
    edited = Path("datasets/shapes-split1.yaml").read_text()
    assert command("data", "split", "shapes", "--splits", "1", "--no-run").code == 0
    assert Path("datasets/shapes-split1.yaml").read_text() == edited
    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("seed: 7}", "seed: 8}", 1))
    result = command("data", "split", "shapes", "--splits", "2", "--no-run")
    assert "shapes-split1: source changed to that of shapes" in result.err and "shapes-split2: source" not in result.err
    params = load_params()
    first, second = (params.dataset(f"shapes-split{number}") for number in (1, 2))
    assert (first.source.seed, first.training.epochs, second.training.epochs) == (8, 9, 6)


def test_split_does_not_replace_another_data_set(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    for name in ("mine", "mine-split2"):
        assert command("data", "add", name, "mine", "--encoder", "tiny").code == 0
    before = Path("params.yaml").read_bytes()
    assert command("data", "split", "mine", "--splits", "2").refused("the name for re-split 2 of mine, belongs")
    assert command("data", "split", "mine", "--splits", "100000").code == 2
    assert Path("params.yaml").read_bytes() == before


def test_remove_deletes_inventory_and_maps_and_keeps_results(project: Path, command: Command) -> None:
    for file in ("inventory/mine/files.json", "maps/mine.csv", "mine/features.h5"):
        (project / "artifacts" / file).parent.mkdir(parents=True, exist_ok=True)
        (project / "artifacts" / file).touch()
    make_folder(project / "mine", "nested")
    command("data", "add", "mine", "mine", "--encoder", "tiny")
    assert "kept: artifacts/mine (--results deletes it)" in command("data", "remove", "mine").err
    assert not any((project / "artifacts" / path).exists() for path in ("inventory/mine", "maps/mine.csv"))
    assert (project / "artifacts/mine/features.h5").exists()
    command("data", "add", "mine", "mine", "--encoder", "tiny")
    assert command("data", "remove", "mine", "--results").code == 0
    assert not (project / "artifacts/mine").exists()
