import io
import pickle
from pathlib import Path

import numpy as np
import pytest

from duplex.errors import DuplexError, UsageError
from duplex.features import imported
from duplex.features.file import ALL_ZERO, IMPORTED, NOT_FINITE, PartialCache, read_features
from duplex.features.imported import FeatureFile, import_features, refuse_other_width
from tests.features.test_store import opened_in


@pytest.mark.parametrize(("dtype", "chunk"), [(np.float16, 1), (np.float32, 3), (np.float64, 99)])
def test_imported_features_become_a_cache(tmp_path: Path, monkeypatch, dtype: type, chunk: int) -> None:
    monkeypatch.setattr(imported, "CHUNK", chunk)
    values: np.ndarray = np.random.default_rng(0).standard_normal((7, 5)).astype(dtype)
    values[4, 0], values[6, 2], values[5, 0], values[5, 1] = np.inf, np.nan, 65_504, -65_504  # what float16 holds
    values[1], values[2] = 0, 2.0**-25 if dtype is not np.float16 else 0
    values[3] = 2.0**-24
    np.save(tmp_path / "f.npy", values)
    import_features(tmp_path / "f.npy", 7, "m", tmp_path / "features.h5")
    found = read_features(tmp_path / "features.h5", {"encoder": "ViT", "weights": "w", "manifest": "m", "dim": "5"})
    assert [row for row in range(7) if found.statuses[row] == NOT_FINITE] == [4, 6]
    assert [row for row in range(7) if found.statuses[row] == ALL_ZERO] == [1, 2]
    assert found.bad.sum() == 4
    assert not found.cls[found.bad].any() and found.identity["precision"] == np.dtype(dtype).name
    assert np.array_equal(found.cls[~found.bad], values[~found.bad].astype(np.float16))
    for expect in ({"manifest": "n"}, {"manifest": "m", "dim": "6"}):
        with pytest.raises(DuplexError, match=r"another (manifest|feature width)"):
            read_features(tmp_path / "features.h5", expect)


@pytest.mark.parametrize(
    ("values", "message"),
    [(np.zeros((6, 5), np.float32), "has 6 rows, but the data set has 7 images"),
     (np.zeros((7, 5), np.int64), "expected a float array"), (np.zeros((7, 0), np.float32), "expected a float array"),
     (np.zeros((1, 5), np.float32), "has 1 rows"), (np.full((7, 5), 1e6, np.float32), "above 65504"),
     (np.array([None] * 7), "holds Python objects; save")],
)  # fmt: skip
def test_arrays_that_cannot_be_features_are_refused(tmp_path: Path, values: np.ndarray, message: str) -> None:
    np.save(tmp_path / "f.npy", values, allow_pickle=True)
    with pytest.raises(DuplexError, match=message) as refused:
        import_features(tmp_path / "f.npy", 7, "m", tmp_path / "features.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["f.npy"]
    assert refused.traceback and set(opened_in(tmp_path)) <= {"f.npy"}  # the traceback holds on to what failed


def test_a_file_that_is_no_single_array_is_refused(tmp_path: Path) -> None:
    """A pickle is not loaded: that would run its author's code."""
    several = io.BytesIO()
    np.savez(several, a=np.zeros((7, 5)))
    array = r"has the arrays \['a'\]; expected arrays named 'features' and 'images'"
    damaged = "cannot be read as .npy or .npz; save it again with numpy$"
    for content, message in ((several.getvalue(), array), (b"", damaged), (pickle.dumps(np.ones((7, 5))), damaged)):
        (tmp_path / "f.npy").write_bytes(content)
        with pytest.raises(DuplexError, match=message):
            import_features(tmp_path / "f.npy", 7, "m", tmp_path / "features.h5")
    for source, message in ((tmp_path / "absent.npy", "does not exist"), (tmp_path, "is not a file; expected a .npy")):
        with pytest.raises(UsageError, match=message):
            import_features(source, 7, "m", tmp_path / "features.h5")


def test_rows_with_names_are_found_by_them_and_refused_without_a_manifest(tmp_path: Path) -> None:
    values: np.ndarray = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    np.savez(tmp_path / "f.npz", features=values, images=["c", "a", "b"])
    with pytest.raises(UsageError, match=r"has image names; pass .* as `images`, .* features as \.npy"):
        import_features(tmp_path / "f.npz", 3, "m", tmp_path / "features.h5")
    import_features(tmp_path / "f.npz", 3, "m", tmp_path / "features.h5", ["a", "b", "c"])
    found = read_features(tmp_path / "features.h5", {"encoder": "ViT", "weights": "w", "manifest": "m", "dim": "2"})
    assert np.array_equal(found.cls[:], values[[1, 2, 0]])


def test_rows_without_names_are_those_of_the_table_that_a_part_was_taken_from(tmp_path: Path) -> None:
    values: np.ndarray = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    np.save(tmp_path / "f.npy", values)
    import_features(tmp_path / "f.npy", 2, "m", tmp_path / "features.h5", ["d", "b"], listed=["a", "b", "c", "d"])
    assert np.array_equal(read_features(tmp_path / "features.h5").cls[:], values[[3, 1]])
    with pytest.raises(UsageError, match="has 4 rows, but the data set has 3 images"):
        import_features(tmp_path / "f.npy", 2, "m", tmp_path / "features.h5", ["b", "a"], listed=["a", "b", "c"])


def test_an_import_that_fails_leaves_no_file(tmp_path: Path, monkeypatch) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 3), np.float32))

    def fail(_: PartialCache) -> None:
        raise OSError("no")

    monkeypatch.setattr(PartialCache, "finish", fail)
    with pytest.raises(OSError, match="no"):
        import_features(tmp_path / "x.npy", 4, "0", tmp_path / "c.h5")
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".npy", ".lock")] == []


def test_too_many_unusable_rows_leave_the_earlier_cache(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 3), np.float32))
    import_features(tmp_path / "x.npy", 4, "0", tmp_path / "c.h5")
    before = (tmp_path / "c.h5").read_bytes()
    np.save(tmp_path / "y.npy", np.array([[1.0] * 3, [np.nan] * 3, [0.0] * 3, [1.0] * 3], np.float32))
    with pytest.raises(DuplexError, match=r"2 of 4 rows are zero or not finite \(first: b\)"):
        import_features(tmp_path / "y.npy", 4, "0", tmp_path / "c.h5", ["a", "b", "c", "d"], max_bad=0.25)
    assert (tmp_path / "c.h5").read_bytes() == before
    import_features(tmp_path / "y.npy", 4, "0", tmp_path / "c.h5", ["a", "b", "c", "d"], max_bad=0.5)


def test_names_saved_as_objects_are_refused_with_the_remedy(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", features=np.ones((2, 3), np.float32), images=np.array(["a", "b"], dtype=object))
    with pytest.raises(UsageError, match=r"holds Python objects; save .* `names\.astype\(str\)`"):
        import_features(tmp_path / "x.npz", 2, "0", tmp_path / "c.h5", ["a", "b"])


def test_the_width_is_that_of_the_encoder_where_it_is_known(tmp_path: Path, encoder_name: str) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 5), np.float32))
    file = FeatureFile.open(tmp_path / "x.npy")
    for name, width in (("tiny", 128), (encoder_name, 16)):
        with pytest.raises(UsageError, match=f"width 5, but {name} makes features of width {width}"):
            refuse_other_width(file, name, None)
    refuse_other_width(file, IMPORTED, None)
