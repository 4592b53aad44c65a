"""`duplex init`: a project of the installed package works like a clone."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.subprocesses import ENVIRONMENT, ROOT
from tests.wheels import PIP, build_wheel

DUPLEX = [sys.executable, "-c", "from duplex.cli import main; main()"]
DVC = [sys.executable, "-m", "dvc"]


def run(*command: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_init_writes_a_project(tmp_path):
    done = run(*DUPLEX, "init", "new", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "git init" in done.stderr and "dvc init" in done.stderr
    folder = tmp_path / "new"
    wanted = {"params.yaml", "dvc.yaml", "ablations", ".gitignore", "README.md", "pipeline", ".git", ".dvc"}
    assert wanted <= set(os.listdir(folder))
    assert (folder / "params.yaml").read_text() == (ROOT / "params.yaml").read_text()
    for pipeline in ("dvc.yaml", "ablations/dvc.yaml"):
        text = (folder / pipeline).read_text()
        assert not re.search(r"- (\.\./)?duplex(/|$)", text, re.M)
        assert text.count("always_changed: true") == 1
        for dependency in re.findall(r"- (pipeline/\S+)", text):
            assert (folder / dependency).is_file()
    assert run(*DUPLEX, "params", "--check", folder=folder).returncode == 0
    for place, stage in ((folder, "train@shapes-duplex-0"), (folder / "ablations", "train@shapes-static-0")):
        stages = run(*DVC, "stage", "list", "--name-only", folder=place)
        assert stages.returncode == 0 and stage in stages.stdout.split(), stages.stderr
    status = run("git", "status", "--porcelain", "--untracked-files=all", folder=folder).stdout
    assert "params.yaml" in status and ".dvc/tmp" not in status


def test_existing_files_are_not_overwritten(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dvc.yaml").write_text("mine")
    assert command("init", ".").refused("dvc.yaml exists; choose an empty folder")
    assert os.listdir(tmp_path) == ["dvc.yaml"] and (tmp_path / "dvc.yaml").read_text() == "mine"
    assert command("init", "dvc.yaml").refused("is a file; give a folder")


@pytest.mark.slow
def test_init_inside_a_git_repository_uses_that_repository(tmp_path):
    run("git", "init", "-q", folder=tmp_path)
    done = run(*DUPLEX, "init", "a/part", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    part = tmp_path / "a" / "part"
    assert not (part / ".git").exists() and (part / ".dvc" / "config").is_file()
    assert run(*DVC, "stage", "list", folder=part).returncode == 0


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """An environment with duplex installed from a wheel of the working tree, and this environment's other packages.

    They come through a `.pth` file, in which `.pth` files of editable installations have no effect.
    """
    scratch = tmp_path_factory.mktemp("wheel")
    fresh = scratch / "fresh"
    wheel = build_wheel(scratch)
    venv.create(fresh, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(fresh), "platbase": str(fresh)}))
    run_checked(
        *PIP, "--python", fresh, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, folder=scratch
    )
    assert (site / "duplex").is_dir()
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return fresh


def run_checked(*command: object, folder: Path) -> None:
    done = run(*command, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_an_installed_package_works_without_the_repository(environment, tmp_path):
    smoke = tmp_path / "smoke.py"
    smoke.write_bytes((ROOT / "tests" / "smoke.py").read_bytes())
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    done = run(environment / "bin" / "python", smoke, folder=tmp_path, PATH=path, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"works in {environment}" in done.stdout
