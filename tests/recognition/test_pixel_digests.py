"""The file that keeps digests of pixels between two fits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from duplex.recognition.labelled_folder import PIXELS, load_pixel_digests, save_pixel_digests
from duplex.training.checkpoint import with_checksum


def edited(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(change(json.loads(path.read_text()))))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "other pixels": edited(lambda record: {**record, "pixels": {"a": "0"}}),
    "another decoder": edited(lambda record: with_checksum({**record, "decoder": "Pillow 1.0"})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_pixel_digests_counts_as_empty(tmp_path: Path, damage: str) -> None:
    save_pixel_digests(tmp_path, {"a": "1", "b": "2", "unreadable": "unreadable"})
    assert load_pixel_digests(tmp_path) == {"a": "1", "b": "2"}
    DAMAGE[damage](tmp_path / PIXELS)
    assert load_pixel_digests(tmp_path) == {}
