"""The standard layout with each benchmark's quirks; metadata and pair lists that are not what they should be."""

import os
import pickle
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplex.data.sources import METADATA, load_czsl, load_source, read_pair_list, read_pair_lists
from duplex.data.tables import count_dataset, read_manifest, write_manifest
from duplex.errors import DuplexError
from duplex.options import SourceOptions
from tests.data.makers import QUIRKS, Row, make_standard, rows, write_lists

SMALL: list[Row] = [
    ("a.jpg", "red", "car", "train"), ("b.jpg", "old", "dog", "train"), ("c.jpg", "red", "dog", "val"),
    ("d.jpg", "old", "car", "test"),
]  # fmt: skip
ANY_FILE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def small(root: Path, records: Any) -> Path:
    write_lists(root, SMALL)
    torch.save(records, root / METADATA)
    return root


def record(image: str, state: str = "red", thing: str = "car", split: str = "train", **more: Any) -> dict[str, Any]:
    return {"image": image, "attr": state, "obj": thing, "set": split, **more}


@pytest.mark.parametrize("quirk", QUIRKS)
def test_images_are_found_in_the_folders_of_each_benchmark(tmp_path: Path, quirk: str) -> None:
    good = make_standard(tmp_path, quirk)
    dataset = load_source(SourceOptions("standard", tmp_path))
    assert len(dataset.manifest) == good == len(rows())
    assert all((tmp_path / image).is_file() for image in dataset.manifest["image"])
    assert dataset.notes == {
        "rows left out because their state, object or split is NA": 2,
        "rows left out because their pair is in no list": 1,
    }
    assert list(dataset.manifest["split"]) == [split for *_, split in rows()]
    counted = count_dataset(dataset.labels, dataset.manifest).to_dict()
    assert (counted["states"], counted["objects"]) == (4, 4)
    assert counted["train"] == {"seen": 12, "images": 24}
    assert counted["val"] == {"seen": 12, "unseen": 2, "images": 20}
    write_manifest(dataset.manifest, tmp_path / "manifest.csv")
    pd.testing.assert_frame_equal(read_manifest(tmp_path / "manifest.csv"), dataset.manifest)


def test_folders_with_underscores_are_found(tmp_path: Path) -> None:
    small(tmp_path, [record("old_car/x y.jpg")])
    (tmp_path / "images/old_car").mkdir(parents=True)
    (tmp_path / "images/old_car/x y.jpg").touch()
    assert load_czsl(tmp_path).manifest["image"].tolist() == ["images/old_car/x y.jpg"]


def test_pair_lists_may_join_words_with_a_plus(tmp_path: Path) -> None:
    listed = [("1.jpg", "light brown", "dining table", "train"), ("2.jpg", "wet", "dining table", "test")]
    records = [record(f"crops/{image}", *rest) for image, *rest in listed]
    small(tmp_path, [*records, record("crops/3.jpg", "light brown", "dining table", "val")])
    for split, pairs in {"train": "light brown+dining table", "val": "light brown + dining table"}.items():
        (tmp_path / f"compositional-split-natural/{split}_pairs.txt").write_text(f"{pairs}\n")
    (tmp_path / "compositional-split-natural/test_pairs.txt").write_text("wet+dining table\n")
    dataset = load_czsl(tmp_path)
    assert dataset.labels.pairs["train"] == dataset.labels.pairs["val"] != dataset.labels.pairs["test"]
    assert sorted(dataset.labels.states) == ["light brown", "wet"] and dataset.labels.objects == ("dining table",)
    assert list(dataset.manifest["state"]) == ["light brown", "wet", "light brown"] and not dataset.notes


def test_missing_images_keep_the_path_of_the_metadata(tmp_path: Path) -> None:
    small(tmp_path, [record("red_car/Grün-1.2.jpg"), record("./a//b.jpg", _image="brand/b.jpg")])
    assert load_czsl(tmp_path).manifest["image"].tolist() == ["images/red_car/Grün-1.2.jpg", "images/a/b.jpg"]


def test_the_set_is_the_split_and_rows_of_unlisted_pairs_are_counted(tmp_path: Path) -> None:
    records = [record("1"), record("2", "red", "dog", "val"), record("3", "red", "dog", "train"), record("4", "x", "y")]
    dataset = load_czsl(small(tmp_path, records))
    assert list(dataset.manifest["split"]) == ["train", "val"]
    assert dataset.notes == {
        "rows left out because their pair is in no list": 1,
        "rows left out because their pair is only in another split's list": 1,
    }


@pytest.mark.parametrize(
    "image", ["../x.jpg", "a/../../x.jpg", "/etc/passwd", "C:\\x.jpg", "..\\x.jpg", "a\nb.jpg", "./", "a\0b"]
)
@pytest.mark.parametrize("key", ["image", "_image"])
def test_paths_that_leave_the_root_are_refused(tmp_path: Path, image: str, key: str) -> None:
    small(tmp_path, [{**record("x.jpg", _image="x.jpg"), key: image}])
    with pytest.raises(DuplexError, match="row 1"):
        load_czsl(tmp_path)


@pytest.mark.parametrize("link", ["images", "images/folder", "images/folder/x.jpg"])
def test_links_that_leave_the_root_are_refused(tmp_path: Path, link: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (outside / "images/folder").mkdir(parents=True)
    (outside / "images/folder/x.jpg").touch()
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(outside / link)
    small(root, [record("folder/x.jpg")])
    with pytest.raises(DuplexError, match="leaves the images' folder"):
        load_czsl(root)


def test_a_link_within_the_root_and_a_linked_root_are_fine(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "images").mkdir(parents=True)
    (root / "kept.jpg").touch()
    (root / "images/x.jpg").symlink_to(root / "kept.jpg")
    small(root, [record("x.jpg")])
    (tmp_path / "link").symlink_to(root)
    assert load_czsl(tmp_path / "link").manifest["image"].tolist() == ["images/x.jpg"]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "none of its pairs is listed in"),
        ([1, 2], "not a list of records"),
        ([{"image": "x"}], "attr is None"),
        ([record("x", split="dev")], "'set' is 'dev'; expected train, val, test or NA"),
        ([record("x", thing=3)], "obj is 3"),  # type: ignore[arg-type]
    ],
)
def test_malformed_metadata_is_refused(tmp_path: Path, records: Any, says: str) -> None:
    with pytest.raises(DuplexError, match=says):
        load_czsl(small(tmp_path, records))


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["DUPLEX_TEST_TRAP"],)


@pytest.mark.parametrize("form", ["torch zip", "pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, form, monkeypatch) -> None:
    trap = tmp_path / "trap"
    monkeypatch.setenv("DUPLEX_TEST_TRAP", str(trap))
    small(tmp_path, [Hostile()])
    if form == "pickle":
        (tmp_path / METADATA).write_bytes(pickle.dumps([Hostile()]))
    with pytest.raises(DuplexError, match=r"by `torch.load\(weights_only=True\)`: .* or would run code"):
        load_czsl(tmp_path)
    assert not trap.exists()


@ANY_FILE
@given(data=st.data())
def test_any_metadata_bytes_give_a_result_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    small(tmp_path, [record(f"{i}.jpg") for i in range(3)])
    path = tmp_path / METADATA
    whole = path.read_bytes()
    kind = data.draw(st.sampled_from(["noise", "cut", "flip", "pickle"]))
    if kind == "noise":
        path.write_bytes(data.draw(st.binary(max_size=300)))
    elif kind == "cut":
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    elif kind == "flip":
        at = data.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :])
    else:
        path.write_bytes(pickle.dumps(data.draw(st.lists(st.dictionaries(st.text(max_size=5), st.integers())))))
    try:
        dataset = load_czsl(tmp_path)
    except DuplexError as error:
        assert "\n" not in str(error)
    else:
        assert len(dataset.manifest) + sum(dataset.notes.values()) == 3


TEXTS = st.sampled_from(
    ["red", "car", "old", "dog", "NA", "train", "val", "x/y.jpg", "\ud800", "", "..", "a\x00", None, 7]
)
RECORDS = st.lists(st.fixed_dictionaries(dict.fromkeys(("image", "attr", "obj", "set"), TEXTS)), max_size=5)


@ANY_FILE
@given(records=RECORDS)
def test_any_records_are_counted_or_refused(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    try:
        dataset = load_czsl(small(tmp_path, records))
    except DuplexError:
        return
    assert len(dataset.manifest) + sum(dataset.notes.values()) == len(records)
    write_manifest(dataset.manifest, tmp_path / "manifest.csv")
    assert read_manifest(tmp_path / "manifest.csv").to_numpy().tolist() == dataset.manifest.to_numpy().tolist()


def test_empty_metadata_and_absent_lists(tmp_path: Path) -> None:
    (tmp_path / "train_pairs.txt").write_text("red car\n")
    with pytest.raises(DuplexError, match=r"val_pairs\.txt does not exist"):
        read_pair_lists(tmp_path)
    (tmp_path / "train_pairs.txt").unlink()
    (small(tmp_path, []) / METADATA).write_bytes(b"")
    with pytest.raises(DuplexError, match=r"cannot be read by `torch\.load"):
        load_czsl(tmp_path)
    (tmp_path / METADATA).unlink()
    with pytest.raises(DuplexError, match="does not exist"):
        load_czsl(tmp_path)


def test_pair_lists_may_lie_in_the_root(tmp_path: Path) -> None:
    write_lists(tmp_path / "deep", SMALL)
    (tmp_path / "flat").mkdir()
    for path in (tmp_path / "deep").rglob("*.txt"):
        (tmp_path / "flat" / path.name).write_bytes(path.read_bytes())
    assert read_pair_lists(tmp_path / "deep") == read_pair_lists(tmp_path / "flat")


GOOD = [("red", "car"), ("Faux.Fur", "Boots.Mid-Calf"), ("grün", "été")]
BODY = "".join(f"{s} {o}\n" for s, o in GOOD)


@pytest.mark.parametrize(
    "data",
    [BODY.encode(), BODY.replace("\n", "\r\n").encode(), BODY.replace("\n", "\r").encode(), BODY.encode("utf-8-sig"),
     BODY.encode("utf-16"), BODY.strip().encode(), BODY.replace("\n", "\n\n \t\n").encode(),
     BODY.replace(" ", " \t ").encode()],
    ids=["plain", "crlf", "cr", "bom", "utf-16", "no last line end", "blank lines", "wide gaps"],
)  # fmt: skip
def test_every_way_to_save_the_same_list(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "list.txt").write_bytes(data)
    assert read_pair_list(tmp_path / "list.txt") == GOOD


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "lists no pairs"), (b"red car\nred\n", "line 2"), ("grün auto\n".encode("latin-1"), "not UTF-8"),
     (b"red c\0r\n", "zero byte"), (b"red c\x07r\n", "contains an unprintable"), (b"red ...\n", "no word for a prompt"),
     ("red car\u2028blue".encode(), "contains an unprintable")],
)  # fmt: skip
def test_bad_lists_are_errors(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "list.txt").write_bytes(data)
    with pytest.raises(DuplexError, match=says) as caught:
        read_pair_list(tmp_path / "list.txt")
    assert "list.txt" in str(caught.value) and "\n" not in str(caught.value)


@ANY_FILE
@given(data=st.one_of(st.binary(max_size=200), st.text("ab+ \t\r\n.é\u2028\x85\x0b", max_size=60).map(str.encode)))
def test_any_bytes_give_every_line_or_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(data)
    try:
        pairs = read_pair_list(path)
    except DuplexError:
        return
    if not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        expected = []
        for line in text.replace("\t", " ").split("\n"):
            joined = line.count("+") == 1
            words = [word.strip(" ") for word in line.split("+" if joined else " ")]
            if line.strip(" "):
                expected.append([word for word in words if word])
        assert [list(pair) for pair in pairs] == expected


def test_a_pair_twice_counts_once_and_is_reported(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}_pairs.txt").write_text("red car\nred car\nold car\n")
    pairs, repeats = read_pair_lists(tmp_path)
    assert pairs["val"] == [("red", "car"), ("old", "car")]
    assert repeats == 3
