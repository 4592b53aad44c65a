"""A small project that has run the whole pipeline, shared by all tests of the report."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.project import report
from duplex.project.inventory import inventory_stage
from duplex.project.maps import maps_stage
from duplex.project.run import ProjectData
from tests.commands import command
from tests.projects import built_once, inside, make_project
from tests.report.browser import browser

__all__ = ["browser", "command"]


@dataclass(frozen=True)
class Project:
    folder: Path
    params: Params
    paths: ArtifactPaths  # relative: tests run in the folder

    @property
    def page(self) -> Path:
        return self.folder / self.paths.report / "index.html"


@pytest.fixture(scope="session")
def finished_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    paths = ArtifactPaths()

    def build(folder: Path) -> None:
        params = make_project(folder, seeds=(0, 1))
        with inside(folder):
            inventory_stage(ProjectData(params, "own", paths))
            maps_stage(ProjectData(params, "own", paths))
            report.report_stage(params, paths)

    folder = built_once(tmp_path_factory, "reported", build)
    return Project(folder, load_params(folder / "params.yaml"), paths)


@pytest.fixture
def project(finished_project):
    """The project; the test runs in its folder."""
    with inside(finished_project.folder):
        yield finished_project
