"""Nothing of the user's is ever written over."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from safetensors.torch import save_file

from duplex.errors import UsageError
from duplex.recognition.answers import Unreadable
from duplex.recognition.export import whole
from tests.encoders.small import write_folder
from tests.hostile.conftest import CACHE, Command


def text(path: Path) -> None:
    path.write_text("precious")


def other_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["precious"] = np.arange(3)


def empty(path: Path) -> None:
    path.touch()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_text(path: Path) -> None:
    path.with_name("target").write_text("precious")
    path.symlink_to("target")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


THINGS: list[Callable[[Path], None]] = [text, other_hdf5, empty, pipe, link_to_text, dangling]


def state(path: Path) -> object:
    info = os.lstat(path)
    return info.st_mode, info.st_ino, path.read_bytes() if path.is_file() else None


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_extraction_into_what_is_no_cache(pics: Path, command: Command, thing, fresh: list[str]) -> None:
    thing(pics / "mine")
    before = state(pics / "mine")
    assert command("extract", "-d", "pics", "--out", "mine", *fresh).refused("mine")
    assert state(pics / "mine") == before


@pytest.mark.parametrize("thing", THINGS)
def test_import_and_join_into_what_is_no_cache(pics: Path, command: Command, thing) -> None:
    np.save("f.npy", np.ones((12, 4), np.float32))
    for k in range(2):
        assert command("extract", "-d", "pics", "--shard", f"{k}/2", "--out", "mine").code == 0
    thing(pics / "mine")
    before = state(pics / "mine")
    assert command("cache", "import", "f.npy", "-d", "pics", "--out", "mine").refused("mine")
    assert command("cache", "join", "mine").refused("mine")
    assert command("cache", "join", "mine", "--copy").refused("mine")
    assert state(pics / "mine") == before


@pytest.mark.parametrize("place", ["artifacts/pics/manifest.csv", "params.yaml", "pictures/00000.jpg", "/dev/null"])
def test_places_of_other_things(pics: Path, command: Command, place: str) -> None:
    before = state(Path(place))
    np.save("f.npy", np.ones((12, 4), np.float32))
    assert command("extract", "-d", "pics", "--out", place, "--fresh").refused(place)
    assert command("cache", "import", "f.npy", "-d", "pics", "--out", place).refused(place)
    assert state(Path(place)) == before


def test_what_only_has_the_name_of_an_unfinished_cache(pics: Path, command: Command) -> None:
    (pics / "mine.partial").write_text("precious")
    assert command("extract", "-d", "pics", "--out", "mine").refused("mine.partial")
    assert (pics / "mine.partial").read_text() == "precious"


def test_a_cache_of_ours_is_replaced_by_what_is_asked_for(pics: Path, command: Command) -> None:
    np.save("f.npy", np.ones((12, 4), np.float32))
    assert command("cache", "import", "f.npy", "-d", "pics").code == 0
    assert command("extract", "-d", "pics").code == 0
    whole = (pics / CACHE).read_bytes()
    (pics / CACHE).write_bytes(whole[: len(whole) // 2])  # damaged, and still ours
    assert command("extract", "-d", "pics").code == 0
    assert (pics / CACHE).read_bytes() == whole


def test_conversion_into_a_folder_that_holds_an_encoder(tmp_path: Path, command: Command) -> None:
    import torch

    write_folder(tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    save_file({"a": torch.zeros(2)}, tmp_path / "weights.safetensors")
    words = ["--encoder", "ViT-B-32-quickgelu", "--tag", "openai"]
    answer = command("encoders", "convert", tmp_path / "weights.safetensors", tmp_path / "mine", *words)
    assert answer.refused("is left alone")
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_drawing_over_somebodys_pictures(project: Path, command: Command) -> None:
    """A root that was not drawn and holds a picture with a drawn one's name."""
    mine = project / "data/shapes/red_star/0000.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"precious")
    assert command("prepare", "-d", "shapes").refused("data/shapes", "was not drawn here")
    assert mine.read_bytes() == b"precious"


class Told:
    """Somebody who answers at once, in the place of a model."""

    labels = None

    def panel(self, _world: object) -> None: ...

    def stream(self, files: list[Path], *_: object) -> Iterator[Unreadable]:
        return (Unreadable("not a picture") for _ in files)


@pytest.fixture
def answering(pics: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("duplex.recognition.recognizer.Recognizer.load", lambda *_, **__: Told())
    return pics


@pytest.mark.parametrize("thing", [text, other_hdf5, pipe, link_to_text, dangling])
@pytest.mark.parametrize("form", ["table", "csv", "jsonl"])
def test_answers_into_what_holds_none(answering: Path, command: Command, thing, form: str) -> None:
    thing(answering / "mine")
    before = state(answering / "mine")
    words = ["predict", "pictures/00000.jpg", "--model", "m", "--format", form, "--out"]
    for place in ("mine", "params.yaml", "pictures/00000.jpg", "/dev/null"):
        assert command(*words, place).refused(place, "holds no answers")
    assert state(answering / "mine") == before and stat.S_ISCHR(os.lstat("/dev/null").st_mode)
    assert not list(answering.glob("*.partial"))


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_answers_are_replaced_by_answers(answering: Path, command: Command, form: str) -> None:
    words = ["predict", "--model", "m", "--format", form, "--out", "mine"]
    assert command(*words, "pictures/00000.jpg").code == 3
    assert command(*words, "pictures/00001.jpg").code == 3
    assert "00001.jpg" in Path("mine").read_text() and "00000.jpg" not in Path("mine").read_text()


@pytest.mark.parametrize("config", ['{"format": "duplex-export-1"}', '{"architectures": ["another model"]}', "{"])
def test_a_folder_that_is_more_than_an_export_is_left_alone(tmp_path: Path, config: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(config)
    if "duplex" in config:
        (tmp_path / "mine/notes.txt").write_text("precious")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    with pytest.raises(UsageError, match="mine is there and is no export"):
        whole(tmp_path / "mine", lambda folder: fill(folder, "ours"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_an_export_of_before_and_an_empty_folder_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("one", "two"):
        whole(tmp_path / "mine", lambda folder, text=text: fill(folder, text))
        assert (tmp_path / "mine/README.md").read_text() == text
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    whole(Path("."), lambda folder: fill(folder, "three"))
    assert (tmp_path / "empty/README.md").read_text() == "three"


def fill(folder: Path, text: str) -> None:
    (folder / "config.json").write_text('{"format": "duplex-export-1"}')
    (folder / "README.md").write_text(text)


@pytest.fixture
def ranked(pics: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`duplex data suspects` of which the ranking is known."""
    row = {"rank": 1, "image": "00000.jpg", "state": "red", "object": "star", "better_state": "blue"}
    table = pd.DataFrame([{**row, "better_object": "moon"}])
    monkeypatch.setattr("duplex.stages.suspects.suspects", lambda *_: table)
    return pics / "suspects" / "pics"


def test_a_list_of_suspects_that_was_corrected_stays(ranked: Path, command: Command) -> None:
    for _ in range(2):
        assert command("data", "suspects", "pics").code == 0
    listed = ranked / "suspects.csv"
    listed.write_text(listed.read_text().replace("star", "moon"))
    corrected, page = listed.read_bytes(), (ranked / "suspects.html").read_bytes()
    assert command("data", "suspects", "pics").refused("suspects.csv is there already, edited")
    assert (listed.read_bytes(), (ranked / "suspects.html").read_bytes()) == (corrected, page)
    listed.unlink()
    (ranked / "suspects.html").write_text("precious")
    assert command("data", "suspects", "pics").refused("suspects.html is there already")
    assert (ranked / "suspects.html").read_text() == "precious" and not listed.exists()


@pytest.mark.parametrize("form", ["table", "csv", "jsonl"])
def test_a_picture_whose_name_is_no_text_is_answered_for(answering: Path, command: Command, form: str) -> None:
    odd = os.fsdecode(b"\xff.jpg")
    (answering / "pictures/00000.jpg").rename(odd)
    answer = command("predict", odd, "--model", "m", "--format", form)
    assert answer.code == 3 and "udcff.jpg" in answer.out
