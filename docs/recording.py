"""Record a terminal as an image: `python docs/recording.py FOLDER` runs commands and writes docs/terminal.svg.

FOLDER is a project with drawn images (`duplex init FOLDER`, `duplex prepare --dataset shapes`). The output is that of
the commands; lines longer than the terminal are wrapped, and nothing else is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH = 100
FONTS = re.compile(r"@font-face \{.*?\}", re.S)  # fetched from elsewhere; the reader's own monospace font serves
COMMANDS = (
    "duplex fit data/shapes --out marks --minutes 5",
    "duplex predict data/shapes/red_star/0040.png --model marks",
    "duplex predict data/shapes/striped_house/0003.png --model marks --top 2",
)


def main() -> None:
    """Run the commands and write the recording."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "data/shapes").is_dir():
        sys.exit("usage: python docs/recording.py FOLDER, a project with data/shapes")
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    for command in COMMANDS:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text(_output(command, Path(sys.argv[1]))))
    picture = FONTS.sub("", console.export_svg(title="duplex", unique_id="terminal"))
    (HERE / "terminal.svg").write_text(picture, encoding="utf-8")


def _output(command: str, folder: Path) -> str:
    """Return what a command prints; stop if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command.split(), cwd=folder, env=os.environ | {"PATH": path}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}: {done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
