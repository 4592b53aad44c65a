"""Score files: blocks, allowed and refused entries; files are closed after use."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duplex.errors import UsageError
from duplex.evaluation import score_files as module
from duplex.evaluation.score_files import ScoreFile, open_score_file, require_same_columns
from tests.cli.test_score import save

IMAGES, COLUMNS = 7, 4
GOOD: dict[str, Any] = {
    "scores": np.random.default_rng(0).standard_normal((IMAGES, COLUMNS)).astype(np.float32),
    "target": np.array([0, 1, 2, 3, 3, 0, 1]),
    "seen": np.array([True, True, False, True]),
}
KINDS = ("npz", "h5", "hdf5")


def read(path: Path, **changes: Any) -> ScoreFile:
    with open_score_file(save(path, GOOD | changes)) as found:
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block", "rows"), [(1, 1), (5, 1), (8, 2), (11, 2), (99, 7)])
def test_blocks_hold_as_many_rows_as_fit(tmp_path: Path, monkeypatch, kind: str, block: int, rows: int) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    with open_score_file(save(tmp_path / f"s.{kind}", GOOD)) as found:
        parts = list(found.blocks())
        assert [(part.start, part.stop) for part, _ in parts] == [
            (start, min(start + rows, IMAGES)) for start in range(0, IMAGES, rows)
        ]
        assert np.array_equal(np.concatenate([values for _, values in parts]), GOOD["scores"])
        assert found.ks == (1,) and found.feasible_mask is found.states is found.objects is None
        assert found.target.tolist() == GOOD["target"].tolist() and found.seen.tolist() == GOOD["seen"].tolist()


ALLOWED: list[tuple[str, Any, str, Any]] = [
    ("k", 3, "ks", (3,)),
    ("k", [2, 1, 2], "ks", (2, 1)),
    ("k", np.array([5], np.uint8), "ks", (5,)),
    ("feasible_mask", [1, 0, 1, 0], "feasible_mask", [True, False, True, False]),
    ("seen", np.array([0, 1, 1, 0], np.uint8), "seen", [False, True, True, False]),
    ("target", [3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 3.0], "target", [3, 2, 1, 0, 0, 0, 3]),
    ("target", np.array([3, 2, 1, 0, 0, 0, 3], np.uint64), "target", [3, 2, 1, 0, 0, 0, 3]),
    ("state", [7, 8, 7, 8], "states", [7, 8, 7, 8]),
    ("object", np.array([b"a", b"b", b"a", b"b"]), "objects", ["a", "b", "a", "b"]),
    ("state", np.char.encode(["a", "b", "ä", "b"], "utf-8"), "states", ["a", "b", "ä", "b"]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "values", "field", "wanted"), ALLOWED)
def test_allowed_entries_are_read(tmp_path: Path, kind: str, name: str, values: Any, field: str, wanted: Any) -> None:
    found = getattr(read(tmp_path / f"s.{kind}", **{name: values}), field)
    assert (found if isinstance(wanted, tuple) else found.tolist()) == wanted


def test_text_of_any_length_is_read_from_hdf5(tmp_path: Path) -> None:
    found = read(tmp_path / "s.h5", state=["a", "bcd", "ä", "b"]).states
    assert found is not None and found.tolist() == ["a", "bcd", "ä", "b"]


REFUSED: list[tuple[str, Any, str]] = [
    ("k", [1, 0], "'k' must be one or more"),
    ("seen", np.array([b"1", b"0", b"1", b"0"]), "'seen' must be a mask with true or false"),
    ("target", [4, 0, 0, 0, 0, 0, 0], "'target' holds 0 to 4; expected 0 to 3"),
    ("target", np.array([2**63, 0, 0, 0, 0, 0, 0], np.uint64), "'target' holds -"),
]


@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize(("name", "values", "says"), REFUSED)
def test_wrong_entries_are_refused_by_name(tmp_path: Path, kind: str, name: str, values: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(tmp_path / f"s.{kind}", **{name: values})


@pytest.mark.parametrize("kind", ["npz", "h5"])
def test_two_columns_of_one_pair_are_refused(tmp_path: Path, kind: str) -> None:
    states, objects = np.array([b"red", b"old", b"red", b"red"]), np.array([b"car", b"car", b"hat", b"car"])
    with pytest.raises(UsageError, match="columns 0 and 3 are both the pair 'red car'; keep one column per pair"):
        read(tmp_path / f"s.{kind}", state=states, object=objects)


@pytest.mark.parametrize(("name", "says"), [("none.npz", "there is no file"), ("s.csv", "is neither an .npz nor")])
def test_missing_files_and_unknown_suffixes_are_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "s.csv").write_text("1,2")
    with pytest.raises(UsageError, match=says), open_score_file(tmp_path / name):
        pass


@pytest.mark.parametrize("changed", ["target", "seen", "states", "objects"])
def test_scores_of_other_images_or_candidates_cannot_be_compared(changed):
    words = {"states": np.array(list("aabb")), "objects": np.array(list("xyxy"))}
    one = ScoreFile(Path("one.npz"), GOOD["scores"], GOOD["target"], GOOD["seen"], None, (1,), **words)
    require_same_columns(one, dataclasses.replace(one, states=None, objects=None))
    with pytest.raises(UsageError, match=r"one.npz and one.npz differ in"):
        require_same_columns(one, dataclasses.replace(one, **{changed: np.roll(getattr(one, changed), 1)}))
