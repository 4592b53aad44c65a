"""An exported page answers in the browser as the model does: pixels, probabilities, and the page itself."""

import base64
import functools
import http.server
import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

pytest.importorskip("onnx")

from duplex import Recognizer, fit, load_dataset
from duplex.data.images import read_image
from duplex.errors import UsageError
from duplex.recognition import onnx_files
from duplex.recognition.export import exported_tensors
from duplex.recognition.onnx_files import RUNTIME
from tests.recognition.test_server_page import cards, upload
from tests.subprocesses import ROOT, duplex
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "duplex" / "recognition" / "browser.js"


@pytest.fixture(scope="module")
def no_runtime(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    for name in RUNTIME:
        (folder / name).write_text(f"// {name}")
    return folder


@pytest.fixture(scope="module")
def page(trained, no_runtime, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    done = duplex("export", trained.run(), out, "--page", no_runtime, cwd=trained.folder)
    assert done.returncode == 0, done.stderr
    return out / "page"


def test_the_page_has_all_that_it_loads(page, no_runtime):
    assert {file.name for file in page.iterdir()} == {"index.html", "browser.js", "model.onnx", "model.json", *RUNTIME}
    html = (page / "index.html").read_text(encoding="utf-8")
    assert html.index(f'src="{RUNTIME[0]}"') < html.index('src="browser.js"')
    assert (page / RUNTIME[2]).read_bytes() == (no_runtime / RUNTIME[2]).read_bytes()
    assert Recognizer.load(page.parent, device="cpu").worlds


def test_the_model_of_the_page_gives_the_probabilities_of_the_run(trained, page):
    expect_equal(page, Recognizer.load(trained.run(), device="cpu"), trained.images()[:12])


@pytest.mark.slow
def test_fine_tuned_blocks_are_part_of_the_page(drawn, no_runtime, tmp_path):
    tuned = fit(load_dataset(drawn, encoder="tiny", block_inputs=2), "dual", epochs=1, finetune=2)
    recognizer = Recognizer.load(tuned.save(tmp_path / "run"), device="cpu")
    tensors = exported_tensors(recognizer.trained, "closed")
    onnx_files.write_page(tmp_path, tensors, recognizer.trained, no_runtime)
    expect_equal(tmp_path / "page", recognizer, sorted(drawn.glob("*/*/0000.png"))[:12])


def expect_equal(page: Path, recognizer: Recognizer, images: list[Path]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pixels = torch.stack([recognizer.encoder.image_transform(read_image(image)) for image in images])
    session = onnxruntime.InferenceSession(page / "model.onnx")
    shares, distances = session.run(None, {"pixels": pixels.numpy()})
    facts = json.loads((page / "model.json").read_text(encoding="utf-8"))
    for answer, row, distance in zip(recognizer(images), shares, distances, strict=True):
        best = int(row.argmax())
        names = facts["states"][facts["state_of"][best]], facts["objects"][facts["object_of"][best]]
        assert names == (answer.best.state, answer.best.object) and facts["seen"][best] == answer.best.seen
        assert row[best] == pytest.approx(answer.best.probability, abs=1e-3)
        assert distance == pytest.approx(answer.distance, rel=1e-3)
        assert (distance <= facts["threshold"]) == answer.in_distribution


SIZES = [(160, 120), (37, 211), (100, 301), (48, 48), (20, 31), (301, 100), (401, 4), (3, 200)]


def preprocessing(interpolation: str, mode: str) -> dict[str, Any]:
    options = {"size": 48, "mode": "RGB", "mean": (0, 0, 0), "std": (1, 1, 1), "resize_mode": mode}
    return {**options, "interpolation": interpolation, "fill_color": 7}


def noise(size: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_the_encoder(browser, interpolation, size, mode):
    """Exactly, for images that are scaled up and down, cut at a half pixel, distorted or padded, and for strips."""
    from duplex.encoders.open_clip import ResizeAndCrop

    transform = ResizeAndCrop(preprocessing(interpolation, mode))
    wanted = transform(Image.fromarray(noise(size)[..., :3])).numpy().ravel().tolist()
    given = base64.b64encode(noise(size).tobytes()).decode()
    vertical = int(PIL.__version__.split(".")[0]) >= onnx_files.VERTICAL_FIRST
    model = {
        "size": 48,
        "interpolation": interpolation,
        "resize_mode": mode,
        "fill": [7] * 3,
        "vertical_first": vertical,
    }
    functions = SCRIPT.read_text(encoding="utf-8").partition("async function pixelsOf")[0]
    found = browser.run(
        f"(() => {{ {functions}\n const data = Uint8Array.from(atob('{given}'), c => c.charCodeAt(0));"
        f"return [...prepare(data, {size[0]}, {size[1]}, {json.dumps(model)})]; }})()"
    )
    assert found == wanted


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
@pytest.mark.parametrize("size", SIZES)
def test_the_onnx_script_prepares_images_as_the_encoder(size, mode):
    pytest.importorskip("onnxruntime")
    from duplex.encoders.open_clip import ResizeAndCrop
    from duplex.recognition.onnx_example import resize_and_crop

    options = preprocessing("bicubic", mode)
    image = Image.fromarray(noise(size)[..., :3])
    assert np.array_equal(resize_and_crop(image, options), ResizeAndCrop(options)(image).numpy())
    options |= {"fill_color": [7, 8, 9]}
    assert np.array_equal(resize_and_crop(image, options)[:, 0, 0], ResizeAndCrop(options)(image).numpy()[:, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["squash", "pad"])
def test_exports_of_whole_images_tell_how_they_are_prepared(drawn, no_runtime, tmp_path, resize):
    run = fit(load_dataset(drawn, encoder="tiny", resize=resize, cache=tmp_path / "cache"), "closed_form")
    recognizer = Recognizer.load(run.save(tmp_path / "run"), device="cpu")
    tensors = exported_tensors(recognizer.trained, "closed")
    onnx_files.write_page(tmp_path, tensors, recognizer.trained, no_runtime)
    facts = json.loads((tmp_path / "page" / "model.json").read_text(encoding="utf-8"))
    assert (facts["resize_mode"], facts["fill"]) == ({"squash": "squash", "pad": "longest"}[resize], [0, 0, 0])
    expect_equal(tmp_path / "page", recognizer, sorted(drawn.glob("*/*/0000.png"))[:4])


@pytest.fixture(scope="module")
def runtime() -> Path:
    """onnxruntime-web as npm installs it, kept in the checkout's .cache."""
    folder = ROOT / ".cache" / "npm"
    dist = folder / "node_modules" / "onnxruntime-web" / "dist"
    if not (dist / RUNTIME[2]).is_file():
        if shutil.which("npm") is None:
            pytest.skip("no npm here")
        command = ["npm", "install", "--no-save", "--ignore-scripts", "--prefix", str(folder), "onnxruntime-web@1.22.0"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("npm has no network")
    return dist


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("method", ["duplex", "dual"])
def test_the_page_answers_without_a_server(browser, trained, runtime, tmp_path, method):
    done = duplex("export", trained.run(method), tmp_path / "model", "--page", runtime, cwd=trained.folder)
    assert done.returncode == 0, done.stderr
    photo = tmp_path / "photo.jpg"
    smooth = Image.fromarray(np.random.default_rng(1).integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth.resize((400, 300), Image.Resampling.BICUBIC).save(photo, quality=92)
    bad = tmp_path / "bad.jpg"
    bad.write_text("nothing")
    images = [*trained.images()[:3], photo]
    handler = functools.partial(Quiet, directory=tmp_path / "model" / "page")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        anywhere = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        browser.send("Network.emulateNetworkConditions", offline=False, **anywhere)
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        wait_until(lambda: browser.run("typeof loaded") == "object", 60)
        upload(browser, [*images, bad])
        wait_until(lambda: len(cards(browser)) == 5, 120)
        found = cards(browser)
        first = "parseFloat(one.querySelector('.row span:last-child').textContent)"
        articles = "[...document.querySelectorAll('article')].filter(one => one.querySelector('.row'))"
        shown = json.loads(browser.run(f"JSON.stringify({articles}.map(one => {first}))"))
        requested = {url.rpartition("/")[2] for url in browser.requests if url.startswith("http")}
        server.shutdown()
    answers = Recognizer.load(trained.run(method), device="cpu")(images)
    for card, answer, share in zip(found[:4], answers, shown, strict=True):
        assert card["rows"][0] == answer.best.name
        assert share == pytest.approx(100 * answer.best.probability, abs=1.0)
    assert found[4]["bad"] == "This file cannot be used: not an image."
    assert "predict" not in requested and {"model.onnx", "model.json", RUNTIME[2]} <= requested


def test_what_cannot_be_a_page_is_refused_in_one_line(trained, no_runtime, tmp_path, monkeypatch):
    done = duplex("export", trained.run(), tmp_path / "out", "--page", tmp_path, cwd=trained.folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and not (tmp_path / "out").exists()
    assert "holds no ort.wasm.min.js; run `npm install onnxruntime-web`" in done.stderr
    monkeypatch.setattr(onnx_files, "_write_onnx", lambda module, blank, path, *names: path.write_bytes(b"0" * 2**21))
    monkeypatch.setattr(onnx_files, "LARGEST_PAGE", 1)
    model = Recognizer.load(trained.run(), device="cpu").trained
    tensors = exported_tensors(model, "closed")
    with pytest.raises(UsageError, match="is 2 MB, more than the 1 MB that a page may load"):
        onnx_files.write_page(tmp_path, tensors, model, no_runtime)
