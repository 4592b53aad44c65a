"""The file that keeps digests of pixels between two fits."""

import json
from pathlib import Path

from duplex.recognition.labelled_folder import PIXELS, load_pixel_digests, save_pixel_digests


def test_digests_of_pixels_are_kept_for_one_decoder(tmp_path: Path) -> None:
    assert load_pixel_digests(tmp_path) == {}
    save_pixel_digests(tmp_path, {"a": "1", "b": "2", "unreadable": "unreadable"})
    assert load_pixel_digests(tmp_path) == {"a": "1", "b": "2"}
    record = json.loads((tmp_path / PIXELS).read_text())
    (tmp_path / PIXELS).write_text(json.dumps({**record, "decoder": "Pillow 1.0"}))
    assert load_pixel_digests(tmp_path) == {}
