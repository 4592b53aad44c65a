"""Photographs that EXIF data turn are the same images to the cache, recognition, the server and an export."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi")

from duplex import Recognizer, read_features
from duplex.data.images import thumbnail
from duplex.features.extract import ExtractionSettings, extract
from duplex.recognition.recognizer import open_image

STORED = {  # orientation -> how the pixels of an upright image are stored
    1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}  # fmt: skip


@pytest.fixture(scope="module")
def turned(trained, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One image, not symmetric and not square, as eight files of the same upright pixels."""
    folder = tmp_path_factory.mktemp("turned")
    upright = open_image(next(path for path in trained.images() if "arrow" in str(path))).crop((0, 0, 60, 48))
    for orientation, turn in STORED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = upright if turn is None else upright.transpose(turn)
        stored.save(folder / f"{orientation}.png", exif=exif)
    return sorted(folder.iterdir())


def test_the_cache_holds_the_same_features(trained, turned: list[Path], tmp_path: Path) -> None:
    encoder = Recognizer.load(trained.run(), device="cpu").encoder
    names = [path.name for path in turned]
    extract(names, tmp_path / "f.h5", encoder, ExtractionSettings(turned[0].parent, "m" * 64, num_workers=0))
    features = read_features(tmp_path / "f.h5").cls
    assert np.array_equal(features, np.repeat(features[:1], 8, axis=0)) and np.ptp(features) > 0


def test_recognition_gives_the_same_answers(trained, turned: list[Path]) -> None:
    recognizer = Recognizer.load(trained.run(), device="cpu")
    (expected,), answers = recognizer(turned[:1]), recognizer(turned)
    assert [answer.best.name for answer in answers] == [expected.best.name] * 8
    assert [answer.best.score for answer in answers] == pytest.approx([expected.best.score] * 8, abs=5e-3)
    assert np.asarray(Image.open(turned[5])).shape != np.asarray(open_image(turned[5])).shape  # stored turned


def test_the_script_of_an_export_reads_the_same_pixels(trained, turned: list[Path]) -> None:
    pytest.importorskip("onnxruntime")
    from duplex.recognition import onnx_example

    first, *others = (np.asarray(onnx_example.open_image(str(path))) for path in turned)
    assert all(np.array_equal(first, other) for other in others)


def test_thumbnails_are_upright(turned: list[Path]) -> None:
    first, *others = map(thumbnail, turned)
    assert first is not None and set(others) == {first}
