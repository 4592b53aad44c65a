"""`data add` and `data remove`: what would fail in training is said at the door, and params.yaml stays sound."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from duplex.cli.lock_file import STAGE, forget
from duplex.config.params import load_params
from tests.data.makers import OBJECTS, STATES, make_folder, make_table, save
from tests.hostile.conftest import Command
from tests.subprocesses import ROOT


def table(root: Path, rows: list[tuple[str, str, str, str]]) -> Path:
    root.mkdir(exist_ok=True)
    for picture, *_ in rows:
        save(picture, root / picture)
    (root / "t.csv").write_text("image,state,object,split\n" + "".join(",".join(row) + "\n" for row in rows))
    return root / "t.csv"


def listed(*splits: str, pairs: int = 4) -> list[tuple[str, str, str, str]]:
    """Every pair in each of the splits."""
    return [
        (f"{s}_{o}/{n:04d}.png", s, o, split)
        for s in STATES[:2]
        for o in OBJECTS[: pairs // 2]
        for n, split in enumerate(splits)
    ]


def test_no_unseen_pair_in_val_is_refused(project: Path, command: Command) -> None:
    before = Path("params.yaml").read_bytes()
    answer = command(
        "data", "add", "mine", table(project / "mine", listed("train", "val", "test")), "--encoder", "tiny"
    )
    assert answer.code == 1 and "mine is not added" in answer.err and "val has no image of an unseen pair" in answer.err
    assert Path("params.yaml").read_bytes() == before


def test_one_image_a_pair_is_refused(project: Path, command: Command) -> None:
    for state in STATES:
        for kind in OBJECTS:
            save(f"{state}_{kind}/0000.png", project / "mine" / state / kind / "0.png")
    answer = command("data", "add", "mine", "mine", "--encoder", "tiny")
    assert answer.code == 1 and "val has no image of a seen pair" in answer.err
    assert "mine" not in load_params().datasets


def test_missing_pictures_are_a_warning_with_exit_code_1(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    assert command("data", "add", "mine", "mine", "--encoder", "tiny").code == 0
    path = make_table(project / "other", ".csv", split=True)
    next((project / "other").rglob("*.png")).unlink()
    answer = command("data", "add", "other", path, "--encoder", "tiny")
    assert answer.code == 1 and "1 images are missing" in answer.out and "params.yaml has other" in answer.err


def test_words_that_the_packaged_encoder_lacks_are_refused_first(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    (project / "mine" / "red").rename(project / "mine" / "rusty")
    answer = command("data", "add", "mine", "mine", "--encoder", "tiny")
    assert answer.code == 1 and "unknown to tiny" in answer.err and "rusty" in answer.err
    assert "choose another --encoder" in answer.err and "mine" not in load_params().datasets


@pytest.mark.parametrize("there", [True, False])
def test_weights_that_are_not_here_are_announced(project: Path, command: Command, monkeypatch, there: bool) -> None:
    make_folder(project / "mine", "nested")
    monkeypatch.setattr("duplex.encoders.hub.answers", lambda address: there)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(project / "hub"))
    monkeypatch.setattr("duplex.encoders.hub.DOWNLOADS", project / "clip")
    answer = command("data", "add", "mine", "mine")
    assert answer.code == (0 if there else 1)
    assert "ViT-L-14-quickgelu + openai, about 1.7 GB, from https://" in answer.out
    assert ("local-dir:FOLDER" in answer.out) is not there
    assert load_params().datasets["mine"].encoder.weights == "openai"


def test_an_encoder_that_does_not_exist(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    assert command("data", "add", "mine", "mine", "--encoder", "ViT-Z").refused("--encoder ViT-Z", "unknown encoder")
    assert command("data", "add", "mine", "mine", "--weights", "nope").refused("nope", "tags")
    assert command("data", "add", "mine", "mine", "--encoder", "local-dir:gone").refused("gone")


def test_a_second_add_changes_what_it_is_asked_to_and_keeps_the_rest(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    assert command("data", "add", "mine", "mine", "--encoder", "tiny", "--split-seed", "3").code == 0
    answer = command("data", "add", "mine", "mine", "--val-unseen", "0.2")
    assert answer.code == 0 and "its source changed, the rest stays" in answer.err
    first = load_params().datasets["mine"]
    assert (first.source.split.seed, first.source.split.val_unseen, first.encoder.name) == (3, 0.2, "tiny")
    answer = command("data", "add", "mine", "mine", "--encoder", "ViT-B-32", "--weights", "laion2b_s34b_b79k")
    assert "its source and encoder changed" in answer.err
    second = load_params().datasets["mine"]
    assert (second.encoder.name, second.encoder.weights) == ("ViT-B-32", "laion2b_s34b_b79k")
    assert second.source == first.source and second.training == first.training


@pytest.mark.parametrize(
    "name", ["my.set", "123", "true", "null", "1e5", "0x1f", "a--b", "-a", "é", "x" * 101, "report"]
)
def test_names_that_dvc_yaml_or_the_disk_would_refuse(project: Path, command: Command, name: str) -> None:
    make_folder(project / "mine", "nested")
    before = Path("params.yaml").read_bytes()
    assert command("data", "add", "--encoder", "tiny", "--", name, "mine").refused("no name for a data set")
    assert Path("params.yaml").read_bytes() == before


def test_what_is_passed_over_is_counted(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    place = project / "mine" / "red" / "star"
    for name in ("a.heic", "b.avif", "c.AVIF"):
        (place / name).write_bytes(b"x")
    (place / "folder.jpg").mkdir()
    (place / "gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(place / "pipe.png")
    found = json.loads(command("data", "check", "mine", "--root", "mine", "--json").out)["findings"]
    passed = {
        f["what"].removeprefix("files are passed over: "): f["count"] for f in found if "passed over" in f["what"]
    }
    assert passed == {
        ".avif is not read": 2,
        ".heic is not read": 1,
        "folders with the name of a picture": 1,
        "links that lead nowhere": 1,
        "devices and pipes": 1,
    }
    assert command("data", "add", "mine", "mine", "--encoder", "tiny").code == 0


def test_a_folder_of_other_pictures_says_what_it_passed_over(project: Path, command: Command) -> None:
    (project / "mine/red/star").mkdir(parents=True)
    (project / "mine/red/star/a.heic").write_bytes(b"x")
    assert command("data", "add", "mine", "mine").refused("holds no pictures", "1 passed over (.heic is not read)")


def test_a_leak_names_both_files_and_their_splits_and_json_lists_all(project: Path, command: Command) -> None:
    rows = listed("train", "train", "val", "test", pairs=8)
    path = table(project / "mine", rows)
    for picture, *_, split in rows:
        if split == "test":
            twin = project / "mine" / picture.replace("0003", "0000")
            (project / "mine" / picture).write_bytes(twin.read_bytes())
    found = json.loads(command("data", "check", "mine", "--root", path, "--json").out)["findings"]
    leak = next(f for f in found if "contents are in two splits" in f["what"])
    assert leak["count"] == len(leak["examples"]) == 8
    assert leak["examples"][0] == "red_circle/0000.png (train) = red_circle/0003.png (test)"
    assert ", ..." in command("data", "check", "mine", "--root", path).out


@pytest.mark.slow
def test_remove_is_the_opposite_of_add(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    before = Path("params.yaml").read_text()
    assert command("data", "add", "mine", "mine", "--encoder", "tiny").code == 0
    assert command("data", "remove", "mine").code == 0
    assert Path("params.yaml").read_text() == before
    assert len(list((project / "mine").rglob("*.png"))) > 0


def test_remove_takes_the_comment_above_and_nothing_else(project: Path, command: Command) -> None:
    text = Path("params.yaml").read_text()
    assert command("data", "remove", "ut-zappos").code == 0
    left = Path("params.yaml").read_text()
    gone = [line for line in text.splitlines() if line not in left.splitlines()]
    assert (
        len(gone) == 4 and "ut-zappos" in gone[1] and gone[0].startswith("  # Expect (paper") and "\n\n\n" not in left
    )
    assert set(load_params().datasets) == {"shapes", "mit-states", "cgqa"}


@pytest.mark.slow
def test_results_stay_until_they_are_named(project: Path, command: Command) -> None:
    places = [project / "artifacts" / name for name in ("cgqa", "views/cgqa")]
    for place in places:
        place.mkdir(parents=True)
        (place / "features.h5").write_bytes(b"rows")
    text = (project / "params.yaml").read_text()
    said = command("data", "remove", "cgqa").err
    assert "kept: artifacts/cgqa, artifacts/views/cgqa (--results deletes them)" in " ".join(said.split())
    (project / "params.yaml").write_text(text)
    assert command("data", "remove", "cgqa", "--results").code == 0
    assert not any(place.exists() for place in places)


def test_the_last_one_of_a_run_is_not_removed(project: Path, command: Command) -> None:
    before = Path("params.yaml").read_bytes()
    assert command("data", "remove", "shapes").refused("names only shapes")
    assert command("data", "remove", "nope").refused("unknown data set 'nope'")
    assert Path("params.yaml").read_bytes() == before


FORMS = ["[shapes, cgqa]", "[cgqa, shapes]", "\n  - shapes\n  - cgqa # last", "\n  - cgqa\n  - shapes"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_lists_of_names_in_any_form_lose_one(project: Path, command: Command, form: str) -> None:
    text = Path("params.yaml").read_text().replace("run: # `dvc repro` runs every data set x method x seed\n", "run:\n")
    Path("params.yaml").write_text(text.replace("  datasets: [shapes]\n  methods", f"  datasets: {form}\n  methods", 1))
    assert load_params().run.datasets in (("shapes", "cgqa"), ("cgqa", "shapes"))
    assert command("data", "remove", "cgqa").code == 0
    assert load_params().run.datasets == ("shapes",) and "cgqa" not in load_params().datasets


OVERLAYS = [
    "{of: duplex, on: {cgqa: {momentum: 0.5}}}",
    "{on: {cgqa: {momentum: 0.5}, shapes: {momentum: 0.7}}, of: duplex} # a word",
    "{of: duplex, on: {shapes: {momentum: 0.7}, cgqa: {momentum: 0.5}}}",
    "\n    of: duplex\n    on:\n      cgqa: {momentum: 0.5} # less\n      shapes: {momentum: 0.7} # more",
    "\n    on:\n      shapes:\n        momentum: 0.7\n      cgqa:\n        momentum: 0.5\n    of: duplex",
    "\n    of: duplex\n    on:\n      cgqa:\n        momentum: 0.5",
]


@pytest.mark.slow
@pytest.mark.parametrize("row", OVERLAYS)
def test_rows_forget_a_data_set_that_is_removed(project: Path, command: Command, row: str) -> None:
    text = Path("params.yaml").read_text().replace("\nmethods:\n", f"\nmethods:\n  extra: {row}\n")
    Path("params.yaml").write_text(text)
    before = load_params().methods
    assert before["extra"].on["cgqa"] == {"momentum": 0.5}
    assert command("data", "remove", "cgqa").code == 0
    params = load_params()
    kept = {name: said for name, said in before["extra"].on.items() if name != "cgqa"}
    assert params.methods == {**before, "extra": dataclasses.replace(before["extra"], on=kept)}
    gone = [line for line in text.splitlines() if line not in Path("params.yaml").read_text().splitlines()]
    assert len(gone) <= 7  # the entry with its comment, and lines of the row


def test_the_shipped_data_set_can_make_room(project: Path, command: Command) -> None:
    """Rows that say something of `shapes` do not hold it back."""
    text = Path("params.yaml").read_text().replace("datasets: [shapes]", "datasets: [cgqa]")
    Path("params.yaml").write_text(text)
    assert "shapes" in load_params().methods["duplex_deep"].on
    assert command("data", "remove", "shapes").code == 0
    assert load_params().methods["duplex_deep"].on == {} and "shapes" not in load_params().datasets


def test_remove_clears_the_lock_the_inventory_and_the_maps(project: Path, command: Command) -> None:
    """A real lock with the stages of a second data set, whose name begins like another's."""
    lock = (ROOT / "dvc.lock").read_text()
    block = "".join(found[0] for found in STAGE.finditer(lock) if "@shapes" in found[0].split("\n")[0])
    doubled = lock + "".join(block.replace("shapes", name) for name in ("shapes-duplex", "mine"))
    (project / "dvc.lock").write_text(doubled)
    stages = block.count("    cmd: ")
    for place in ("inventory/mine/files.json", "maps/mine.csv", "mine/features.h5", "inventory/shapes/files.json"):
        (project / "artifacts" / place).parent.mkdir(parents=True, exist_ok=True)
        (project / "artifacts" / place).touch()
    make_folder(project / "pictures", "nested")
    assert command("data", "add", "mine", "pictures", "--encoder", "tiny").code == 0
    answer = command("data", "remove", "mine")
    assert answer.code == 0 and "kept: artifacts/mine (--results" in answer.err
    left = (project / "dvc.lock").read_text()
    assert "mine" not in left and left.count("prepare@shapes-duplex:") == 1 and left.count("prepare@shapes:") == 1
    assert not (project / "artifacts/inventory/mine").exists() and not (project / "artifacts/maps/mine.csv").exists()
    assert (project / "artifacts/mine/features.h5").exists() and (project / "artifacts/inventory/shapes").exists()
    assert stages and forget("shapes-duplex", project / "dvc.lock") > 0
    assert forget("shapes", project / "dvc.lock") > 0 and "@" not in (project / "dvc.lock").read_text()


def test_the_lock_that_is_left_is_one_that_dvc_reads(project: Path) -> None:
    for name in ("dvc.yaml", "dvc.lock", "params.yaml"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("duplex", "pipeline"):
        (project / folder).symlink_to(ROOT / folder)
    assert forget("shapes", project / "dvc.lock") > 0
    subprocess.run(["git", "init", "-q", "."], check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "prepare@shapes"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_splits_take_no_other_data_sets_place(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    for name in ("mine", "mine-split2"):
        assert command("data", "add", name, "mine", "--encoder", "tiny").code == 0
    before = Path("params.yaml").read_bytes()
    assert command("data", "split", "mine", "--splits", "2").refused("mine-split2 is there and no such split of mine")
    assert command("data", "split", "mine", "--splits", "100000").code == 2  # hours of drawing
    assert Path("params.yaml").read_bytes() == before
    for _ in range(2):  # its own splits are written again
        assert command("data", "split", "mine", "--splits", "1").code == 0
