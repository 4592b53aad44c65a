"""Splits keep images of equal content together: equal bytes, or equal pixels in another file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from duplex.data.contents import content_keys
from duplex.data.dataset import resplit
from duplex.data.dataset_source import detect_source, load_source
from duplex.data.source_options import SplitOptions
from duplex.data.split import make_split, split_by_content
from duplex.errors import DuplexError
from tests.data.makers import make_folder

GRIDS = st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.integers(1, 9), min_size=4, max_size=25)


def rows_of(grid: dict[tuple[int, int], int]) -> pd.DataFrame:
    rows = [(f"{s}/{o}/{i}.jpg", f"s{s}", f"o{o}") for (s, o), n in grid.items() for i in range(n)]
    return pd.DataFrame(rows, columns=["image", "state", "object"])


def split_or_assume(*given):
    try:
        return split_by_content(*given)
    except DuplexError as error:
        assume("held out" not in str(error))
        raise


@settings(max_examples=60, deadline=None)
@given(GRIDS, st.integers(0, 99))
def test_without_equal_contents_the_split_is_that_of_the_rows(grid, seed) -> None:
    frame, options = rows_of(grid), SplitOptions(seed)
    made = split_or_assume(frame, frame["image"].tolist(), options)
    expected = make_split(frame, options)
    assert made.split.tolist() == expected.split.tolist() and made.short == expected.short


@settings(max_examples=100, deadline=None)
@given(GRIDS, st.integers(0, 99), st.integers(1, 12), st.randoms())
def test_equal_contents_of_a_pair_are_in_one_split_whatever_the_order_of_rows(grid, seed, contents, random) -> None:
    frame, options = rows_of(grid), SplitOptions(seed)
    keys = [f"{row.state} {row.object} {random.randrange(contents)}" for row in frame.itertuples()]
    made = split_or_assume(frame, keys, options)
    assert (frame.assign(key=keys, split=made.split).groupby("key")["split"].nunique() == 1).all()
    training = frame[made.split == "train"]
    for kind in ("state", "object"):
        assert set(training[kind]) == set(frame[kind])
    order = list(range(len(frame)))
    random.shuffle(order)
    again = split_by_content(frame.iloc[order], [keys[i] for i in order], options)
    assert again.split.tolist() == made.split.iloc[order].tolist()


@settings(max_examples=100, deadline=None)
@given(GRIDS, st.integers(0, 99), st.integers(2, 30), st.randoms())
def test_contents_of_several_pairs_leave_seen_pairs_seen_and_unseen_ones_unseen(grid, seed, contents, random) -> None:
    frame, options = rows_of(grid), SplitOptions(seed)
    keys = [str(random.randrange(contents)) for _ in range(len(frame))]
    made = split_or_assume(frame, keys, options)
    firsts = frame.assign(key=keys).sort_values(["state", "object", "image"])
    firsts = firsts.drop_duplicates(["key", "state", "object"])
    plain = firsts[make_split(firsts[["image", "state", "object"]], options).split.to_numpy() == "train"]
    training = frame[made.split == "train"]
    pairs = (set(zip(rows["state"], rows["object"], strict=True)) for rows in (plain, training))
    assert next(pairs) == next(pairs)


def test_a_content_of_two_pairs_follows_the_held_out_pair_or_training() -> None:
    frame = rows_of({(s, o): 6 for s in range(4) for o in range(4)})
    options = SplitOptions(0)
    rows = frame.assign(split=make_split(frame, options).split, pair=frame["state"] + frame["object"])
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


def noise(seed: int, size: tuple[int, int] = (40, 24)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def naive_key(path: Path) -> tuple:
    try:
        with Image.open(path) as image:
            return ("pixels", image.size, ImageOps.exif_transpose(image).convert("RGB").tobytes())
    except OSError:
        return ("file", path)


def test_keys_are_equal_exactly_for_equal_bytes_or_pixels(tmp_path: Path) -> None:
    noise(0).save(tmp_path / "a.png")
    (tmp_path / "a_copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    noise(0).save(tmp_path / "a_small.png", compress_level=9)
    noise(0).save(tmp_path / "a.bmp")
    noise(1).save(tmp_path / "b.png")
    noise(0, (24, 40)).save(tmp_path / "other_shape.png")
    noise(2).save(tmp_path / "c.jpg")
    for seed in (3, 4):
        noise(seed, (64, 64)).save(tmp_path / f"d{seed}.jpg")
    for name in ("c", "d3"):
        data = (tmp_path / f"{name}.jpg").read_bytes()
        (tmp_path / f"{name}_with_comment.jpg").write_bytes(data[:2] + b"\xff\xfe\x00\x04ok" + data[2:])
    with Image.open(tmp_path / "c.jpg") as image:
        image.convert("RGB").save(tmp_path / "c_decoded.png")
    for name in ("broken1.jpg", "broken2.jpg"):
        (tmp_path / name).write_bytes(b"no image")
    names = [*sorted(path.name for path in tmp_path.iterdir()), "missing.png"]
    keys = content_keys(tmp_path, names)
    expected = [naive_key(tmp_path / name) for name in names]
    same = [[a == b for b in keys] for a in keys]
    assert same == [[a == b for b in expected] for a in expected]
    assert len(set(keys)) == len(names) - 6


def test_jpegs_with_equal_thumbnails_and_other_pixels_have_keys_of_their_own(tmp_path: Path) -> None:
    flat = np.full((64, 64, 3), 128, dtype=np.uint8)
    grid = flat.copy()
    grid[::2, ::2], grid[1::2, 1::2] = 100, 156  # the same mean in every 8 x 8 block
    for name, pixels in (("flat", flat), ("grid", grid)):
        Image.fromarray(pixels).save(tmp_path / f"{name}.jpg", quality=95)
    drafts = []
    for name in ("flat", "grid"):
        with Image.open(tmp_path / f"{name}.jpg") as image:
            image.draft("RGB", (1, 1))
            drafts.append(hashlib.sha256(image.tobytes()).hexdigest())
    assert drafts[0] == drafts[1]
    assert len(set(content_keys(tmp_path, ["flat.jpg", "grid.jpg"]))) == 2


def test_images_of_16_bits_have_keys_of_their_own(tmp_path: Path) -> None:
    """Conversion to RGB would make all of them white."""
    for seed, name in enumerate(("a.png", "b.png", "b_again.tiff")):
        values = np.random.default_rng(min(seed, 1)).integers(256, 65536, (24, 40)).astype(np.uint16)
        Image.fromarray(values).save(tmp_path / name)
    first, second, again = content_keys(tmp_path, ["a.png", "b.png", "b_again.tiff"])
    assert first != second == again


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
