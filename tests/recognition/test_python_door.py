"""From Python: blocks fine-tuned on a folder, a folder fitted, and models written, uploaded and loaded again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import duplex
from duplex.errors import UsageError
from duplex.recognition import fit
from tests.recognition.hub import Hub
from tests.recognition.searches import only_the_first

FULL = {"blocks": 2, "adapter": "full", "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def data(drawn: Path) -> duplex.Dataset:
    return duplex.load_dataset(drawn, encoder="tiny", block_inputs=4)


@pytest.fixture(scope="module")
def tuned(data: duplex.Dataset) -> duplex.Run:
    return duplex.fit(data, "dual", epochs=1, finetune=FULL)


def test_blocks_are_fine_tuned_and_exported(data, tuned, drawn, tmp_path):
    assert (tuned.record.finetune.blocks, tuned.record.encoder["block_inputs"]) == (2, "2")
    assert duplex.evaluate(tuned, data).auc > 0
    images = sorted(drawn.glob("*/*/0000.png"))
    saved = duplex.Recognizer.load(tuned.save(tmp_path / "run"))
    exported = duplex.Recognizer.load(tuned.export(tmp_path / "model", licence="mit"))
    torch.testing.assert_close(exported.scores(images), saved.scores(images), rtol=1e-5, atol=1e-5)
    assert "license: mit" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="model exists"):
        tuned.export(tmp_path / "model")


@pytest.mark.parametrize(
    ("finetune", "said"),
    [
        (5, "encoder 'tiny' has 4 blocks"),
        (0, "blocks is 0"),
        ({"blocks": 1, "augment": ["flip"]}, "pixels for augmentation, which only data sets of"),
        ({"blocks": "auto"}, "only `duplex train` supports"),
        ({"block": 1}, "block: unknown key"),
    ],
)
def test_blocks_that_cannot_be_fine_tuned_are_one_line(data, finetune, said):
    with pytest.raises(UsageError, match=said):
        duplex.fit(data, "dual", epochs=1, finetune=finetune)


def test_blocks_need_their_inputs(data, drawn, tmp_path):
    with pytest.raises(UsageError, match="inputs of 2 blocks, but block_inputs is 0; load images with block_inputs=2"):
        duplex.fit(duplex.load_dataset(drawn, encoder="tiny", cache=tmp_path), "dual", finetune=2)
    arrays = duplex.Dataset.from_arrays(data.features, data.manifest, encoder="tiny")
    with pytest.raises(UsageError, match=r"load_dataset\(\.\.\., block_inputs=2\)"):
        duplex.fit(arrays, "dual", finetune=2)
    with pytest.raises(UsageError, match="block_inputs is -1"):
        duplex.load_dataset(drawn, encoder="tiny", block_inputs=-1)


PUSH = """
import json, sys
from duplex import Recognizer
folder, image = sys.argv[1:]
here = Recognizer.load(folder)
address = here.push_to_hub("owner/shop", licence="mit", commit_message="A shop", private=True)
there = Recognizer.from_pretrained("owner/shop", revision="main", device="cpu")
answers = [[guess.name for guess in model(image)[0].top] for model in (here, there)]
try:
    Recognizer.from_pretrained("owner/none", cache_dir=sys.argv[1] + "-cache")
except Exception as error:
    print(json.dumps([address, answers, f"{type(error).__name__}: {error}"]))
"""


@pytest.mark.long
def test_a_fitted_folder_is_uploaded_with_its_card_and_loaded_again(drawn, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(fit.FolderFit, "search", only_the_first)
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    with pytest.raises(UsageError, match=r"unknown training\.log 'tensorbord'"):
        duplex.fit_folder(drawn, "other", encoder="tiny", log="tensorbord", say=lines.append)
    model = duplex.fit_folder(str(drawn), "model", encoder="tiny", log="tensorboard", say=lines.append).resolve()
    assert len(list(Path("tensorboard/model/nothing-trained/0").glob("events.*"))) == 1
    assert "chosen: nothing trained" in lines
    hub_settings = {"HF_TOKEN": "hf_none", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    with Hub() as hub:
        environment = {**os.environ, **hub_settings, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", PUSH, str(model), str(next(drawn.glob("*/*/0000.png")))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        address, answers, error = json.loads(done.stdout)
        files = hub.files["owner/shop"]
    assert address == f"{hub.address}/owner/shop" and answers[0] == answers[1]
    assert error.startswith("UsageError: hf-hub:owner/none is not on disk") and "\n" not in error
    assert set(files) == {path.name for path in model.iterdir()} and "fit.json" in files
    card = (model / "README.md").read_text()
    named = card.replace("license: other", "license: mit").replace("# model\n", "# owner/shop\n", 1)
    named = named.replace("--model FOLDER", "--model hf-hub:owner/shop").replace('"FOLDER"', '"hf-hub:owner/shop"')
    assert files["README.md"].decode() == named and named.count("owner/shop") == 3
    with pytest.raises(UsageError, match="was not trained for the closed world"):
        duplex.Recognizer.load(model).save_pretrained("closed", world="closed")


def test_a_model_from_a_folder_has_the_settings_of_load(tuned, tmp_path):
    folder = tuned.export(tmp_path / "model")
    again = duplex.Recognizer.from_pretrained(folder, device="cpu", new_share=0.3)
    assert again.new_share == 0.3
    copy = again.save_pretrained(tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    with pytest.raises(UsageError, match="added compositions cannot be saved with a model"):
        again.with_compositions("striped heart").save_pretrained(tmp_path / "more")
    with pytest.raises(UsageError, match="Repo id must"):
        duplex.Recognizer.from_pretrained("a b/c", device="cpu")
