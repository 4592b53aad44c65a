"""Write a new project from the installed package: pipeline, parameters, and files for git and DVC."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from duplex.config.params import shipped_project
from duplex.errors import DuplexError, UsageError, install_command
from duplex.system.files import report_write_errors
from duplex.system.version import __version__

ABLATIONS = tuple(f"ablations/{name}" for name in ("dvc.yaml", ".dvcignore", ".dvc/config", ".dvc/.gitignore"))
COPIED = ("params.yaml", "dvc.yaml", ".dvcignore", *ABLATIONS)
DVC_FILES = (".dvc/config", ".dvc/.gitignore", ".dvc/plots/by_series.json")
GITIGNORE = """__pycache__/
.venv
*.partial
/dvc_plots/
/data/
/tensorboard/
# outputs of the pipeline, tracked by DVC; git tracks the metrics
/artifacts/**
!/artifacts/**/
!/artifacts/metrics.json
/ablations/plan
/ablations/inputs
/ablations/runs
# lists written by duplex data suspects
/suspects/
"""
README = """# {name}

A project of duplex {version}: parameters in `params.yaml`, stages in `dvc.yaml`.

```sh
dvc repro                        # run the pipeline on the data sets of params.yaml: by default `shapes`, which is drawn
duplex metrics                   # print the results; the report is artifacts/report/index.html
duplex predict IMAGE...          # recognise images with the best run
```

Your own images, as a folder `state/object/*.jpg` or a table: `duplex data add NAME PATH`. `duplex doctor` lists what
is missing. The ablations of `params.yaml` have a pipeline of their own: `cd ablations && dvc repro`.

After an upgrade of duplex, `dvc repro` repeats the stages whose code has changed; `dvc repro --force` repeats all.
"""


def init(folder: Path) -> list[str]:
    """Write a new project, and return a line of text per step. Raises `UsageError` instead of overwriting a file."""
    files = contents(folder.resolve().name)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    if taken := [name for name in files if (folder / name).exists()]:
        raise UsageError(f"{folder / taken[0]} exists; choose an empty folder")
    if find_spec("dvc") is None:
        raise DuplexError(f"DVC, which runs the pipeline, is not installed; {install_command('pipeline')}")
    inside = _inside_git(folder)
    steps = [f"{len(files)} files in {folder}"]
    with _removed_on_failure(folder):
        write(folder, files)
        if not inside:
            _run(["git", "init", "--quiet"], folder)
            steps.append("git init")
        if not (folder / ".dvc").is_dir():
            options = [] if (folder / ".git").exists() else ["--subdir"]
            _run([sys.executable, "-m", "dvc", "init", "--quiet", *options], folder)
            write(folder, {name: _text(name) for name in DVC_FILES})
            steps.append("dvc init")
    return steps


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Context manager: if the block fails, remove everything that it added to `folder`.

    An `OSError` of the block is raised as `DuplexError`.
    """
    existed = folder.is_dir()
    before = set(folder.rglob("*"))
    try:
        with report_write_errors(folder):
            yield
    except BaseException:
        added = set(folder.rglob("*")) - before
        for path in sorted(added, reverse=True):  # the files of a folder before the folder
            with suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if not existed:
            with suppress(OSError):
                folder.rmdir()
        raise


def contents(name: str) -> dict[str, str]:
    """Return the files of a new project, as path -> text. name: the project's name, for its README."""
    stages = sorted(path.name for path in (shipped_project() / "pipeline").glob("*.py"))
    return {
        "README.md": README.format(name=name, version=__version__),
        ".gitignore": GITIGNORE,
        **{name: _text(name) for name in (*COPIED, *(f"pipeline/{stage}" for stage in stages))},
    }


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _text(name: str) -> str:
    return (shipped_project() / name).read_text(encoding="utf-8")


def _inside_git(folder: Path) -> bool:
    """Return whether a folder, or its nearest existing parent, is in a git working tree."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    command = ["git", "rev-parse", "--is-inside-work-tree"]
    try:
        return subprocess.run(command, cwd=existing, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        raise DuplexError("git, which DVC needs, is not installed; install it and run the same command again") from None


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise DuplexError(f"`{' '.join(command[-3:])}` failed in {folder}: {lines[-1] if lines else done.returncode}")
