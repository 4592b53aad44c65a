"""An export gives the run's scores: through the library, through numpy alone, through onnxruntime, through the hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from duplex import Recognizer, open_features
from duplex.errors import UsageError
from duplex.training.checkpoint import digest
from tests.recognition.hub import Hub

pytestmark = pytest.mark.slow  # five models are exported, some with their encoders
EXPORTED = ("duplex", "duplex_open", "clip", "closed_form", "duplex_plus")
PRODUCTS = ("closed_form", "duplex_plus")  # their scores are sums of logarithms, not shares below 3


def near(method: str) -> dict[str, Any]:
    """1e-5; and of a logarithm such as -50 a millionth, which is some steps of a float32."""
    return {"rtol": 1e-6 if method in PRODUCTS else 0, "atol": 1e-5}


def duplex(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from duplex.cli import main; main()", *map(str, words)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> dict[str, Path]:
    """Every kind of model that there is, in its own world; the first with ONNX files."""
    places = {}
    asked = {"duplex": ["--onnx-encoder", "--licence", "mit"], "duplex_plus": ["--onnx"]}
    for method in EXPORTED:
        more = asked.get(method, [])
        places[method] = tmp_path_factory.mktemp("exports") / method
        done = duplex("export", trained.run(method), places[method], *more)
        assert done.returncode == 0, done.stderr
    return places


@pytest.fixture(scope="module")
def features(trained) -> np.ndarray:
    return open_features(trained.paths.features("own")).cls[-60:]


@pytest.mark.parametrize("method", EXPORTED)
def test_an_export_answers_as_its_run(trained, exported, features, method):
    run, folder = Recognizer.load(trained.run(method), device="cpu"), Recognizer.load(exported[method], device="cpu")
    torch.testing.assert_close(folder.scores(features), run.scores(features), **near(method))
    assert folder.panel().pairs == run.panel().pairs
    for one, other in zip(folder(features), run(features), strict=True):
        assert [guess.name for guess in one.top] == [guess.name for guess in other.top]
        assert one.best.evidence.keys() == other.best.evidence.keys()
    words = [("dark", "picture"), ("photo", "star"), ("photo", "picture")]
    wide = [recognizer.with_words(words).scores(features) for recognizer in (folder, run)]
    torch.testing.assert_close(*wide, **near(method))


@pytest.mark.parametrize("method", EXPORTED)
def test_numpy_alone_gives_the_same_scores(trained, exported, features, method, tmp_path):
    """In a process that cannot import torch, or this package."""
    np.save(tmp_path / "features.npy", features)
    script = (
        "import sys; sys.modules['torch'] = sys.modules['duplex'] = None; sys.path.insert(0, '.')\n"
        "import recognize, numpy; t = recognize.load_file('model.safetensors')\n"
        "numpy.save(sys.argv[2], recognize.scores(t, numpy.load(sys.argv[1])))"
    )
    files = [tmp_path / "features.npy", tmp_path / "scores.npy"]
    subprocess.run([sys.executable, "-c", script, *files], cwd=exported[method], check=True)
    scores = Recognizer.load(trained.run(method), device="cpu").scores(features).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), scores, **near(method))


def test_its_lines_name_the_best_compositions(trained, exported, features, tmp_path):
    np.save(tmp_path / "features.npy", features)
    command = [sys.executable, str(exported["duplex"] / "recognize.py"), str(tmp_path / "features.npy")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    answers = Recognizer.load(trained.run(), device="cpu")(features)
    assert said == [answer.best.name for answer in answers]


@pytest.mark.parametrize("method", ["duplex", "duplex_plus"])
def test_onnxruntime_gives_the_same_scores(trained, exported, features, method):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(exported[method] / "trained.onnx")
    run = Recognizer.load(trained.run(method), device="cpu")
    for rows in (features, features[:1]):
        (scores,) = session.run(None, {"features": rows})
        np.testing.assert_allclose(scores, run.scores(rows).numpy(), **near(method))


def test_onnxruntime_alone_answers_for_a_picture(trained, exported):
    pytest.importorskip("onnxruntime")
    pictures = trained.pictures()[:20]
    alone = "import sys; sys.modules['torch'] = sys.modules['duplex'] = None; sys.path.insert(0, '.')"
    script = f"{alone}; import see; see.main()"
    command = [sys.executable, "-c", script, *map(str, pictures)]
    said = subprocess.run(command, cwd=exported["duplex"], capture_output=True, text=True, check=True).stdout
    best = [answer.best.name for answer in Recognizer.load(trained.run(), device="cpu")(pictures)]
    assert [line.split(" ", 1)[1] for line in said.splitlines()] == best


def test_the_image_tower_in_onnx(trained, exported):
    onnxruntime = pytest.importorskip("onnxruntime")
    from duplex.recognition.images import open_picture

    run = Recognizer.load(trained.run(), device="cpu")
    pixels = [run.encoder.image_transform(open_picture(path)) for path in trained.pictures()[:16]]
    session = onnxruntime.InferenceSession(exported["duplex"] / "encoder.onnx")
    (found,) = session.run(None, {"pixels": torch.stack(pixels).numpy()})
    own = run.encode(pixels)["cls"].numpy()
    np.testing.assert_allclose(found, own, rtol=0, atol=1e-3)  # the next float16 of values near 1
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (found, own))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_sixteen_bit_grey_is_the_same_picture_to_the_script(tmp_path):
    pytest.importorskip("onnxruntime")
    from duplex.features.image_files import read_picture
    from duplex.recognition.onnx_example import rgb

    Image.fromarray(np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)).save(tmp_path / "grey.png")
    wanted = np.asarray(read_picture(tmp_path / "grey.png"))
    np.testing.assert_array_equal(np.asarray(rgb(Image.open(tmp_path / "grey.png"))), wanted)


def test_an_export_that_fails_at_its_onnx_files_leaves_the_earlier_one(trained, exported, tmp_path):
    from duplex.recognition.export import export
    from duplex.stages.trained_runs import facts_of

    folder = shutil.copytree(exported["duplex"], tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def fail(_: Path) -> None:
        raise UsageError("no ONNX here")

    run = Recognizer.load(trained.run(), device="cpu").trained
    facts = facts_of(trained.run(), name=None, licence="mit", repository=None)
    with pytest.raises(UsageError, match="no ONNX"):
        export(run, "closed", folder, facts, fail)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_card_knows_its_run_however_it_is_named(trained, monkeypatch):
    from duplex.stages.trained_runs import facts_of

    known = partial(facts_of, name="a", licence="mit", repository=None)
    wanted = known(trained.run())
    assert wanted.metrics["closed"] and wanted.counts
    assert known(trained.run() / "checkpoint.safetensors") == wanted
    monkeypatch.chdir(trained.run())
    assert known(Path(".")) == wanted


def test_the_card_says_what_the_run_found(trained, exported):
    text = (exported["duplex"] / "README.md").read_text(encoding="utf-8")
    metrics = json.loads((trained.run() / "metrics.json").read_text())["closed"]
    assert text.startswith("---\nlicense: mit\n")
    assert f"| AUC | {metrics['auc']:.2f} | {metrics['auc_low']:.2f}–{metrics['auc_high']:.2f} |" in text
    counts = json.loads(trained.paths.statistics("own").read_text())
    assert f"{counts['states']} states" in text and "evidence visual, semantic, factors" in text


def test_the_hub_and_back(trained, features, tmp_path):
    environment = {"HF_TOKEN": "hf_none", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    with Hub() as hub:
        environment |= {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        sent = duplex("export", trained.run(), "--push", "owner/shapes", **environment)
        assert sent.returncode == 0, sent.stderr
        assert set(hub.files["owner/shapes"]) == {"README.md", "config.json", "model.safetensors", "recognize.py"}
        picture = trained.pictures()[0]
        found = duplex("predict", picture, "--model", "hf-hub:owner/shapes", "--format", "jsonl", **environment)
        assert found.returncode == 0, found.stderr
        own = duplex("predict", picture, "--model", trained.run(), "--format", "jsonl")
        names = [[guess["state"] for guess in json.loads(one.stdout)["top"]] for one in (found, own)]
        assert names[0] == names[1]
        absent = duplex("predict", picture, "--model", "hf-hub:owner/none", **environment)
        assert absent.returncode == 2 and "could not be fetched" in absent.stderr


def test_nothing_is_uploaded_unless_asked(trained, tmp_path):
    with Hub() as hub:
        done = duplex("export", trained.run(), tmp_path / "out", HF_ENDPOINT=hub.address)
        assert done.returncode == 0 and not hub.asked


def test_a_folder_of_somebody_else_is_left_alone(trained, tmp_path):
    (tmp_path / "own.txt").write_text("mine")
    done = duplex("export", trained.run(), tmp_path)
    assert done.returncode == 2 and "is no export of duplex" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]


def test_a_damaged_export(exported, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(exported["clip"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["semantic"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UsageError, match="damaged"):
        Recognizer.load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "labels": 3, "tensors": digest(tensors)}))
    with pytest.raises(UsageError, match="not of this version"):
        Recognizer.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        Recognizer.load(folder)
