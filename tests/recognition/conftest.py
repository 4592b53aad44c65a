"""A small trained project, shared by all tests of recognition."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from duplex.artifacts import ArtifactPaths
from duplex.data.tables import read_manifest
from tests.commands import command
from tests.projects import METHODS, built_once, inside, make_project
from tests.recognition.drawn_folder import draw_folder
from tests.recognition.serving import RunningServer
from tests.report.browser import browser

__all__ = ["browser", "command"]


@dataclass(frozen=True)
class TrainedProject:
    folder: Path

    @property
    def paths(self) -> ArtifactPaths:
        return ArtifactPaths(self.folder / "artifacts")

    def run(self, method: str = "duplex") -> Path:
        return self.paths.run("own", method, 0).root

    def images(self, split: str = "test") -> list[Path]:
        manifest = read_manifest(self.paths.manifest("own"))
        return [self.folder / "pictures" / image for image in manifest[manifest["split"] == split]["image"]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedProject:
    build = partial(make_project, seeds=(0,), methods=(*METHODS, "closed_form", "dual"))
    return TrainedProject(built_once(tmp_path_factory, "trained", build))


@pytest.fixture
def project(trained):
    with inside(trained.folder):
        yield trained


@pytest.fixture(scope="session")
def server(trained: TrainedProject) -> Iterator[RunningServer]:
    with RunningServer(trained.run(), trained.folder, "--seconds", "3", "--max-megabytes", "8") as running:
        yield running


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("drawn") / "shop")
