"""Every kind of file that a folder of images may hold."""

import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from benchmarks.measure import begin_peak, memory
from duplex.data.images import MAX_PIXELS, BadImageFile, as_rgb, decode_image, read_image
from duplex.features.file import REASONS, read_features
from tests.data.makers import encoded

RANDOM = np.random.default_rng(0)


def noise(width: int = 30, height: int = 20) -> Image.Image:
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that claims to be enormous."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")
    )


GOOD: dict[str, Callable[[], bytes]] = {
    "wrong extension": lambda: encoded(noise(), "PNG"), "palette": lambda: encoded(noise().quantize(16), "PNG"),
    "palette with transparency": lambda: encoded(noise().quantize(16), "PNG", transparency=b"\0\x80"),
    "alpha": lambda: encoded(noise().convert("RGBA"), "PNG"),
    "grey and alpha": lambda: encoded(noise().convert("LA"), "PNG"),
    "one bit": lambda: encoded(noise().convert("1"), "PNG"), "cmyk": lambda: encoded(noise().convert("CMYK"), "JPEG"),
    "16 bit": lambda: encoded(Image.fromarray(RANDOM.integers(0, 65536, (9, 9)).astype(np.uint16)), "PNG"),
    "animated gif": lambda: encoded(noise(), "GIF", save_all=True, append_images=[noise(), noise()]),
    "animated webp": lambda: encoded(noise(), "WEBP", save_all=True, append_images=[noise()]),
    "1x1": lambda: encoded(noise(1, 1), "PNG"), "20000x1": lambda: encoded(noise(20_000, 1)),
    "1x20000": lambda: encoded(noise(1, 20_000)), "progressive": lambda: encoded(noise(), "JPEG", progressive=True),
}  # fmt: skip
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "text": (lambda: b"hello" * 99, "not an image"),
    "page": (lambda: b"<html><body>404</body></html>", "not an image"),
    "archive": (lambda: b"PK\x03\x04" + b"\0" * 99, "not an image"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "truncated jpeg": (lambda: encoded(noise(300, 300), "JPEG")[:5000], "damaged"),
    "truncated png": (lambda: encoded(noise(300, 300), "PNG")[:5000], "damaged"),
    "header alone": (lambda: encoded(noise(), "PNG")[:20], "damaged"),
    "float": (lambda: encoded(Image.fromarray(RANDOM.random((9, 9)).astype("f4")), "TIFF"), "unsupported pixel type"),
    "bomb": (lambda: bomb(60_000, 60_000), "too large"),
    "smaller bomb": (lambda: bomb(10_000, 10_000), "too large"),
    "false pixels": (lambda: bomb(2_000, 2_000), "damaged"),
}


@pytest.mark.parametrize("kind", GOOD)
def test_an_image_is_read_as_its_first_frame_in_rgb(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(GOOD[kind]())
    picture = read_image(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as plain:
        assert picture.mode == "RGB" and picture.size == ImageOps.exif_transpose(plain).size
        if kind != "16 bit":
            assert np.array_equal(np.asarray(picture), np.asarray(ImageOps.exif_transpose(plain.convert("RGB"))))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_an_image_is_turned_as_its_orientation_says(tmp_path: Path, format: str, orientation: int) -> None:
    stored, exif = Image.new("RGB", (32, 16)), Image.Exif()
    stored.paste((255, 255, 255), (0, 0, 8, 8))
    exif[0x0112] = orientation
    stored.save(tmp_path / "a", format, exif=exif)
    with Image.open(tmp_path / "a") as plain:
        shown = ImageOps.exif_transpose(plain)
        assert np.array_equal(np.asarray(read_image(tmp_path / "a")), np.asarray(shown))
        assert np.array_equal(np.asarray(as_rgb(plain)), np.asarray(shown))
        assert shown.size == ((32, 16) if orientation < 5 else (16, 32))


def test_damaged_metadata_turns_nothing(tmp_path: Path) -> None:
    noise().save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read_image(tmp_path / "a.jpg").size == noise().size


@pytest.mark.parametrize("kind", BAD)
def test_an_unreadable_file_has_a_reason_and_no_warning_of_pillow_is_shown(kind: str, tmp_path: Path) -> None:
    make, reason = BAD[kind]
    (tmp_path / "a.jpg").write_bytes(make())
    with warnings.catch_warnings(), pytest.raises(BadImageFile) as bad:
        warnings.simplefilter("error")
        read_image(tmp_path / "a.jpg")
    assert bad.value.reason == reason and reason in REASONS


def test_a_path_that_cannot_be_read_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "a.png").write_bytes(encoded(noise(), "PNG"))
    monkeypatch.setattr(os, "access", lambda path, how: how != os.R_OK or path.name != "a.png")
    unreadable = dict.fromkeys(("pipe.jpg", ".", "a\0b", "a.png"), "unreadable")
    for name, reason in {"absent.jpg": "missing", **unreadable}.items():
        with pytest.raises(BadImageFile) as bad:
            read_image(tmp_path / name)
        assert bad.value.reason == reason


def test_images_above_the_pixel_limit_are_refused(tmp_path: Path) -> None:
    assert MAX_PIXELS == Image.MAX_IMAGE_PIXELS
    data = encoded(noise(30, 20), "PNG")
    assert decode_image(io.BytesIO(data), max_pixels=600).size == (30, 20)
    with pytest.raises(BadImageFile, match="too large"):
        decode_image(io.BytesIO(data), max_pixels=599)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sixteen_bits_are_scaled_and_rounded_not_clipped(tmp_path: Path, dtype: type) -> None:
    Image.fromarray(np.array([[0, 128, 129, 257 * 10, 257 * 200, 65535]], dtype)).save(tmp_path / "a.tif")
    assert np.asarray(read_image(tmp_path / "a.tif"))[0].tolist() == [[v] * 3 for v in (0, 0, 1, 10, 200, 255)]


@pytest.mark.parametrize(("low", "high"), [(-1, 65_535), (0, 65_536), (-9, 70_000)])
def test_grey_that_does_not_fit_16_bits_is_refused(tmp_path: Path, low: int, high: int) -> None:
    Image.fromarray(np.array([[low, high]], np.int32)).save(tmp_path / "a.tif")
    with pytest.raises(BadImageFile, match="pixel type"):
        read_image(tmp_path / "a.tif")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(GOOD)), st.binary(min_size=1, max_size=30), st.floats(0, 1))
def test_damaged_bytes_raise_no_other_error(tmp_path_factory, kind: str, junk: bytes, where: float) -> None:
    data = bytearray(GOOD[kind]())
    place = int(where * len(data))
    data[place : place + len(junk)] = junk
    path = tmp_path_factory.mktemp("fuzz") / "a.jpg"
    path.write_bytes(data)
    try:
        assert read_image(path).mode == "RGB"
    except BadImageFile as bad:
        assert bad.reason in REASONS


def test_a_folder_of_hostile_files(run, encoder, tmp_path: Path) -> None:
    from duplex.features.extract import ExtractionSettings, extract

    (tmp_path / "hostile").mkdir()
    kinds = [*((make, None) for make in GOOD.values()), *BAD.values()] * 10
    names, reasons = [f"{index:04d}.jpg" for index in range(len(kinds))], [reason for _, reason in kinds]
    for name, (make, _) in zip(names, kinds, strict=True):
        (tmp_path / "hostile" / name).write_bytes(make())
    out = tmp_path / "h.h5"
    settings = ExtractionSettings(tmp_path / "hostile", "m", max_bad=1.0)
    before = begin_peak()
    report = extract(names, out, encoder, replace(settings, num_workers=0, batch_size=32))
    assert memory("VmHWM") - before < 400e6
    assert extract(names, out, encoder, settings).resumed == len(names), "what is bad for good is not overwritten"
    features = read_features(report.path)
    assert [(bad.row, bad.reason) for bad in report.bad] == [(row, why) for row, why in enumerate(reasons) if why]
    for row in RANDOM.choice(np.flatnonzero(~features.bad), 20, replace=False):
        alone = encoder.encode_images(encoder.image_transform(read_image(tmp_path / "hostile" / names[row]))[None])
        assert np.allclose(features.cls[row], alone[0].numpy(), atol=5e-3)
