"""A transient fault is not a bad picture; a finished cache is looked at before it is believed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from PIL import Image

from duplex.data.check import open_picture
from duplex.data.image_errors import MachineFault
from duplex.errors import DuplexError
from duplex.features.image_files import read_picture
from duplex.features.layout import NOT_FINITE, REASONS, mark_of
from duplex.features.store import open_features
from tests.features.damage import DAMAGE, infinite, nan, pending
from tests.hostile.conftest import CACHE, Command

FAULTS = [MemoryError(), *(OSError(n, os.strerror(n)) for n in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM))]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From now on opening the picture of that name raises, so many times."""

    def arrange(name: str, fault: Exception, times: int = 10**6) -> None:
        real, left = Image.open, [times]

        def refuse(path: object, *args: object, **options: object) -> object:
            if str(path).endswith(name) and left[0] > 0:
                left[0] -= 1
                raise fault
            return real(path, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr("duplex.features.image_files.Image.open", refuse)

    return arrange


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_extraction_stops_and_goes_on(pics: Path, command: Command, failing, monkeypatch, fault, workers: int) -> None:
    assert command("extract", "-d", "pics", "--out", "whole.h5").code == 0
    failing("00009.jpg", fault)
    answer = command("extract", "-d", "pics", "--num-workers", workers)
    assert answer.refused("00009.jpg could not be read", "run the command again")
    assert not Path(CACHE).exists()
    monkeypatch.undo()
    monkeypatch.chdir(pics)
    assert command("extract", "-d", "pics").code == 0
    assert Path(CACHE).read_bytes() == Path("whole.h5").read_bytes()


def test_a_fault_that_passes_at_once_is_not_even_told(pics: Path, command: Command, failing) -> None:
    failing("00009.jpg", FAULTS[1], times=1)
    assert command("extract", "-d", "pics").code == 0
    assert not open_features(CACHE).bad.any()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_looking_at_pictures_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")

    def refuse(*args: object, **options: object) -> None:
        raise fault

    monkeypatch.setattr(Image, "open", refuse)
    for look in (read_picture, open_picture):
        with pytest.raises(MachineFault, match=r"a\.png could not be read: ") as caught:
            look(tmp_path / "a.png")
        assert caught.value.__cause__ is fault


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_finished_cache_that_holds_what_it_should_not(pics: Path, command: Command, damage) -> None:
    """Whoever reads it refuses it, naming `duplex extract`; that command really mends it."""
    assert command("extract", "-d", "pics", "--out", "whole.h5").code == 0
    assert command("extract", "-d", "pics").code == 0
    with h5py.File(CACHE, "r+") as file:
        damage(file)
    if damage not in (nan, infinite, pending):  # `info` is there to count these
        assert command("cache", "info", CACHE).refused(CACHE, "duplex extract")
    if damage not in (nan, infinite):  # rows that training may never look at
        with pytest.raises(DuplexError, match="duplex extract --dataset pics"):
            open_features(Path(CACHE))
    answer = command("extract", "-d", "pics")
    assert answer.code == 0 and "extracting afresh" in answer.err
    assert Path(CACHE).read_bytes() == Path("whole.h5").read_bytes()


@pytest.mark.parametrize("damage", [d for d in DAMAGE if d not in (nan, infinite, pending)])
def test_an_unfinished_cache_of_that_kind_is_begun_again(pics: Path, command: Command, damage) -> None:
    assert command("extract", "-d", "pics").code == 0
    whole = Path(CACHE).read_bytes()
    Path(CACHE).rename(CACHE + ".partial")
    with h5py.File(CACHE + ".partial", "r+") as file:
        damage(file)
    answer = command("extract", "-d", "pics")
    assert answer.code == 0 and "extracting afresh" in answer.err and Path(CACHE).read_bytes() == whole


def test_a_folder_in_a_caches_place(pics: Path, command: Command) -> None:
    Path(CACHE).mkdir(parents=True)
    assert command("extract", "-d", "pics").refused("is a folder")
    assert command("cache", "info", CACHE).refused("does not exist")
    assert Path(CACHE).is_dir()


def test_a_hollow_file_is_not_read(pics: Path, command: Command) -> None:
    """A hundred gigabytes of holes behind a sound beginning."""
    assert command("extract", "-d", "pics").code == 0
    os.truncate(CACHE, 100 << 30)
    assert command("cache", "info", CACHE).refused("of which the disk holds")


def test_a_row_without_finite_features_is_not_tried_for_ever(pics: Path, command: Command) -> None:
    assert command("extract", "-d", "pics").code == 0
    with h5py.File(CACHE, "r+") as file:
        file["mark"][3] = mark_of(NOT_FINITE)
        file["cls"][3] = 0
    before = Path(CACHE).read_bytes()
    answer = command("extract", "-d", "pics")
    assert answer.code == 0 and "12 rows, 12 of them before" in answer.err and REASONS[-1] in answer.err
    assert Path(CACHE).read_bytes() == before
