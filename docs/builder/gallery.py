"""Run the scripts of examples/gallery: `python -m docs.builder.gallery` stores what they print, and their pictures.

A script NAME.py prints, and writes NAME.png. Beside it lies NAME.txt, in docs/assets/gallery a thumbnail NAME.png.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples/gallery"
THUMBNAILS = ROOT / "docs/assets/gallery"
SHOWN = re.compile(r"^<!-- file: \.\./examples/gallery/(\w+)\.py -->$", re.M)
WIDTH, COLOURS = 540, 128  # of a thumbnail


def names() -> list[str]:
    """The examples in the order of the page, in which they run."""
    return SHOWN.findall((ROOT / "docs/gallery.md").read_text(encoding="utf-8"))


def environment(folder: Path) -> dict[str, str]:
    """The environment of examples that run in a folder."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }


def run(name: str, folder: Path) -> str:
    """What an example prints when it runs in a folder; raises `CalledProcessError` if it fails."""
    script, given = [sys.executable, str(SCRIPTS / f"{name}.py")], environment(folder)
    return subprocess.run(script, cwd=folder, env=given, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    """Run all examples and store output and thumbnails."""
    THUMBNAILS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names():
            (SCRIPTS / f"{name}.txt").write_text(run(name, Path(folder)), encoding="utf-8")
            picture = Image.open(Path(folder) / f"{name}.png").convert("RGB")
            picture.thumbnail((WIDTH, WIDTH))
            picture.quantize(COLOURS).save(THUMBNAILS / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
