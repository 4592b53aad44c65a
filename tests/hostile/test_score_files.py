"""Untrusted score files: unsafe or oversized contents are refused before they are read."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.hostile.conftest import Command

RANDOM = np.random.default_rng(0)
GOOD: dict[str, Any] = {
    "scores": RANDOM.standard_normal((10, 4)).astype(np.float32),
    "target": np.arange(10) % 4,
    "seen": np.array([True, True, False, False]),
}
Change = Callable[[h5py.File], object]


def hdf5(path: Path, *changes: Change) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in GOOD.items():
            file[name] = values
        for change in changes:
            change(file)
    return path


def replaced(name: str, *shape_and_type: object, **options: Any) -> Change:
    """Return the change that stores other data under `name`."""

    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, *shape_and_type, **options)

    return change


def linked(name: str, link: object) -> Change:
    def change(file: h5py.File) -> None:
        file.move(name, "x")
        file[name] = link

    return change


def view(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((10, 4), np.float32)
    layout[:] = h5py.VirtualSource("gone.h5", "scores", (10, 4))
    del file["scores"]
    file.create_virtual_dataset("scores", layout)


NEVER_WRITTEN = "of which 0 were ever written"
HDF5: dict[str, tuple[Change, str]] = {
    "a view of another file": (view, "lies in other files"),
    "a soft link": (linked("scores", h5py.SoftLink("/x")), "is a link"),
    "a link to another file": (linked("seen", h5py.ExternalLink("other.h5", "/seen")), "is a link"),
    "a link to nothing": (linked("target", h5py.SoftLink("/nothing")), "is a link"),
    "raw bytes of another file": (
        replaced("scores", (10, 4), "u1", external=[("/etc/passwd", 0, 40)]),
        "lies in other files",
    ),
    "sizes that nothing backs": (replaced("scores", (10**7, 10**6), "f4"), NEVER_WRITTEN),
    "pieces that nothing backs": (replaced("scores", (10**7, 10**6), "f4", chunks=(1, 10**6)), NEVER_WRITTEN),
    "labels that nothing backs": (replaced("target", (10**12,), "i8"), NEVER_WRITTEN),
    "huge pieces": (replaced("scores", (2**16, 2**15), "f4", chunks=(2**16, 2**15)), "in chunks of more than"),
    "references": (
        lambda f: f.create_dataset("state", data=[f["scores"].ref] * 4, dtype=h5py.ref_dtype),
        "must be numbers or text of fixed length",
    ),
    "a compound type": (lambda f: f.create_dataset("state", data=np.zeros(4, [("a", "i4")])), "must be numbers"),
    "a huge k": (lambda f: f.create_dataset("k", data=np.array([2**64 - 1], "u8")), "choose a smaller --k"),
    "an infinite label": (replaced("target", data=np.full(10, np.inf)), "must be whole numbers"),
    "emptiness": (replaced("scores", data=h5py.Empty("f4")), "group of arrays or empty"),
}


@pytest.mark.parametrize("name", HDF5)
def test_unsafe_hdf5_is_refused(tmp_path: Path, command: Command, name: str) -> None:
    change, says = HDF5[name]
    hdf5(tmp_path / "other.h5")
    assert command("score", hdf5(tmp_path / "a.h5", change)).refused(says)


def test_the_unchanged_file_is_scored(tmp_path: Path, command: Command) -> None:
    answer = command("score", hdf5(tmp_path / "a.h5"), "--rounds", 10)
    assert answer.code == 0 and "AUC" in answer.out.upper()
    compressed = replaced("scores", data=GOOD["scores"], compression="gzip")
    assert command("score", hdf5(tmp_path / "b.h5", compressed), "--rounds", 10).out == answer.out
    np.savez_compressed(tmp_path / "c.npz", **GOOD)
    assert command("score", tmp_path / "c.npz", "--rounds", 10).out == answer.out


def header(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def npz(path: Path, scores: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name in ("target", "seen"):
            stream = io.BytesIO()
            np.save(stream, GOOD[name])
            bundle.writestr(f"{name}.npy", stream.getvalue())
        bundle.writestr("scores.npy", scores)
    return path


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        (header("(10, 2199023255552)") + b"\0" * 160, "declares 87,960,930,222,080 bytes and holds 160"),
        (header("(10, 4)"), "declares 160 bytes and holds 0"),
        (header("(10, 4)") + b"\0" * 999, "declares 160 bytes and holds 999"),
        (header("(-10, -4)") + b"\0" * 160, "scores"),
        (header("(10, 4)", "'|O'") + b"\0" * 320, "not loaded for safety"),
        (header("(10, 4)", "[('a', '<f4')]") + b"\0" * 160, "must be numbers"),
        (header("(10, 4) + (1,)") + b"\0" * 160, "cannot be read"),
        (header("(" * 90 + ")" * 90), "declares 4 bytes and holds 0"),
        (b"\x93NUMPY\x09\x09", "is unknown"),
        (b"", "cannot be read"),
        (b"\x93NUMPY\x01\x00\xff\xff", "cannot be read"),
    ],
    ids=str,
)
def test_npz_with_wrong_sizes_is_refused(tmp_path: Path, command: Command, scores: bytes, says: str) -> None:
    assert command("score", npz(tmp_path / "a.npz", scores)).refused(says)


@pytest.mark.slow
def test_an_npz_that_unpacks_to_gigabytes(tmp_path: Path, command: Command) -> None:
    size = 5 << 28
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bundle:
        with bundle.open("scores.npy", "w") as file:
            file.write(header(f"({size // 16}, 4)"))
            for _ in range(size >> 24):
                file.write(bytes(1 << 24))
        for name in ("target", "seen"):
            with bundle.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, GOOD[name])
    assert command("score", tmp_path / "a.npz").refused("unpacks", "save it as an .h5 file")


@pytest.mark.parametrize("place", ["/dev/null", "/dev/zero", "/etc/passwd", "."])
def test_devices_and_folders_are_refused(command: Command, place: str) -> None:
    assert command("score", place).refused(place)
