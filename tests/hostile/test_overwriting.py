"""Files of the user are overwritten with `--force` alone, and caches never replace other files."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from duplex.recognition.answers import UnreadableImage
from tests.encoders.small import write_folder
from tests.hostile.conftest import Command


def link_to_text(path: Path) -> None:
    path.with_name("target").write_text("precious")
    path.symlink_to("target")


THINGS: dict[str, Callable[[Path], object]] = {"text": lambda path: path.write_text("precious"), "link": link_to_text}
WRITING_CACHES = [["extract", "-d", "pics", "--out"], ["extract", "-d", "pics", "--fresh", "--out"], ["cache", "join"]]


def state(path: Path) -> object:
    info = os.lstat(path)
    return info.st_mode, info.st_ino, path.read_bytes() if path.is_file() else None


@pytest.mark.parametrize("thing", THINGS)
def test_caches_do_not_replace_other_files(pics: Path, command: Command, thing: str) -> None:
    for k in range(2):
        assert command("extract", "-d", "pics", "--shard", f"{k}/2", "--out", "mine").code == 0
    THINGS[thing](pics / "mine")
    before = state(pics / "mine")
    for words in WRITING_CACHES:
        assert command(*words, "mine").refused("mine"), words
        assert state(pics / "mine") == before, words


def test_convert_does_not_replace_an_encoder(tmp_path: Path, command: Command) -> None:
    write_folder(tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    save_file({"a": torch.zeros(2)}, tmp_path / "weights.safetensors")
    words = ["--encoder", "ViT-B-32-quickgelu", "--tag", "openai"]
    answer = command("encoders", "convert", tmp_path / "weights.safetensors", tmp_path / "mine", *words)
    assert answer.refused("is not overwritten")
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_drawing_does_not_replace_images(project: Path, command: Command) -> None:
    mine = project / "data/shapes/red_star/0000.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"precious")
    assert command("prepare", "-d", "shapes").refused("data/shapes", "from another source; move that folder")
    assert mine.read_bytes() == b"precious"


class FakeRecognizer:
    labels = None
    added = ()

    def candidates(self, _world: object) -> None: ...

    def estimates_share(self, _images: int) -> bool:
        return False

    def stream(self, files: list[Path], *_: object) -> Iterator[UnreadableImage]:
        return (UnreadableImage("not an image") for _ in files)


@pytest.fixture
def fake_model(pics: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("duplex.recognition.recognizer.Recognizer.load", lambda *_, **__: FakeRecognizer())
    return pics


@pytest.mark.parametrize("thing", THINGS)
def test_predict_replaces_a_file_with_force_alone(fake_model: Path, command: Command, thing: str) -> None:
    THINGS[thing](fake_model / "mine")
    before = state(fake_model / "mine")
    words = ["predict", "pictures/00000.jpg", "--model", "m", "--format", "csv", "--out"]
    for place in ("mine", "params.yaml", "pictures/00000.jpg"):
        assert command(*words, place).refused(f"{place} exists", "--force")
    assert state(fake_model / "mine") == before and not list(fake_model.glob("*.partial"))
    assert command(*words, "mine", "--force").code == 3
    assert "00000.jpg" in (fake_model / "mine").read_text()
    assert not (fake_model / "target").exists() or (fake_model / "target").read_text() == "precious"


def test_an_edited_list_of_suspects_is_replaced_with_force_alone(ranked: Path, command: Command) -> None:
    assert command("suspects", "pics").code == 0
    listed = ranked / "suspects.csv"
    first = listed.read_text()
    listed.write_text(first.replace("star", "moon"))
    edited, page = listed.read_bytes(), (ranked / "suspects.html").read_bytes()
    assert command("suspects", "pics").refused("suspects.csv exists", "--force")
    assert (listed.read_bytes(), (ranked / "suspects.html").read_bytes()) == (edited, page)
    assert command("suspects", "pics", "--force").code == 0 and listed.read_text() == first
    listed.unlink()
    assert command("suspects", "pics").refused("suspects.html exists") and not listed.exists()
