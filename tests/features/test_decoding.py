"""Rows to pixels: views of one picture, faults of the machine, and the processes that do it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from duplex.data.image_errors import MachineFault
from duplex.errors import DuplexError
from duplex.features import decoding
from duplex.features.augmentation import Augmentation
from duplex.features.decoding import Pictures, decoded_blocks, decoding_workers, worker_deaths
from duplex.features.image_files import read_picture
from duplex.features.layout import ENCODED, mark_of
from tests.features.pictures import write_pictures

SIZE = (12, 20)  # height, width


def transform(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture.resize(SIZE[::-1])).transpose(2, 0, 1).copy())


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    return write_pictures(tmp_path, 6)


class Disk:
    """Which pictures were asked for, and which the machine fails to give, each as often as it is listed."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails: list[str] = []

    def read(self, path: Path) -> Image.Image:
        self.asked.append(path.name)
        if path.name in self.fails:
            self.fails.remove(path.name)
            raise MachineFault(f"{path} could not be read")
        return read_picture(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    monkeypatch.setattr(decoding, "read_picture", found.read)
    return found


def blocks_of(pictures: Pictures, workers: int = 0) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    return list(decoded_blocks(pictures, [(0, 4), (4, 6)], workers, pinned=False))


def test_blocks_hold_their_rows_and_a_bad_picture_is_black(names: list[str], tmp_path: Path) -> None:
    (tmp_path / names[5]).write_bytes(b"")
    pictures = Pictures(names, tmp_path, transform)
    assert len(pictures) == 6
    for workers in (0, 1):
        found = blocks_of(pictures, workers)
        assert [start for start, _, _ in found] == [0, 4]
        pixels, marks = (torch.cat([block[place] for block in found]) for place in (1, 2))
        assert marks.dtype == torch.uint8 and marks.tolist() == [ENCODED] * 5 + [mark_of("empty")]
        for row, name in enumerate(names[:5]):
            assert torch.equal(pixels[row], transform(Image.open(tmp_path / name).convert("RGB")))
        assert pixels.shape == (6, 3, *SIZE) and not pixels[5].any()


def test_what_the_machine_fails_to_give_once_is_read_again_and_lies_in_its_place(names, tmp_path, disk) -> None:
    plain = torch.cat([pixels for _, pixels, _ in blocks_of(Pictures(names, tmp_path, transform))])
    disk.fails.extend([names[1], names[5]])
    found = blocks_of(Pictures(names, tmp_path, transform))
    assert torch.equal(torch.cat([pixels for _, pixels, _ in found]), plain)
    assert torch.cat([marks for *_, marks in found]).tolist() == [ENCODED] * 6


def test_what_it_fails_to_give_twice_is_told(names, tmp_path, disk) -> None:
    disk.fails.extend([names[5], names[5]])
    with pytest.raises(MachineFault, match=names[5]):
        blocks_of(Pictures(names, tmp_path, transform))


def test_views_follow_one_another_and_a_picture_is_read_once_for_them(names, tmp_path, disk) -> None:
    """From the second row of all, as a shard may begin: the second view of the first picture."""
    views = Augmentation(3, flip=True)
    rows = views.rows(names)[1:7]
    pictures = Pictures(rows, tmp_path, transform, views, first=1)
    pixels = torch.cat([block[1] for block in blocks_of(pictures)])
    assert disk.asked == names[:3]
    for row, (name, view) in enumerate([(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]):
        picture = Image.open(tmp_path / names[name]).convert("RGB")
        assert torch.equal(pixels[row], transform(views.show(picture, names[name], view, SIZE)))


@pytest.mark.parametrize("error", [ValueError("size"), ZeroDivisionError()])
def test_what_cannot_be_resized_is_bad_and_what_has_no_room_is_the_machines(names, tmp_path, error) -> None:
    def refuse(picture: Image.Image) -> torch.Tensor:
        if picture.size != (8, 8):
            raise error
        return transform(picture)

    pixels, mark = Pictures(names, tmp_path, refuse)[0]
    assert mark == mark_of("cannot be resized") and not pixels.any()
    error = MemoryError()
    with pytest.raises(MachineFault):
        Pictures(names, tmp_path, refuse).read(0)
    assert Pictures(names, tmp_path, refuse)[0][1] == decoding.AGAIN


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 1), (64, 63)])
def test_cores_are_those_of_this_process(cores: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores if process == 0 else 7), raising=False)
    assert decoding_workers("auto") == workers and decoding_workers(5) == 5


def test_a_machine_that_does_not_say_which_cores_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    for cores, workers in ((None, 0), (1, 0), (2, 1), (8, 7)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert decoding_workers("auto") == workers


class Told(Pictures):
    """Says of the process that reads: how it gives way, and whether it heeds Ctrl-C."""

    def read(self, row: int) -> tuple[torch.Tensor, int]:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        return torch.tensor([os.nice(0), int(ignored)]), ENCODED


@pytest.mark.parametrize("pinned", [False, True])
def test_workers_leave_ctrl_c_to_their_parent_and_give_way_where_they_share_its_cores(
    names, tmp_path, monkeypatch, pinned: bool
) -> None:
    """Memory is pinned for a GPU, which this test does without."""
    asked: list[bool] = []

    def loader(*words: Any, pin_memory: bool, **options: Any) -> Any:
        asked.append(pin_memory)
        return DataLoader(*words, **options)

    monkeypatch.setattr(decoding, "DataLoader", loader)
    pictures = Told(names, tmp_path, transform)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs this may have it ignored
    ((_, told, _),) = decoded_blocks(pictures, [(0, 2)], 1, pinned=pinned)
    signal.signal(signal.SIGINT, before)
    nice = min(19, os.nice(0) + (0 if pinned else 10))
    assert told.tolist() == [[nice, 1]] * 2 and asked == [pinned]


def test_the_death_of_a_worker_is_one_sentence_and_nothing_else_is() -> None:
    for said in ("(pid 7) is killed by signal: Killed.", "(pids 7) exited unexpectedly"):
        with pytest.raises(DuplexError, match="a decoding worker died"), worker_deaths():
            raise RuntimeError(f"DataLoader worker {said}")
    with pytest.raises(RuntimeError, match="something else"), worker_deaths():
        raise RuntimeError("something else")
