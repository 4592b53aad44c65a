"""Pair lists as people save them: the right count or one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplex.data.czsl_layout import read_pair_list, read_pair_lists
from duplex.errors import DuplexError

ANY_FILE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = [("red", "car"), ("Faux.Fur", "Boots.Mid-Calf"), ("grün", "été")]
BODY = "".join(f"{s} {o}\n" for s, o in GOOD)


@pytest.mark.parametrize(
    "data",
    [
        BODY.encode(),
        BODY.replace("\n", "\r\n").encode(),
        BODY.replace("\n", "\r").encode(),
        BODY.encode("utf-8-sig"),
        BODY.encode("utf-16"),
        BODY.strip().encode(),
        BODY.replace("\n", "\n\n \t\n").encode(),
        BODY.replace(" ", " \t ").encode(),
    ],
    ids=["plain", "crlf", "cr", "bom", "utf-16", "no last line end", "blank lines", "wide gaps"],
)
def test_every_way_to_save_the_same_list(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "list.txt").write_bytes(data)
    assert read_pair_list(tmp_path / "list.txt") == GOOD


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "lists no pairs"),
        (b"\n\r\n \n", "lists no pairs"),
        (b"red car\nred\n", "line 2"),
        (b"red big car\n", "line 1"),
        ("grün auto\n".encode("latin-1"), "not UTF-8"),
        (b"red c\0r\n", "zero byte"),
        (b"red c\x07r\n", "holds a control character"),
        (b"red ...\n", "no word for a prompt"),
        ("red car\u2028blue".encode(), "holds a control character"),
    ],
)
def test_bad_lists_are_errors(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "list.txt").write_bytes(data)
    with pytest.raises(DuplexError, match=says) as caught:
        read_pair_list(tmp_path / "list.txt")
    assert "list.txt" in str(caught.value) and "\n" not in str(caught.value)


@ANY_FILE
@given(data=st.one_of(st.binary(max_size=200), st.text("ab \t\r\n.é\u2028\x85\x0b", max_size=60).map(str.encode)))
def test_any_bytes_give_every_line_or_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(data)
    try:
        pairs = read_pair_list(path)
    except DuplexError:
        return
    if not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        words = [[word for word in line.replace("\t", " ").split(" ") if word] for line in text.split("\n")]
        assert [list(pair) for pair in pairs] == [line for line in words if line]


def test_a_pair_twice_counts_once_and_is_reported(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}_pairs.txt").write_text("red car\nred car\nold car\n")
    lists = read_pair_lists(tmp_path)
    assert lists.pairs["val"] == [("red", "car"), ("old", "car")]
    assert lists.repeats == 3


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "train_pairs.txt").write_text("red car\n")
    with pytest.raises(DuplexError, match=r"val_pairs\.txt does not exist"):
        read_pair_lists(tmp_path)
