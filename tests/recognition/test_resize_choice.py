"""How `fit` chooses between cropped, squashed and padded images: on a sample, only for long ones, by validation."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from duplex.config.params import EncoderParams
from duplex.data.images import read_image
from duplex.encoders.base import PACKAGED
from duplex.recognition import resize_choice
from duplex.recognition.labelled_folder import LabelledFolder, read_labelled_folder
from duplex.recognition.resize_choice import choose_resize, own_way, sampled_rows, share_of_long
from tests.encoders.small import write_folder

CPU = torch.device("cpu")


@pytest.fixture
def wide(drawn, tmp_path) -> LabelledFolder:
    """Drawn images of three times their width, which squashing undoes."""
    for path in sorted(drawn.glob("*/*/*.png")):
        image = read_image(path)
        out = tmp_path / "wide" / path.relative_to(drawn)
        out.parent.mkdir(parents=True, exist_ok=True)
        image.resize((3 * image.width, image.height)).save(out)
    return read_labelled_folder(tmp_path / "wide")


@pytest.mark.slow
def test_stretched_images_are_squashed(wide, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines: list[str] = []
    entry = choose_resize(wide, EncoderParams(name=PACKAGED), CPU, lines.append)
    (line,) = lines
    assert entry.resize == "squash", line
    assert line.startswith("long images: validation AUC of a sample") and line.endswith("chosen: squash")
    monkeypatch.setattr("duplex.features.shared.extract", None)  # the sample is in the cache
    assert choose_resize(wide, EncoderParams(name=PACKAGED), CPU, lines.append) == entry
    assert lines[0] == lines[1]


def test_square_images_are_encoded_once(drawn, monkeypatch):
    monkeypatch.setattr(resize_choice, "load_encoder", None)
    entry = EncoderParams(name=PACKAGED)
    lines: list[str] = []
    assert choose_resize(read_labelled_folder(drawn), entry, CPU, lines.append) is entry
    assert lines == []


def test_the_sample_has_no_test_image_and_depends_on_contents_alone(drawn, monkeypatch):
    monkeypatch.setattr(resize_choice, "SAMPLE", {"train": 9, "val": 4})
    data = read_labelled_folder(drawn)
    rows = sampled_rows(data)
    picked = data.manifest.iloc[rows]
    assert set(picked["split"]) == {"train", "val"} and len(picked) == 13
    train = picked[picked["split"] == "train"]
    counts = train.groupby(["state", "object"]).size()
    assert counts.max() - counts.min() <= 1
    order = list(reversed(range(len(data.manifest))))
    manifest = data.manifest.iloc[order].reset_index(drop=True)
    turned = LabelledFolder(data.root, manifest, data.labels, [data.digests[row] for row in order], data.pixels)
    again = turned.manifest.iloc[sampled_rows(turned)]
    assert set(again["image"]) == set(picked["image"])


@pytest.mark.parametrize(("size", "long"), [((400, 300), 0.0), ((401, 300), 1.0), ((300, 401), 1.0), ((300, 300), 0.0)])
def test_images_are_long_above_a_third(drawn, tmp_path, size, long):
    data = read_labelled_folder(drawn)
    Image.new("RGB", size).save(tmp_path / "image.png")
    folder = LabelledFolder(tmp_path, data.manifest, data.labels, data.digests, data.pixels)
    assert share_of_long(folder, ["image.png"]) == long
    assert share_of_long(folder, ["image.png#xywh=0,0,30,20", "image.png#xywh=0,0,30,30"]) == 0.5
    assert share_of_long(folder, ["missing.png"]) == 0.0


@pytest.mark.parametrize(("mode", "way"), [("shortest", "crop"), ("squash", "squash"), ("longest", "pad")])
def test_the_encoders_own_way_has_a_name(tmp_path: Path, mode, way):
    assert own_way(EncoderParams(name=write_folder(tmp_path, resize_mode=mode))) == way
