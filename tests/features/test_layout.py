"""A file is checked before it is read as a cache or replaced by one."""

from collections.abc import Callable
from pathlib import Path

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
