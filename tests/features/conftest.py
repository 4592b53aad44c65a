from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import pytest

from duplex.encoders.base import load_encoder
from duplex.features import extract as extraction
from duplex.features.extract import ExtractionReport, ExtractionSettings, extract
from duplex.features.file import row_checksums, value_names
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
    """Extract the forty images into `tmp_path/features.h5` with small batches, in this process."""

    def call(out: Path | None = None, **options) -> ExtractionReport:
        given = {"manifest_sha256": "m" * 64, "batch_size": 8, "num_workers": 0, **options}
        used, names = given.pop("encoder", encoder), given.pop("images", images)
        call_options = {name: given.pop(name) for name in ("shard", "reuse", "fresh") if name in given}
        settings = ExtractionSettings(tmp_path / "pictures", **given)
        return extract(names, out or tmp_path / "features.h5", used, settings, **call_options)

    return call


@pytest.fixture
def stop_at_third_batch(monkeypatch) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def call() -> Iterator[None]:
        encode, numbers = extraction.encode_batches, count()

        def three(*arguments: Any) -> Iterator[Any]:
            for batch in encode(*arguments):
                if next(numbers) == 3:
                    raise KeyboardInterrupt
                yield batch

        with monkeypatch.context() as patched:
            patched.setattr(extraction, "encode_batches", three)
            yield

    return call


def update_checksums(file: h5py.File) -> None:
    statuses = file["status"][...]
    for column, name in enumerate(value_names(file)):
        file["checksums"][:, column] = row_checksums(file[name][...], statuses if name == "cls" else None)


class Wrapped:
    """An encoder whose `encode_images`, and `encode_patches` if not None, are other functions."""

    def __init__(self, encoder, encode_images, encode_patches=None) -> None:
        self.encoder, self.encode_images = encoder, encode_images
        self.encode_patches = encode_patches or encoder.encode_patches

    def __getattr__(self, name: str):
        return getattr(self.encoder, name)
