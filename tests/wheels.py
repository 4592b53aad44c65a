"""Build the package's wheel in tests."""

import os
import subprocess
import sys
from pathlib import Path

from tests.subprocesses import ROOT

PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")


def listed_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def build_wheel(folder: Path, **environment: str) -> Path:
    for name in listed_files():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source"],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel
