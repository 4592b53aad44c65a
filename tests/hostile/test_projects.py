"""Two pipelines at once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from duplex.project.doctor import init
from tests.projects import draw_project
from tests.subprocesses import ENVIRONMENT
from tests.waiting import wait_until

pytestmark = pytest.mark.long
REPRO = [sys.executable, "-m", "dvc", "repro", "extract@own"]
STAGE = re.compile(r"Running stage '([^']+)'")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    init(folder)
    draw_project(
        folder, ["clip"], scale=0.03,
        changes=lambda record: record["datasets"]["own"]["source"].update(root="pictures", table="pictures.csv"),
    )  # fmt: skip
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # dvc.yaml says `python`
    return subprocess.Popen(
        REPRO, cwd=folder, env={**ENVIRONMENT, "PATH": path}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_of_two_pipelines_at_once_one_is_refused_and_the_other_completes(project: Path) -> None:
    first = start(project)
    wait_until((project / ".dvc/tmp/rwlock").exists)
    wait_until(lambda: b'"write"' in (project / ".dvc/tmp/rwlock").read_bytes())
    second = start(project)
    refused, _ = second.communicate(timeout=300)
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 0, output
    assert second.returncode != 0 and re.search("busy|lock", refused), refused
    third = start(project)
    output, _ = third.communicate(timeout=300)
    assert third.returncode == 0 and STAGE.findall(output) == ["plan"], output
