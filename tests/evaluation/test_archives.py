"""Archives whose declared sizes are wrong, or too large, are refused before they are read."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from duplex.evaluation import scores
from duplex.evaluation.scores import open_npz
from duplex.system.hdf5 import InvalidHDF5

VALUES = np.arange(500.0).reshape(50, 10)


def saved(path: Path, values: np.ndarray = VALUES, version: tuple[int, int] = (1, 0), extra: bytes = b"") -> Path:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, values, version)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("a.npy", stream.getvalue() + extra)
        bundle.writestr("notes.npy", "no array")
    return path


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_an_array_is_read_once(tmp_path: Path, version: tuple[int, int]) -> None:
    found = open_npz(saved(tmp_path / "s.npz", version=version))
    assert "a" in found and "b" not in found and list(found) == ["a", "notes"]
    values = found.find("a")
    assert np.array_equal(values, VALUES) and found.find("a") is values
    found.close()
    with pytest.raises(ValueError, match="closed"):
        found.find("notes")


def test_unknown_format_versions_are_refused(tmp_path: Path) -> None:
    for version in ((3, 0), (1, 1), (2, 1)):
        path = saved(tmp_path / "s.npz")
        with zipfile.ZipFile(path) as bundle:
            data = bytearray(bundle.read("a.npy"))
        data[6:8] = bytes(version)
        with zipfile.ZipFile(path, "w") as bundle:
            bundle.writestr("a.npy", bytes(data))
        with pytest.raises((InvalidHDF5, ValueError), match=r"is unknown|version"):
            open_npz(path).find("a")


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 4000])
def test_wrong_declared_sizes_are_refused(tmp_path: Path, extra: bytes) -> None:
    with pytest.raises(InvalidHDF5, match=f"'a' declares 4,000 bytes and holds {4000 + len(extra):,}"):
        open_npz(saved(tmp_path / "s.npz", extra=extra)).find("a")


@pytest.mark.parametrize(("most", "packed", "fits"), [(4000, 1, True), (3999, 1, False), (3999, 10**6, True)])
def test_large_and_highly_compressed_arrays_are_refused(
    tmp_path: Path, monkeypatch, most: int, packed: int, fits: bool
) -> None:
    """4,000 bytes of zeros are stored in about twenty."""
    monkeypatch.setattr(scores, "MAX_EXPANDED", most)
    monkeypatch.setattr(scores, "MAX_RATIO", packed)
    fits_or_is_refused(saved(tmp_path / "s.npz", 0 * VALUES), fits, r"'a' unpacks \d+ bytes to 4,000, too many for")


def fits_or_is_refused(path: Path, fits: bool, says: str) -> None:
    found = open_npz(path)
    if fits:
        assert found.find("a").shape == VALUES.shape
    else:
        with pytest.raises(InvalidHDF5, match=says):
            found.find("a")


@pytest.mark.parametrize(("pages", "fits"), [(40, True), (39, False)])
def test_an_array_larger_than_memory_is_refused(tmp_path: Path, monkeypatch, pages: int, fits: bool) -> None:
    monkeypatch.setattr(scores.os, "sysconf", {"SC_PAGE_SIZE": 100, "SC_PHYS_PAGES": pages}.__getitem__)
    fits_or_is_refused(saved(tmp_path / "s.npz"), fits, "'a' is 4,000 bytes, more than this machine's memory")


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", a=np.array([None]))
    with pytest.raises(InvalidHDF5, match="'a' holds Python objects"):
        open_npz(tmp_path / "s.npz").find("a")
    for values, says in ((np.array([None]), "it holds Python objects"), (VALUES, "it is a single array")):
        with (tmp_path / "one.npz").open("wb") as file:
            np.save(file, values)
        with pytest.raises(InvalidHDF5, match=says):
            open_npz(tmp_path / "one.npz")
