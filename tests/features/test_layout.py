"""A file is checked before it is read as a cache or replaced by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.features import file as layout
from duplex.features.file import PartialCache, read_features, refuse_foreign
from tests.features.test_store import write_cache

ROWS, WIDE = 12, 128
VALUES = np.random.default_rng(0).normal(size=(ROWS, WIDE))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "pics" / "features.h5", VALUES)


def store(name: str, change: Callable[[Any], Any], **options: Any) -> Callable[[h5py.File], None]:
    def apply(file: h5py.File) -> None:
        values = change(file[name][...])
        del file[name]
        file.create_dataset(name, data=values, **options)

    return apply


DAMAGE: dict[str, tuple[Callable[[h5py.File], object], str]] = {
    "float32": (store("cls", np.float32), r"'cls' has shape \(12, 128\) and type float32; expected 12 rows"),
    "few statuses": (store("status", lambda x: x[:5]), r"'status' has shape \(5,\) and type uint8; expected 12 rows"),
    "three dimensions": (store("cls", lambda x: x[:, :, None]), r"'cls' has shape \(12, 128, 1\) and type float16"),
    "no statuses": (lambda file: file.pop("status"), "its entry 'status' is missing"),
    "no identity": (lambda file: file.pop("identity"), "its entry 'identity' is missing"),
    "chunks": (store("cls", np.array, chunks=(4, 128), compression="gzip"), "'cls' is compressed, chunked"),
    "two columns of checksums": (store("checksums", lambda x: x.repeat(2, axis=1)), "'checksums' has 2 columns"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_cache_of_another_layout_is_neither_read_nor_resumed(cache: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    with h5py.File(cache, "r+") as file:
        change(file)
    with pytest.raises(DuplexError, match=rf"is damaged: {message}.*; `duplex extract --dataset pics` makes it again"):
        read_features(cache)
    cache.rename(layout.partial_path(cache))
    with pytest.raises(layout.DamagedCache, match=message):
        PartialCache(cache)


def test_a_cache_of_another_version_is_refused_with_the_command_to_run(cache: Path) -> None:
    with h5py.File(cache, "r+") as file:
        file.attrs["format"] = np.bytes_(b"duplex-features-0")
    with pytest.raises(
        DuplexError, match=r"has the format duplex-features-0, but this version of duplex reads .*; `duplex extract"
    ):
        read_features(cache)
    refuse_foreign(cache)  # it may be written over
    cache.rename(layout.partial_path(cache))
    with pytest.raises(layout.DamagedCache, match="this version of duplex did not write it"):
        PartialCache(cache)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "other HDF5": lambda path: path.write_bytes(layout.HDF5_SIGNATURE + bytes(99)),
    "ours in a text": lambda path: path.write_text(f"this is about {layout.FORMAT}"),
    "a folder": Path.mkdir,
    "a link": lambda path: path.symlink_to("nowhere"),
    "an unfinished file": lambda path: layout.partial_path(path).write_text("a letter"),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_cache_is_not_overwritten(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "f.h5")
    with pytest.raises(DuplexError, match=r"f\.h5"):
        refuse_foreign(tmp_path / "f.h5")


def test_a_damaged_or_missing_cache_may_be_overwritten(cache: Path) -> None:
    refuse_foreign(cache)
    for head in (b"\x89HDF\r\n\x1a\n", b"\x89HDF broken"):
        cache.write_bytes(head + bytes(9) + layout.FORMAT.encode())
        layout.partial_path(cache).write_bytes(head)
        refuse_foreign(cache)
        assert layout.partial_path(cache).read_bytes() == head, "it is looked at, not changed"
    cache.unlink()
    layout.partial_path(cache).unlink()
    refuse_foreign(cache)
