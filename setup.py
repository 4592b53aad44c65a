"""Copy the pipeline into the wheel, so that `duplex init` can write a project from an installed package.

The same files give the same wheel, whatever their modes and the umask; SOURCE_DATE_EPOCH replaces their times.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PATTERNS = ("params.yaml", "dvc.yaml", ".dvc*", ".dvc/config", ".dvc/.gitignore", ".dvc/plots/*.json", "pipeline/*.py")


def pipeline_files() -> list[Path]:
    """Return the files of both pipelines, relative to the repository."""
    files = [path for pattern in PATTERNS for folder in ("", "ablations/") for path in ROOT.glob(folder + pattern)]
    own = [path for path in files if path.is_file() and path.resolve() == path]  # `duplex init` makes the links
    return sorted(path.relative_to(ROOT) for path in own)


class BuildWithPipeline(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in pipeline_files():
                target = Path(self.build_lib) / "duplex" / "shipped" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target)


class WheelWithoutModes(bdist_wheel):
    """A wheel whose files all have mode 644: modes of a checkout depend on the umask."""

    def write_wheelfile(self, *given: Any, **named: Any) -> None:
        """Write the last file, and set the modes just before the archive is made."""
        super().write_wheelfile(*given, **named)
        for path in Path(self.bdist_dir).rglob("*"):
            if path.is_file():
                path.chmod(0o644)


setup(cmdclass={"build_py": BuildWithPipeline, "bdist_wheel": WheelWithoutModes})
