"""Copies of images are found by bytes and by pixels, and splits keep them together."""

import errno
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from duplex.data import contents
from duplex.data.contents import (
    SplitOptions,
    changed_images,
    content_keys,
    file_digests,
    near_copies,
    read_digests,
    split_at_random,
    split_by_content,
)
from duplex.data.images import ORIENTATION_TAG, BadImageFile, MachineFault, read_image
from duplex.data.shapes import OBJECTS, draw
from duplex.data.sources import detect_source, load_source
from duplex.data.tables import resplit
from duplex.errors import DuplexError
from tests.data.makers import make_folder
from tests.data.test_split import frame_of

GRIDS = st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.integers(1, 9), min_size=4, max_size=25)


def split_or_assume(*given):
    try:
        return split_by_content(*given)
    except DuplexError as error:
        assume("hold out" not in str(error))
        raise


@settings(max_examples=12, deadline=None)
@given(GRIDS, st.integers(0, 99))
def test_without_equal_contents_the_split_is_that_of_the_rows(grid, seed) -> None:
    frame, options = frame_of(grid), SplitOptions(seed)
    made = split_or_assume(frame, frame["image"].tolist(), options)
    expected = split_at_random(frame, options)
    assert made.split.tolist() == expected.split.tolist() and made.short == expected.short


@settings(max_examples=20, deadline=None)
@given(GRIDS, st.integers(0, 99), st.integers(1, 12), st.randoms())
def test_equal_contents_of_a_pair_are_in_one_split_whatever_the_order_of_rows(grid, seed, contents, random) -> None:
    frame, options = frame_of(grid), SplitOptions(seed)
    keys = [f"{row.state} {row.object} {random.randrange(contents)}" for row in frame.itertuples()]
    made = split_or_assume(frame, keys, options)
    assert (frame.assign(key=keys, split=made.split).groupby("key")["split"].nunique() == 1).all()
    training = frame[made.split == "train"]
    for kind in ("state", "object"):
        assert set(training[kind]) == set(frame[kind])
    order = random.sample(range(len(frame)), len(frame))
    again = split_by_content(frame.iloc[order], [keys[i] for i in order], options)
    assert again.split.tolist() == made.split.iloc[order].tolist()


@settings(max_examples=20, deadline=None)
@given(GRIDS, st.integers(0, 99), st.integers(2, 30), st.randoms())
def test_contents_of_several_pairs_leave_seen_pairs_seen_and_unseen_ones_unseen(grid, seed, contents, random) -> None:
    frame, options = frame_of(grid), SplitOptions(seed)
    keys = [str(random.randrange(contents)) for _ in range(len(frame))]
    made = split_or_assume(frame, keys, options)
    firsts = frame.assign(key=keys).sort_values(["state", "object", "image"])
    firsts = firsts.drop_duplicates(["key", "state", "object"])
    plain = firsts[split_at_random(firsts[["image", "state", "object"]], options).split.to_numpy() == "train"]
    training = frame[made.split == "train"]
    pairs = (set(zip(rows["state"], rows["object"], strict=True)) for rows in (plain, training))
    assert next(pairs) == next(pairs)


def test_a_content_of_two_pairs_follows_the_held_out_pair_or_training() -> None:
    frame = frame_of({(s, o): 6 for s in range(4) for o in range(4)})
    options = SplitOptions(0)
    rows = frame.assign(split=split_at_random(frame, options).split, pair=frame["state"] + frame["object"])
    known = rows["pair"].isin(rows["pair"][rows["split"] == "train"])
    trained = rows.index[rows["split"] == "train"][0]
    held_out = rows.index[(rows["split"] == "test") & ~known][0]
    validated = rows.index[(rows["split"] == "val") & known & (rows["pair"] != rows["pair"][trained])][0]
    for other, expected in ((held_out, "test"), (validated, "train")):
        keys = frame["image"].tolist()
        keys[trained] = keys[other]
        made = split_by_content(frame, keys, options).split
        assert (made[trained], made[other]) == (expected, expected)
        assert (made == rows["split"]).sum() == len(frame) - 1


def noise(seed: int, size: tuple[int, int] = (40, 24), kind: type = np.uint8) -> Image.Image:
    shape = size[::-1] if kind is np.uint16 else (*size[::-1], 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, np.iinfo(kind).max, shape).astype(kind))


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with copies of equal bytes and of equal pixels, 16-bit greyscale images, and files that are no images."""
    root = tmp_path_factory.mktemp("gallery")
    for name in ("a.png", "a.bmp", "a.tiff"):
        noise(0).save(root / name)
    noise(0).save(root / "a_small.png", compress_level=9)
    (root / "a_copy.png").write_bytes((root / "a.png").read_bytes())
    noise(0, (24, 40)).save(root / "other_shape.png")
    noise(1).save(root / "b.jpg", quality=95)
    data = (root / "b.jpg").read_bytes()
    (root / "b_with_comment.jpg").write_bytes(data[:2] + b"\xff\xfe\x00\x04ok" + data[2:])
    with Image.open(root / "b.jpg") as image:
        image.save(root / "b_decoded.png")
        for orientation in range(2, 9):
            exif = Image.Exif()
            exif[ORIENTATION_TAG] = orientation
            image.save(root / f"turned{orientation}.png", exif=exif)
            ImageOps.exif_transpose(Image.open(root / f"turned{orientation}.png")).save(
                root / f"upright{orientation}.bmp"
            )
    deep = np.array(noise(2, kind=np.uint16)) // 257 * 257  # of 257 values an encoder sees one
    for name, values in (("deep.png", deep), ("deep.tiff", deep), ("deep_low_bits.png", deep + (deep < 65535))):
        Image.fromarray(values).save(root / name)
    noise(3, kind=np.uint16).save(root / "deep_other.png")
    (root / "float.tiff").write_bytes(b"")
    Image.fromarray(np.ones((24, 40), dtype=np.float32)).save(root / "float.tiff")
    for name in ("broken1.jpg", "broken2.jpg", "broken3.jpg"):
        (root / name).write_bytes(b"no image" if name != "broken3.jpg" else b"no image either")
    return root


def naive_key(path: Path) -> tuple[object, ...]:
    if not path.exists():
        return ("missing", path.name)
    try:
        image = read_image(path)
    except BadImageFile:
        return ("unreadable", path.read_bytes())
    return image.size, image.tobytes()


def same(keys: Sequence[object]) -> list[list[bool]]:
    return [[a == b for b in keys] for a in keys]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_all_users_agree_which_images_are_copies(gallery: Path, data: st.DataObject) -> None:
    present = sorted(os.listdir(gallery))
    names = data.draw(st.one_of(st.just(present), st.lists(st.sampled_from(present), unique=True)))
    expected = same([naive_key(gallery / name) for name in [*names, "missing.png"]])
    assert same(content_keys(gallery, [*names, "missing.png"])) == expected
    files, pixels = read_digests(gallery, names, {})
    assert same([pixels[file] for file in files]) == [row[:-1] for row in expected[:-1]]
    assert files == file_digests(gallery, names)


def test_images_saved_or_scaled_again_are_near_copies_of_one_and_of_no_other(tmp_path: Path) -> None:
    names = [f"{state}_{thing}/0001.png" for state in ("red", "dark", "striped", "blurry") for thing in OBJECTS]
    copies = []
    for number, name in enumerate(names):
        side, quality = [(64, 75), (48, 90), (96, 80), (32, 95)][number % 4]
        (tmp_path / name).parent.mkdir()
        image = draw(name)
        image.save(tmp_path / name)
        image.resize((side, side)).save(tmp_path / f"{number}.jpg", quality=quality)
        copies.append(f"{number}.jpg")
    keys = content_keys(tmp_path, [*names, *copies])
    count = len(names)
    assert len(set(keys[:count])) == count
    assert sum(a == b for a, b in zip(keys[:count], keys[count:], strict=True)) >= 0.95 * count


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(0, 9999), st.sampled_from([1, 3, 7, 256]))
def test_near_copies_are_those_of_a_comparison_of_all_pairs(count, seed, block) -> None:
    random = np.random.default_rng(seed)
    looks = random.integers(0, 256, (4, 192))[random.integers(0, 4, count)] + random.integers(-4, 5, (count, 192))
    looks = np.clip(looks, 0, 255).astype(np.uint8)
    looks[0] = 0
    x = looks / 255
    deviation = np.array([np.sqrt(((row.reshape(-1, 3) - row.reshape(-1, 3).mean(0)) ** 2).mean()) for row in x])
    distance = np.sqrt(((x[:, None] - x) ** 2).mean(axis=2))
    limit = np.minimum(0.015, 0.2 * np.minimum(deviation[:, None], deviation))
    assume(np.abs(distance - limit)[np.triu_indices(count, 1)].min() > 1e-5)  # else rounding decides
    expected = np.argwhere(np.triu((distance <= limit) & (limit > 0), 1)).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "BLOCK", block)
        assert near_copies(looks).tolist() == expected


def test_both_digests_are_of_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise(0).save(tmp_path / "a.png")
    expected = read_digests(tmp_path, ["a.png"], {})
    decode = contents.decode_image

    def replaced_meanwhile(data: io.BytesIO, **options: Any) -> Image.Image:
        noise(9).save(tmp_path / "a.png")
        return decode(data, **options)

    monkeypatch.setattr(contents, "decode_image", replaced_meanwhile)
    assert read_digests(tmp_path, ["a.png"], {}) == expected


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (MemoryError(), "there was not enough memory"),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files"),
    ],
)
def test_a_fault_of_the_machine_is_an_error_that_names_the_file(gallery, monkeypatch, fault, says) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("duplex.data.images.as_rgb", exhausted)
    for digests in (content_keys, lambda root, names: read_digests(root, names, {})):
        with pytest.raises(MachineFault, match=rf"a\.\w+ could not be read: {says}"):
            digests(gallery, ["a.png", "a.bmp"])


def test_changed_images_are_those_whose_digest_differs(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "c.png", "missing.png"]
    for seed, name in enumerate(names[:3]):
        noise(seed).save(tmp_path / name)
    images = dict(zip(file_digests(tmp_path, names), names, strict=True))
    assert changed_images(tmp_path, images) == []
    (tmp_path / "b.png").unlink()
    noise(9).save(tmp_path / "c.png")
    assert changed_images(tmp_path, images) == ["b.png", "c.png"]


@pytest.mark.parametrize("number", [None, 1])
def test_a_folder_with_every_image_twice_has_no_content_in_two_splits(tmp_path: Path, number: int | None) -> None:
    make_folder(tmp_path, "nested")
    for path in list(tmp_path.rglob("*.png")):
        with Image.open(path) as image:
            image.save(path.with_name(f"{path.stem}_again.bmp"))
    data = load_source(detect_source(tmp_path))
    data = data if number is None else resplit(data, number)
    rows = data.manifest.assign(stem=data.manifest["image"].str.replace(r"(_again)?\.\w+$", "", regex=True))
    assert (rows.groupby("stem")["image"].count() == 2).all()
    assert (rows.groupby("stem")["split"].nunique() == 1).all()
