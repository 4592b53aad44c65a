"""Digests of image files and of their pixels, and the file that keeps those of pixels."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from duplex.features.image_files import BadImageFile, read_image
from duplex.fitting import image_digests
from duplex.fitting.image_digests import (
    PIXELS,
    changed_images,
    content_digests,
    load_pixel_digests,
    read_digests,
    save_pixel_digests,
)


def noise(seed: int, shape: tuple[int, ...] = (24, 40, 3), kind: type = np.uint8) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, np.iinfo(kind).max, shape)
    return Image.fromarray(values.astype(kind))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Images with copies of equal bytes and of equal pixels, others with 16 bits, and files that are no images."""
    root = tmp_path / "images"
    root.mkdir()
    for name in ("a.png", "a.bmp", "a.tiff"):
        noise(0).save(root / name)
    (root / "a_copy.png").write_bytes((root / "a.png").read_bytes())
    noise(0, (40, 24, 3)).save(root / "other_shape.png")
    noise(1).save(root / "b.jpg")
    with Image.open(root / "b.jpg") as image:
        image.save(root / "b_decoded.png")
    for seed in (2, 3):  # conversion by Pillow alone would make both white
        noise(seed, (24, 40), np.uint16).save(root / f"deep{seed}.png")
    for name in ("broken1.jpg", "broken2.jpg"):
        (root / name).write_bytes(name.encode())
    return root


def naive_pixels(path: Path) -> tuple[object, ...]:
    try:
        image = read_image(path)
    except BadImageFile:
        return ("unreadable", path.name)
    return image.size, image.tobytes()


def test_digests_are_equal_exactly_for_equal_bytes_and_for_equal_pixels(root: Path) -> None:
    names = sorted(os.listdir(root))
    files, pixels = read_digests(root, [*names, "missing.png"], {})
    assert files == content_digests(root, [*names, "missing.png"])
    assert files[-1] == ""
    keys = [pixels[file] for file in files[:-1]]
    expected = [naive_pixels(root / name) for name in names]
    assert [[a == b for b in keys] for a in keys] == [[a == b for b in expected] for a in expected]
    assert len(set(keys)) == len(names) - 4


def test_known_images_are_not_decoded(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted(os.listdir(root))
    first = read_digests(root, names, {})
    save_pixel_digests(tmp_path, first[1])
    decoded: list[str] = []
    decode = image_digests._pixel_digest
    monkeypatch.setattr(
        image_digests, "_pixel_digest", lambda path, data: decoded.append(path.name) or decode(path, data)
    )
    assert read_digests(root, names, load_pixel_digests(tmp_path)) == first
    assert sorted(decoded) == ["broken1.jpg", "broken2.jpg"]  # which another version of Pillow may read


def test_both_digests_are_of_the_same_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_digests(root, ["a.png"], {})
    decode = image_digests.decode_image

    def replaced_meanwhile(data: io.BytesIO) -> Image.Image:
        noise(9).save(root / "a.png")
        return decode(data)

    monkeypatch.setattr(image_digests, "decode_image", replaced_meanwhile)
    assert read_digests(root, ["a.png"], {}) == expected


def test_too_little_memory_is_an_error_that_names_the_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("duplex.features.image_files.as_rgb", exhausted)
    with pytest.raises(image_digests.MachineFault, match=r"a\.png could not be read: there was not enough memory"):
        read_digests(root, ["a.png"], {})


def other_pixels(path: Path) -> None:
    record = json.loads(path.read_text())
    record["pixels"] = dict.fromkeys(record["pixels"], "0")
    path.write_text(json.dumps(record))


def other_decoder(path: Path) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps(image_digests.with_checksum({**record, "decoder": "Pillow 1.0"})))


DAMAGE = {
    "missing": Path.unlink,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "no text": lambda path: path.write_bytes(b"\xff"),
    "nothing but brackets": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "other pixels": other_pixels,
    "another decoder": other_decoder,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_pixel_digests_counts_as_empty(root: Path, tmp_path: Path, damage: str) -> None:
    _, pixels = read_digests(root, ["a.png", "b.jpg"], {})
    save_pixel_digests(tmp_path, pixels)
    assert load_pixel_digests(tmp_path) == pixels
    DAMAGE[damage](tmp_path / PIXELS)
    assert load_pixel_digests(tmp_path) == {}


def test_changed_images_are_those_whose_digest_differs(root: Path) -> None:
    names = ["a.png", "b.jpg", "deep2.png", "missing.png"]
    images = {hashlib.sha256((root / name).read_bytes()).hexdigest(): name for name in names[:3]} | {"": names[3]}
    assert changed_images(root, images) == []
    (root / "b.jpg").unlink()
    noise(9).save(root / "deep2.png")
    assert changed_images(root, images) == ["b.jpg", "deep2.png"]
