"""Errors of the machine do not mark images as unreadable; damaged caches are refused and extracted again."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.hostile.conftest import CACHE

FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.fixture
def break_image(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def arrange(name: str, fault: Exception, times: int = 10**6) -> None:
        real, left = Image.open, [times]

        def refuse(path: object, *args: object, **options: object) -> object:
            if str(path).endswith(name) and left[0] > 0:
                left[0] -= 1
                raise fault
            return real(path, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr("duplex.data.images.Image.open", refuse)

    return arrange


@pytest.mark.parametrize(("fault", "workers"), [(MemoryError(), 0), (FILES, 2)], ids=str)
def test_extraction_stops_and_can_be_resumed(pics, command, break_image, monkeypatch, fault, workers) -> None:
    assert command("extract", "-d", "pics", "--out", "whole.h5").code == 0
    break_image("00009.jpg", fault)
    params = (pics / "params.yaml").read_text()
    (pics / "params.yaml").write_text(params.replace("num_workers: 0", f"num_workers: {workers}"))
    answer = command("extract", "-d", "pics")
    assert answer.refused("00009.jpg could not be read", "run the command again")
    assert not Path(CACHE).exists()
    monkeypatch.undo()
    monkeypatch.chdir(pics)
    assert command("extract", "-d", "pics").code == 0
    assert Path(CACHE).read_bytes() == Path("whole.h5").read_bytes()
