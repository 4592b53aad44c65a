"""Copy the pipeline into the wheel, so that `duplex init` can write a project from an installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PATTERNS = ("params.yaml", "dvc.yaml", ".dvc*", ".dvc/config", ".dvc/.gitignore", ".dvc/plots/*.json", "pipeline/*.py")


def pipeline_files() -> list[Path]:
    """Return the files of both pipelines, relative to the repository."""
    files = [path for pattern in PATTERNS for folder in ("", "ablations/") for path in ROOT.glob(folder + pattern)]
    return sorted(path.relative_to(ROOT) for path in files if path.is_file())


class BuildWithPipeline(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in pipeline_files():
                target = Path(self.build_lib) / "duplex" / "project" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target)


setup(cmdclass={"build_py": BuildWithPipeline})
