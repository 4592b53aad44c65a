"""An export gives the scores of its run: in the library, with numpy alone, with onnxruntime, and from the hub."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from duplex import Recognizer, read_features
from duplex.errors import UsageError
from duplex.training.checkpoint import tensor_digest, with_checksum
from tests.recognition.hub import Hub
from tests.subprocesses import duplex

pytestmark = pytest.mark.slow  # five models are exported, some with their encoders
EXPORTED = ("duplex", "duplex_open", "clip", "closed_form", "dual")
PRODUCTS = ("closed_form", "dual")  # their scores are sums of logarithms, not shares below 3


def near(method: str) -> dict[str, Any]:
    """Tolerances: 1e-5, and 1e-6 of a logarithm such as -50, which is a few steps of a float32."""
    return {"rtol": 1e-6 if method in PRODUCTS else 0, "atol": 1e-5}


def new_duplex(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, which reads the hub's settings from its environment while it imports."""
    command = [sys.executable, "-c", "from duplex.cli import main; main()", *map(str, words)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> dict[str, Path]:
    places = {}
    asked = {"duplex": ["--onnx-encoder", "--licence", "mit"], "dual": ["--onnx"]}
    for method in EXPORTED:
        more = asked.get(method, [])
        places[method] = tmp_path_factory.mktemp("exports") / method
        done = duplex("export", trained.run(method), places[method], *more)
        assert done.returncode == 0, done.stderr
    return places


ALONE = "import sys; sys.modules['torch'] = sys.modules['duplex'] = None; sys.path.insert(0, '.'); "


def run_alone(script: str, folder: Path, *words: object) -> str:
    """Run a script in an export's folder, in a process that cannot import torch or this package; return its output."""
    command = [sys.executable, "-c", ALONE + script, *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def features(trained) -> np.ndarray:
    return read_features(trained.paths.features("own")).cls[-60:]


@pytest.mark.parametrize("method", EXPORTED)
def test_an_export_gives_the_answers_of_its_run(trained, exported, features, method):
    run, folder = Recognizer.load(trained.run(method), device="cpu"), Recognizer.load(exported[method], device="cpu")
    torch.testing.assert_close(folder.scores(features), run.scores(features), **near(method))
    assert folder.candidates().pairs == run.candidates().pairs
    for one, other in zip(folder(features), run(features), strict=True):
        assert [guess.name for guess in one.top] == [guess.name for guess in other.top]
        assert one.best.score_terms.keys() == other.best.score_terms.keys()
        assert one.best.probability == pytest.approx(other.best.probability, abs=1e-4)
        assert (one.in_distribution, one.distance) == (other.in_distribution, other.distance)
    added = [("dark", "picture"), ("photo", "star"), ("photo", "picture")]
    wider = [recognizer.with_compositions(added).scores(features) for recognizer in (folder, run)]
    torch.testing.assert_close(*wider, **near(method))


@pytest.mark.parametrize("method", EXPORTED)
def test_numpy_alone_gives_the_same_scores(trained, exported, features, method, tmp_path):
    np.save(tmp_path / "features.npy", features)
    script = (
        "import recognize, numpy; t, _ = recognize.load_model(recognize.Path())\n"
        "numpy.save(sys.argv[2], recognize.scores(t, numpy.load(sys.argv[1])))"
    )
    run_alone(script, exported[method], tmp_path / "features.npy", tmp_path / "scores.npy")
    scores = Recognizer.load(trained.run(method), device="cpu").scores(features).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), scores, **near(method))


def best_alone(folder: Path, features: Path, *words: object) -> tuple[list[str], str]:
    """The compositions that recognize.py prints, and its lines on stderr, without torch and this package."""
    command = [sys.executable, "-c", ALONE + "import recognize; recognize.main()", str(features), *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("method", ["duplex", "duplex_open", "dual"])
def test_numpy_alone_estimates_the_same_share_and_gives_its_answers(exported, features, method, tmp_path):
    np.save(tmp_path / "features.npy", features)
    np.save(tmp_path / "few.npy", features[:9])
    asked: Any = (
        ("features", features, None),
        ("features", features, "auto"),
        ("few", features[:9], "auto"),
        ("few", features[:9], None),
        ("features", features, 0.7),
    )
    for name, rows, share in asked:
        answers = Recognizer.load(exported[method], device="cpu", new_share=share)(rows)
        words = [] if share is None else ["--new-share", share]
        printed, said = best_alone(exported[method], tmp_path / f"{name}.npy", *words)
        assert printed == [answer.best.name for answer in answers]
        assert said == (f"{answers[0].share}\n" if answers[0].share.error else "")


def test_recognize_without_means_uses_the_stored_share_and_says_why(exported, features, tmp_path):
    np.save(tmp_path / "features.npy", features)
    folder = shutil.copytree(exported["duplex"], tmp_path / "copy")
    spoil(folder, lambda header, _: header["confidence"].pop("unseen_mass"), right=True)
    printed, said = best_alone(folder, tmp_path / "features.npy")
    model = Recognizer.load(exported["duplex"], device="cpu")
    share = model.trained.confidence.new_share
    stored = Recognizer.load(exported["duplex"], device="cpu", new_share=share)(features)
    assert printed == [answer.best.name for answer in stored]
    assert said.count("\n") == 1 and "no means over validation images" in said
    assert said.strip() == str(Recognizer.load(folder, device="cpu")(features)[0].share)


def test_recognize_reads_the_features_that_the_library_reads(features, tmp_path):
    from duplex.recognition import numpy_example

    width = features.shape[1]
    for values in (features[0], features[:0], features.astype(np.float16), features.astype(np.float64) * 1e-6):
        np.save(tmp_path / "features.npy", values)
        read = numpy_example.read_features(str(tmp_path / "features.npy"), width)
        assert read.dtype == np.float32 and read.shape == np.atleast_2d(values).shape


def test_recognize_refuses_other_features_in_one_line(exported, features, tmp_path):
    unusable = features.copy()
    unusable[1] = np.nan
    arrays = {"narrow": features[:, :3], "nan": unusable, "cube": features[None], "whole": features.astype(int)}
    for name, values in arrays.items():
        np.save(tmp_path / f"{name}.npy", values)
    np.savez(tmp_path / "several", features)
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    script = str(exported["duplex"] / "recognize.py")
    for arguments in ([], ["-h"], *([str(tmp_path / f"{name}.npy")] for name in [*arrays, "several"])):
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), (arguments, done.stderr)


def reverse_states(header: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    header["labels"]["states"].reverse()


def flip_states(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["state_of"] = tensors["state_of"].flip(0)


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def spoil(folder: Path, change: Change, *, right: bool = False) -> Path:
    """Change the model file of an export; `right`: with the checksums that belong to it."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["duplex"])
    tensors = load_file(path)
    change(header, tensors)
    if right:
        header = with_checksum({**header, "tensors": tensor_digest(tensors)})
    save_file(tensors, path, {"duplex": json.dumps(header)})
    return path


@pytest.mark.parametrize(("script", "change"), [("recognize.py", reverse_states), ("see.py", flip_states)])
def test_scripts_refuse_a_changed_model_in_one_line(trained, exported, features, tmp_path, script, change):
    if script == "see.py":
        pytest.importorskip("onnxruntime")
    np.save(tmp_path / "features.npy", features)
    folder = shutil.copytree(exported["duplex"], tmp_path / "copy")
    path = spoil(folder, change)
    given = trained.images()[0] if script == "see.py" else tmp_path / "features.npy"
    done = subprocess.run([sys.executable, folder / script, given], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{script}: {path} is damaged; export the run again\n"


def test_see_refuses_what_is_no_image_in_one_line(exported, tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "text.png").write_text("no image")
    Image.new("F", (8, 8)).save(tmp_path / "floats.tiff")
    Image.fromarray(np.full((8, 8), 65536, np.int32)).save(tmp_path / "wide.tiff")
    Image.new("1", (20_000, 10_000)).save(tmp_path / "bomb.png")
    names = ("text.png", "none.png", "floats.tiff", "wide.tiff", "bomb.png")
    for arguments in ([], ["-h"], *([str(tmp_path / name)] for name in names)):
        command = [sys.executable, str(exported["duplex"] / "see.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), (arguments, done.stderr)


@pytest.mark.parametrize("method", ["duplex", "dual"])
def test_onnxruntime_gives_the_same_scores(trained, exported, features, method):
    session = pytest.importorskip("onnxruntime").InferenceSession(exported[method] / "trained.onnx")
    run = Recognizer.load(trained.run(method), device="cpu")
    for rows in (features, features[:1]):
        (scores,) = session.run(None, {"features": rows})
        np.testing.assert_allclose(scores, run.scores(rows).numpy(), **near(method))


def test_onnxruntime_alone_names_the_composition_of_an_image(trained, exported):
    pytest.importorskip("onnxruntime")
    images = trained.images()[:20]
    output = run_alone("import see; see.main()", exported["duplex"], *images)
    best = [answer.best.name for answer in Recognizer.load(trained.run(), device="cpu")(images)]
    assert [line.split(" ", 1)[1] for line in output.splitlines()] == best


def test_the_image_tower_in_onnx(trained, exported):
    onnxruntime = pytest.importorskip("onnxruntime")
    from duplex.recognition.recognizer import open_image

    run = Recognizer.load(trained.run(), device="cpu")
    pixels = [run.encoder.image_transform(open_image(path)) for path in trained.images()[:16]]
    session = onnxruntime.InferenceSession(exported["duplex"] / "encoder.onnx")
    (features,) = session.run(None, {"pixels": torch.stack(pixels).numpy()})
    expected = run.encode(pixels)["cls"].numpy()
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-3)  # the next float16 of values near 1
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (features, expected))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_the_onnx_script_reads_sixteen_bit_grey_like_the_library(tmp_path):
    pytest.importorskip("onnxruntime")
    from duplex.data.images import read_image
    from duplex.recognition.onnx_example import to_rgb

    Image.fromarray(np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)).save(tmp_path / "grey.png")
    wanted = np.asarray(read_image(tmp_path / "grey.png"))
    np.testing.assert_array_equal(np.asarray(to_rgb(Image.open(tmp_path / "grey.png"))), wanted)


def test_an_export_that_fails_at_its_onnx_files_leaves_the_earlier_one(trained, exported, tmp_path):
    from duplex.recognition.export import export, model_card_facts

    folder = shutil.copytree(exported["duplex"], tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def fail(*_: object) -> None:
        raise UsageError("no ONNX here")

    run = Recognizer.load(trained.run(), device="cpu").trained
    facts = model_card_facts(trained.run(), name=None, licence="mit", repository=None)
    with pytest.raises(UsageError, match="no ONNX"):
        export(run, "closed", folder, facts, fail, force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_the_card_has_the_metrics_and_counts(trained, exported, tmp_path):
    text = (exported["duplex"] / "README.md").read_text(encoding="utf-8")
    metrics = json.loads((trained.run() / "metrics.json").read_text())["closed"]
    assert text.startswith("---\nlicense: mit\n")
    assert "On test images, in the closed world:" in text
    assert f"| AUC | {metrics['auc']:.2f} | {metrics['auc_low']:.2f}–{metrics['auc_high']:.2f} |" in text
    assert "of drawn images of each kind" in text
    counts = json.loads(trained.paths.statistics("own").read_text())
    assert f"{counts['states']} states" in text and "score terms visual, semantic, factors" in text
    assert duplex("export", exported["duplex"], tmp_path / "again", "--world", "closed").returncode == 0
    again = (tmp_path / "again" / "README.md").read_text(encoding="utf-8")
    assert again.startswith("---\nlicense: mit\n") and again.endswith(text[text.index("## Files") :])


def test_notes_below_the_last_line_of_a_card_are_kept(exported, trained, tmp_path):
    from duplex.recognition.export import NOTES, export, model_card_facts

    folder = shutil.copytree(exported["duplex"], tmp_path / "out")
    card = folder / "README.md"
    first = card.read_text(encoding="utf-8")
    assert first.endswith(f"{NOTES}\n")
    card.write_text(first.replace("Use", "Changed") + "\n## Notes\n\nFor the shop in Łódź.\n", encoding="utf-8")
    run = Recognizer.load(trained.run(), device="cpu").trained
    facts = model_card_facts(trained.run(), name=None, licence="mit", repository=None)
    for _ in range(2):
        export(run, "closed", folder, facts, force=True)
        text = card.read_text(encoding="utf-8")
        assert text.endswith(f"{NOTES}\n\n## Notes\n\nFor the shop in Łódź.\n") and "Changed" not in text


def test_an_uploaded_export_is_downloaded_and_used(trained, features, tmp_path):
    environment = {"HF_TOKEN": "hf_none", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    with Hub() as hub:
        environment |= {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        sent = new_duplex("export", trained.run(), "--push", "owner/shapes", **environment)
        assert sent.returncode == 0, sent.stderr
        assert set(hub.files["owner/shapes"]) == {
            "README.md",
            "model.safetensors",
            "new_share.py",
            "recognize.py",
            "score_formula.py",
        }
        image = trained.images()[0]
        remote = new_duplex("predict", image, "--model", "hf-hub:owner/shapes", "--format", "jsonl", **environment)
        assert remote.returncode == 0, remote.stderr
        local = duplex("predict", image, "--model", trained.run(), "--format", "jsonl")
        names = [[guess["state"] for guess in json.loads(one.stdout)["top"]] for one in (remote, local)]
        assert names[0] == names[1]
        absent = new_duplex("predict", image, "--model", "hf-hub:owner/none", **environment)
        assert absent.returncode == 2 and "could not be downloaded" in absent.stderr


def test_nothing_is_uploaded_without_push(trained, tmp_path):
    with Hub() as hub:
        done = new_duplex("export", trained.run(), tmp_path / "out", HF_ENDPOINT=hub.address)
        assert done.returncode == 0 and not hub.requests


CHANGED: dict[str, tuple[Change, str]] = {
    "NaN": (lambda _, t: t["semantic"].__setitem__(0, float("nan")), "tensor 'semantic' contains NaN or infinity"),
    "halves": (lambda _, t: t.update(semantic=t["semantic"].half()), "tensors have mismatched shapes or types"),
    "a row short": (lambda _, t: t.update(semantic=t["semantic"][1:].clone()), "its scores for one image have shape"),
    "a state too large": (lambda _, t: t["state_of"].__setitem__(0, 10**6), "tensor 'state_of' has numbers outside"),
    "nothing feasible": (lambda _, t: t["feasible"].fill_(False), "excludes every candidate"),
    "bias": (lambda header, _: header["calibration"].update(bias=1e30), "less than or equal to 1000000"),
    "width x": (lambda header, _: header["encoder"].update(dim="x"), "encoder width 'x' is invalid"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_an_export_that_another_tool_changed_is_refused(exported, tmp_path, case):
    """Its checksums are right, as those of a stranger's upload may be."""
    folder = shutil.copytree(exported["clip"], tmp_path / "copy")
    change, message = CHANGED[case]
    spoil(folder, change, right=True)
    with pytest.raises(UsageError, match=message):
        Recognizer.load(folder)
