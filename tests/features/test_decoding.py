"""Rows to pixels: bad images, faults of the machine, and the worker processes."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from duplex.data.images import ImageBytes, MachineFault, read_image_bytes
from duplex.features import encode
from duplex.features.encode import ImageRows, decode_batches
from duplex.features.file import ENCODED, status_of_reason
from tests.features.pictures import write_pictures

SIZE = (12, 20)  # height, width


def transform(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture.resize(SIZE[::-1])).transpose(2, 0, 1).copy())


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    return write_pictures(tmp_path, 6)


class Disk:
    """Fails to read an image once for each time that `fails` lists it."""

    def __init__(self) -> None:
        self.fails: list[str] = []

    def read(self, path: Path) -> ImageBytes:
        if path.name in self.fails:
            self.fails.remove(path.name)
            raise MachineFault(f"{path} could not be read")
        return read_image_bytes(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    monkeypatch.setattr(encode, "read_image_bytes", found.read)
    return found


def blocks_of(pictures: ImageRows, workers: int = 0) -> list[encode.PixelBatch]:
    return list(decode_batches(pictures, [range(4), [4, 5]], workers, pinned=False))


def test_batches_have_their_rows_and_a_bad_image_is_black(names: list[str], tmp_path: Path) -> None:
    (tmp_path / names[5]).write_bytes(b"")
    pictures = ImageRows(names, tmp_path, transform)
    assert len(pictures) == 6
    for workers in (0, 1):
        found = blocks_of(pictures, workers)
        assert [start for start, *_ in found] == [0, 4]
        pixels, marks, contents = (torch.cat([block[place] for block in found]) for place in (1, 2, 3))
        digests = [hashlib.sha256((tmp_path / name).read_bytes()).digest() for name in names]
        assert [bytes(content.tolist()) for content in contents] == digests
        assert marks.dtype == torch.uint8 and marks.tolist() == [ENCODED] * 5 + [status_of_reason("empty")]
        for row, name in enumerate(names[:5]):
            assert torch.equal(pixels[row], transform(Image.open(tmp_path / name).convert("RGB")))
        assert pixels.shape == (6, 3, *SIZE) and not pixels[5].any()


def test_an_image_that_fails_for_the_machine_is_read_again_once(names, tmp_path, disk) -> None:
    plain = torch.cat([pixels for _, pixels, *_ in blocks_of(ImageRows(names, tmp_path, transform))])
    disk.fails.extend([names[1], names[5]])
    found = blocks_of(ImageRows(names, tmp_path, transform))
    assert torch.equal(torch.cat([pixels for _, pixels, *_ in found]), plain)
    assert torch.cat([marks for *_, marks, _ in found]).tolist() == [ENCODED] * 6
    disk.fails.extend([names[5], names[5]])
    with pytest.raises(MachineFault, match=names[5]):
        blocks_of(ImageRows(names, tmp_path, transform))


@pytest.mark.parametrize("error", [ValueError("size"), ZeroDivisionError()])
def test_an_image_that_cannot_be_resized_is_bad_but_not_for_a_lack_of_memory(names, tmp_path, error) -> None:
    def refuse(picture: Image.Image) -> torch.Tensor:
        if picture.size != (8, 8):
            raise error
        return transform(picture)

    pixels, mark, _ = ImageRows(names, tmp_path, refuse)[0]
    assert mark == status_of_reason("cannot be resized") and not pixels.any()
    error = MemoryError()
    with pytest.raises(MachineFault):
        ImageRows(names, tmp_path, refuse).read(0)
    assert ImageRows(names, tmp_path, refuse)[0][1] == encode.RETRY


class ProcessState(ImageRows):
    """Rows that are the reading process's niceness, and whether it ignores Ctrl-C."""

    def read(self, row: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        return torch.tensor([os.nice(0), int(ignored)]), ENCODED, encode.UNREAD


@pytest.mark.parametrize("pinned", [False, True])
def test_workers_ignore_ctrl_c_and_run_niced_without_a_gpu(names, tmp_path, monkeypatch, pinned: bool) -> None:
    asked: list[bool] = []

    def loader(*words: Any, pin_memory: bool, **options: Any) -> Any:
        asked.append(pin_memory)
        return DataLoader(*words, **options)

    monkeypatch.setattr(encode, "DataLoader", loader)
    pictures = ProcessState(names, tmp_path, transform)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs this may have it ignored
    ((_, told, *_),) = decode_batches(pictures, [range(2)], 1, pinned=pinned)
    signal.signal(signal.SIGINT, before)
    nice = min(19, os.nice(0) + (0 if pinned else 10))
    assert told.tolist() == [[nice, 1]] * 2 and asked == [pinned]
