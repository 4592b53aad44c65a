"""Labelled images that `duplex fit` cannot use, and copies of images, which it uses once or not at all."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from duplex.data.sources import detect_source
from duplex.errors import UsageError
from duplex.project.suspects import open_labelled
from duplex.recognition import fit
from duplex.recognition.labelled_folder import (
    describe,
    distinct_images,
    hidden_pairs,
    read_labelled_folder,
    words_of_one_pair,
)
from tests.data.makers import make_standard, rows
from tests.recognition.drawn_folder import OBJECTS, STATES, draw_folder, draw_pair
from tests.subprocesses import duplex

pytestmark = pytest.mark.slow


def copy_with_another_label(root: Path) -> None:
    shutil.copy(draw_folder(root, 2) / "red" / "star" / "0000.png", root / "blue" / "heart" / "copy.png")


BAD: dict[str, Callable[[Path], object]] = {  # said -> what is drawn
    "has only one state, 'red'": lambda root: [draw_pair(root, "red", thing, range(4)) for thing in OBJECTS],
    "has only one object, 'star'": lambda root: [draw_pair(root, state, "star", range(4)) for state in STATES],
    "has no image of a seen pair": lambda root: draw_folder(root, 1),
    "too few to hold": lambda root: [draw_pair(root, *pair, range(4)) for pair in zip(STATES, OBJECTS, strict=True)],
    "occur with two labels; for example": copy_with_another_label,
    "holds no images": Path.mkdir,
}


@pytest.mark.parametrize("said", BAD)
def test_data_that_cannot_be_fitted_are_one_line_and_leave_nothing(tmp_path, said):
    BAD[said](tmp_path / "shop")
    done = duplex("fit", tmp_path / "shop", "--encoder", "tiny", cwd=tmp_path)
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if "reading images" not in line]
    assert len(lines) == 1, done.stderr
    assert said in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]


def test_missing_images_of_a_table_are_named(tmp_path):
    paths = sorted(draw_folder(tmp_path / "shop", images=4).glob("*/*/*.png"))
    names = [path.relative_to(tmp_path / "shop") for path in paths]
    rows = [f"{name},{name.parts[0]},{name.parts[1]}\n" for name in names]
    (tmp_path / "shop.csv").write_text("image,state,object\n" + "".join([*rows, "no.png,red,star\n"]))
    assert read_labelled_folder(tmp_path / "shop.csv", tmp_path / "shop").notes == (
        "1 images left out because they are missing: no.png",
    )


def test_few_contents_with_two_labels_are_left_out(tmp_path):
    draw_folder(tmp_path / "shop", images=16)
    shutil.copy(tmp_path / "shop" / "red" / "star" / "0000.png", tmp_path / "shop" / "blue" / "heart" / "copy.png")
    data = read_labelled_folder(tmp_path / "shop")
    assert data.notes == (
        "2 images left out because copies have another label: blue/heart/copy.png, red/star/0000.png",
    )
    assert not {"red/star/0000.png", "blue/heart/copy.png"} & set(data.manifest["image"])


def test_a_benchmarks_folder_has_the_labels_of_its_lists(tmp_path):
    """`duplex update` and `duplex suspects` read images and labels as `duplex fit` does, not by folders' names."""
    count = make_standard(tmp_path, "plain")
    for table in (distinct_images(detect_source(tmp_path), tmp_path).rows, open_labelled(str(tmp_path)).table):
        assert len(table) == count and set(table["state"]) == {row[1] for row in rows()}


def test_rows_with_only_a_state_are_refused_before_an_image_is_read(tmp_path):
    (tmp_path / "t.csv").write_text("image,state,object,split\n0.png,red,star,train\n1.png,red,,train\n")
    with pytest.raises(UsageError, match=r"some rows of .*t\.csv \(1\) have only a state or an object; complete or"):
        read_labelled_folder(tmp_path / "t.csv")


def test_images_that_are_nowhere_are_named(tmp_path, drawn):
    (drawn.parent / "t.csv").write_text("image,state,object\nred\\star\\0.png,red,star\n")
    with pytest.raises(UsageError, match=r"none of its 1 images, such as 'red\\\\star\\\\0.png', exists below "):
        fit.fit_folder(drawn.parent / "t.csv", tmp_path / "out", say=lambda _: None)


def save_as_bmp(image: Path, copy: Path) -> None:
    with Image.open(image) as pixels:
        pixels.save(copy)


def test_images_with_equal_pixels_are_used_once(drawn, tmp_path):
    shop = shutil.copytree(drawn, tmp_path / "shop")
    before = read_labelled_folder(shop)
    for path in list(shop.rglob("*.png")):
        save_as_bmp(path, path.with_name(f"{path.stem}.z.bmp"))
    data = read_labelled_folder(shop)
    assert data.manifest.equals(before.manifest) and data.digests == before.digests
    assert data.notes[0].startswith(f"{len(before.digests)} images left out because another has the same content: ")


def test_near_copies_are_kept_in_one_split_and_counted(drawn, tmp_path):
    shop = shutil.copytree(drawn, tmp_path / "shop")
    before = read_labelled_folder(shop).manifest.set_index("image")["split"]
    for path in list(shop.rglob("*.png")):
        with Image.open(path) as image:
            image.save(path.with_name(f"{path.stem}_again.jpg"), quality=80)
    data = read_labelled_folder(shop)
    split = data.manifest.set_index("image")["split"]
    assert split[before.index].equals(before)
    copies = split[split.index.str.endswith(".jpg")]
    assert (copies.to_numpy() == split[copies.index.str.replace("_again.jpg", ".png")].to_numpy()).mean() > 0.95
    assert any(
        "pairs of images are near-copies, saved or scaled again, each in one split: " in note for note in data.notes
    )
    table = data.manifest.assign(split=data.manifest["split"].where(~split.index.str.endswith(".jpg"), "test"))
    table.to_csv(tmp_path / "shop.csv", index=False)
    notes = read_labelled_folder(tmp_path / "shop.csv", shop).notes
    assert any("in two splits, which flatter the measured numbers: " in note for note in notes)


def test_equal_pixels_with_another_label_or_in_another_split_are_no_images_of_their_own(drawn, tmp_path):
    shop = shutil.copytree(drawn, tmp_path / "shop")
    save_as_bmp(shop / "red" / "star" / "0000.png", shop / "red" / "star" / "copy.bmp")
    rows = read_labelled_folder(shop).manifest
    table = rows[rows["image"] != "red/star/copy.bmp"]
    copy = table[table["image"] == "red/star/0000.png"].assign(image="red/star/copy.bmp", split="test")
    pd.concat([table, copy]).to_csv(tmp_path / "shop.csv", index=False)
    data = read_labelled_folder(tmp_path / "shop.csv", shop)
    assert "red/star/copy.bmp" not in set(data.manifest["image"]) and len(data.manifest) == len(table)
    for number in range(8):
        save_as_bmp(shop / "red" / "star" / f"{number:04d}.png", shop / "blue" / "heart" / f"{number}.bmp")
    with pytest.raises(
        UsageError, match=r"some images \(8\) occur with two labels; for example, .* have equal pixels; keep only"
    ):
        read_labelled_folder(shop)


def test_few_new_pairs_are_said_to_measure_little(tmp_path):
    draw_folder(tmp_path / "shop", images=8)
    shutil.rmtree(tmp_path / "shop" / "red" / "star")
    data = read_labelled_folder(tmp_path / "shop")
    said: list[str] = []
    describe(data, said.append)
    hidden = {split: len(hidden_pairs(data, split)) for split in ("val", "test")}
    assert said[1] == f"new pairs, which training does not see: {hidden['val']} in validation, {hidden['test']} in test"
    assert ("note: so few pairs" in said[2]) == (min(hidden.values()) < 3)
    train = data.manifest[data.manifest["split"] == "train"][["state", "object"]].drop_duplicates()
    single = [word for kind in ("state", "object") for word, rows in train.groupby(kind) if len(rows) == 1]
    assert words_of_one_pair(data.labels) == single
    assert any("trained in one pair only" in line for line in said) == bool(single)
