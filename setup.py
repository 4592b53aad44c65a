"""The wheel carries the pipeline, copied from where it lives, so that `duplex init` can write a project."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
WANTED = ("params.yaml", "dvc.yaml", ".dvc*", ".dvc/config", ".dvc/.gitignore", ".dvc/plots/*.json", "pipeline/*.py")


def carried() -> list[Path]:
    found = [path for pattern in WANTED for place in ("", "ablations/") for path in HERE.glob(place + pattern)]
    return sorted(path.relative_to(HERE) for path in found if path.is_file())


class WithPipeline(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in carried():
                target = Path(self.build_lib) / "duplex" / "project" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(HERE / name, target)


setup(cmdclass={"build_py": WithPipeline})
