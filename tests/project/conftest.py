"""A small drawn project, without DVC."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from duplex.config.params import Params, load_params
from duplex.project import sweep, tune
from duplex.project.sweep import TaskRunner
from tests.commands import command
from tests.projects import encoded_project

__all__ = ["command"]


@pytest.fixture(scope="package")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    encoded_project(folder, ["csp", "closed_form"], [0, 1], epochs=3)
    return folder


@pytest.fixture
def project(drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder: a copy of the project with features and without runs."""
    for name in ("params.yaml", "artifacts"):
        (shutil.copytree if name == "artifacts" else shutil.copy)(drawn / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def params(project: Path) -> Params:
    return load_params(project / "params.yaml")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps and searches start no processes, which would import torch again; the last trial is the first."""

    def executor(*_: Any) -> Any:
        return lambda trials: map(TaskRunner(1).execute, reversed(trials))

    for module in (sweep, tune):
        monkeypatch.setattr(module, "in_parallel", executor)
