"""Archives of arrays: what is declared against what is there, before anything is read."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from duplex.evaluation import archives
from duplex.evaluation.archives import open_npz
from duplex.system.hdf5 import Unfit

VALUES = np.arange(500.0).reshape(50, 10)


def saved(path: Path, values: np.ndarray = VALUES, version: tuple[int, int] = (1, 0), extra: bytes = b"") -> Path:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, values, version)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("a.npy", stream.getvalue() + extra)
        bundle.writestr("notes.txt", "no array")
    return path


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_an_array_is_looked_at_and_then_read_once(tmp_path: Path, version: tuple[int, int], monkeypatch) -> None:
    found = open_npz(saved(tmp_path / "s.npz", version=version))
    assert "a" in found and "b" not in found and list(found) == ["a", "notes.txt"]
    member = found.find("a")
    assert (member.shape, member.dtype) == (VALUES.shape, VALUES.dtype)
    assert np.array_equal(member[3:5], VALUES[3:5]) and found.read("a") is found.read("a")
    found.close()
    with pytest.raises(ValueError, match="closed"):
        found.find("a")


def test_formats_that_numbers_are_not_saved_in_are_refused(tmp_path: Path) -> None:
    for version in ((3, 0), (1, 1), (2, 1)):
        path = saved(tmp_path / "s.npz")
        with zipfile.ZipFile(path) as bundle:
            data = bytearray(bundle.read("a.npy"))
        data[6:8] = bytes(version)
        with zipfile.ZipFile(path, "w") as bundle:
            bundle.writestr("a.npy", bytes(data))
        with pytest.raises((Unfit, ValueError), match=r"none that numbers are saved in|version"):
            open_npz(path).find("a")


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 4000])
def test_sizes_must_be_those_declared(tmp_path: Path, extra: bytes) -> None:
    with pytest.raises(Unfit, match=f"'a' declares 4,000 bytes and holds {4000 + len(extra):,}"):
        open_npz(saved(tmp_path / "s.npz", extra=extra)).find("a")


@pytest.mark.parametrize(("most", "packed", "fits"), [(4000, 1, True), (3999, 1, False), (3999, 10**6, True)])
def test_a_bomb_is_large_and_packed(tmp_path: Path, monkeypatch, most: int, packed: int, fits: bool) -> None:
    """4,000 bytes of zeros in some twenty: too many where both bounds are crossed."""
    monkeypatch.setattr(archives, "BLOWN_UP", most)
    monkeypatch.setattr(archives, "PACKED", packed)
    found = open_npz(saved(tmp_path / "s.npz", 0 * VALUES))
    if fits:
        assert found.find("a").shape == VALUES.shape
    else:
        with pytest.raises(Unfit, match=r"'a' unpacks \d+ bytes to 4,000; save it as an \.h5 file"):
            found.find("a")


@pytest.mark.parametrize(("pages", "fits"), [(40, True), (39, False)])
def test_what_is_larger_than_the_memory_is_refused(tmp_path: Path, monkeypatch, pages: int, fits: bool) -> None:
    monkeypatch.setattr(archives.os, "sysconf", {"SC_PAGE_SIZE": 100, "SC_PHYS_PAGES": pages}.__getitem__)
    found = open_npz(saved(tmp_path / "s.npz"))
    if fits:
        assert found.find("a").shape == VALUES.shape
    else:
        with pytest.raises(Unfit, match="'a' is 4,000 bytes, more than this machine's memory"):
            found.find("a")


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", a=np.array([None]))
    with pytest.raises(Unfit, match="'a' holds Python objects"):
        open_npz(tmp_path / "s.npz").find("a")
    with pytest.raises(ValueError, match="pickle"):
        open_npz(tmp_path / "s.npz").read("a")
    for values, says in ((np.array([None]), "it holds Python objects"), (VALUES, "it is a single array")):
        with (tmp_path / "one.npz").open("wb") as file:
            np.save(file, values)
        with pytest.raises(Unfit, match=says):
            open_npz(tmp_path / "one.npz")


BOUNDS = [
    *((2**30, 1, True), (2**30 + 1, 1, False)),  # a gibibyte of zeros may be packed as small as it likes
    *((1_073_741_900, 10_737_419, True), (1_073_741_900, 10_737_418, False)),  # just a hundredfold, and just more
]


@pytest.mark.parametrize(("size", "packed", "fits"), BOUNDS)
def test_a_bomb_is_more_than_a_gibibyte_and_more_than_a_hundredfold(size: int, packed: int, fits: bool) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
    info = SimpleNamespace(file_size=size + head.tell(), compress_size=packed)
    found = object.__new__(archives.Archive)
    found.bundle = SimpleNamespace(getinfo=lambda _: info, open=lambda _: io.BytesIO(head.getvalue()))  # type: ignore[assignment]
    if fits:
        assert found.find("a").shape == (size,)
    else:
        with pytest.raises(Unfit, match=r"save it as an \.h5 file"):
            found.find("a")
