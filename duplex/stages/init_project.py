"""A new project from the installed package: the pipeline, its numbers, and the little that git and DVC need."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from duplex.errors import DuplexError, UsageError
from duplex.system.version import __version__

CARRIED = Path(__file__).parents[1] / "project"  # in a wheel (setup.py)
CLONE = Path(__file__).parents[2]  # where the package is run from a clone
VERBATIM = ("params.yaml", ".dvcignore", "ablations/.dvcignore", "ablations/.dvc/config", "ablations/.dvc/.gitignore")
PIPELINES = ("dvc.yaml", "ablations/dvc.yaml")
OF_DVC = (".dvc/config", ".dvc/.gitignore", ".dvc/plots/by_series.json")
IGNORED = """__pycache__/
.venv
*.partial
/dvc_plots/
/data/
# what the pipeline writes and DVC keeps; the metrics are git's
/artifacts/**
!/artifacts/**/
!/artifacts/metrics.json
/ablations/plan
/ablations/inputs
/ablations/runs
# what duplex data suspects writes
/suspects/
"""
README = """# {name}

A project of duplex {version}. `params.yaml` holds every number, `dvc.yaml` the stages.

```sh
dvc repro                        # the whole pipeline, on the drawn benchmark unless params.yaml names other data
duplex metrics                   # the table; the page is artifacts/report/index.html
duplex predict PICTURE...        # what the best run says of pictures
```

Your own pictures, as a folder `state/object/*.jpg` or a table: `duplex data add NAME PATH`. `duplex doctor` says what
is missing. The ablation rows of `params.yaml` are a pipeline of their own: `cd ablations && dvc repro`.

The package lies outside of this folder, so `dvc repro` looks each time at what runs stand on (the stage `plan`) and
repeats those that an upgrade of duplex changed. Manifests and features are kept; `dvc repro --force` makes all anew.
"""


def init(folder: Path) -> list[str]:
    """Write the project; say what was done. Nothing that is there is overwritten."""
    files = contents(folder.resolve().name)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    if taken := [name for name in files if (folder / name).exists()]:
        raise UsageError(f"{folder / taken[0]} is there already; choose an empty folder")
    if find_spec("dvc") is None:
        raise DuplexError("DVC, which runs the pipeline, is not installed; pip install 'duplex[pipeline]'")
    inside = _inside_git(folder)
    write(folder, files)
    done = [f"{len(files)} files in {folder}"]
    if not inside:
        _run(["git", "init", "--quiet"], folder)
        done.append("git init")
    if not (folder / ".dvc").is_dir():
        below = [] if (folder / ".git").exists() else ["--subdir"]
        _run([sys.executable, "-m", "dvc", "init", "--quiet", *below], folder)
        write(folder, {name: _text(name) for name in OF_DVC})
        done.append("dvc init")
    return done


def contents(name: str) -> dict[str, str]:
    """Path -> text of a project's own files."""
    stages = sorted(path.name for path in (_source() / "pipeline").glob("*.py"))
    return {
        "README.md": README.format(name=name, version=__version__),
        ".gitignore": IGNORED,
        **{name: _text(name) for name in (*VERBATIM, *(f"pipeline/{stage}" for stage in stages))},
        **{name: without_sources(_text(name)) for name in PIPELINES},
    }


def without_sources(text: str) -> str:
    """A dvc.yaml without dependencies on the package's own files, which lie elsewhere. The stage whose only one it is
    looks each time instead, which costs seconds: what it writes says whether the package changed."""
    text = re.sub(r"    deps:\n      - (\.\./)?duplex\n", "    always_changed: true\n", text)
    return re.sub(r" +- (\.\./)?duplex/.*\n", "", text)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _source() -> Path:
    for folder in (CARRIED, CLONE):
        if (folder / "dvc.yaml").is_file():
            return folder
    raise DuplexError("this installation carries no pipeline; install duplex from its wheel")


def _text(name: str) -> str:
    return (_source() / name).read_text(encoding="utf-8")


def _inside_git(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, lies in a working tree."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    command = ["git", "rev-parse", "--is-inside-work-tree"]
    try:
        return subprocess.run(command, cwd=there, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        raise DuplexError("git is not installed; DVC needs it: install git and run the same command again") from None


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise DuplexError(f"`{' '.join(command[-3:])}` failed in {folder}: {said[-1] if said else done.returncode}")
