"""An export that names a stranger's encoder, and a stranger's encoder for one's own images: no code runs."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from duplex import Recognizer
from duplex.errors import UsageError
from duplex.training.checkpoint import tensor_digest, with_checksum
from tests.commands import Command
from tests.encoders.traps import Trap, pretend_transformers
from tests.recognition.drawn_folder import draw_folder

FIELD = "'model_cfg.text_cfg.tokenizer_kwargs.trust_remote_code'"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    pretend_transformers(monkeypatch)
    return Trap(tmp_path / "encoder")


@pytest.fixture
def stranger(project, trap: Trap, tmp_path: Path) -> Path:
    """An export with right checksums whose encoder is the trap."""
    folder = Recognizer.load(project.run("closed_form")).save_pretrained(tmp_path / "stranger")
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["duplex"])
    tensors = load_file(path)
    header["encoder"] |= {"name": trap.write_tokenizer_trap(), "tag": ""}
    header = with_checksum({**header, "tensors": tensor_digest(tensors)})
    save_file(tensors, path, {"duplex": json.dumps(header)})
    return folder


@pytest.mark.parametrize("words", [[], ["--add", "red heart"]])
def test_a_strangers_export_runs_no_code(
    project, stranger: Path, trap: Trap, command: Command, words: list[str]
) -> None:
    result = command("predict", project.images()[0], "--model", stranger, "--num-workers", 0, *words)
    assert not trap.is_sprung
    assert result.refused(FIELD, "choose another encoder")


def test_a_strangers_export_runs_no_code_in_python(project, stranger: Path, trap: Trap) -> None:
    with pytest.raises(UsageError, match=FIELD):
        Recognizer.load(stranger).with_compositions(["red heart"])(str(project.images()[0]))
    assert not trap.is_sprung


@pytest.mark.parametrize("words", [["data", "add", "mine", "shop"], ["fit", "shop"]])
def test_a_strangers_encoder_is_refused_for_ones_own_images(
    trap: Trap, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / "shop")
    (tmp_path / "params.yaml").write_text((Path(__file__).parents[2] / "params.yaml").read_text())
    result = command(*words, "--encoder", trap.write_tokenizer_trap())
    assert not trap.is_sprung
    assert result.code in (1, 2) and FIELD in result.err.splitlines()[-1]
