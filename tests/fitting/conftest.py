"""A folder of drawn images that models are fitted to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recognition.drawn_folder import draw_folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("drawn") / "shop")
