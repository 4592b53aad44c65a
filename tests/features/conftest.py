from collections.abc import Callable
from pathlib import Path

import pytest

from duplex.encoders import load_encoder
from duplex.features.extraction import ExtractionReport, extract
from tests.encoders.small import write_folder
from tests.features.pictures import write_pictures

Run = Callable[..., ExtractionReport]


@pytest.fixture(scope="session")
def encoder_name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def encoder(encoder_name: str):
    return load_encoder(encoder_name, towers="image")


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    return write_pictures(tmp_path / "pictures", 40)


@pytest.fixture
def run(tmp_path: Path, images: list[str], encoder) -> Run:
    """Extract the forty pictures into `tmp_path/features.h5` with small batches, in this process."""

    def call(out: Path | None = None, **options) -> ExtractionReport:
        given = {"manifest_sha256": "m" * 64, "batch_size": 8, "num_workers": 0, "progress": False, **options}
        used, seen = given.pop("encoder", encoder), given.pop("images", images)
        return extract(seen, tmp_path / "pictures", out or tmp_path / "features.h5", used, **given)

    return call
