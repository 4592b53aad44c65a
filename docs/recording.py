"""Record a terminal as an image: `python docs/recording.py FOLDER` runs commands and writes docs/terminal.svg.

FOLDER is a project with drawn images (`duplex init FOLDER`, `duplex prepare --dataset shapes`). The output is that of
the commands; longer lines are wrapped, runs of spaces are shortened to two, and nothing else is changed. The image is
so narrow that a page of 400 pixels shows it legibly.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH = 46  # columns
PIXELS = 520  # width of the image on a page with room for it; narrower pages scale it down
FONTS = re.compile(r"@font-face \{.*?\}", re.S)  # fetched from elsewhere; the reader's own monospace font serves
COMMANDS = (
    "duplex fit data/shapes --out marks",
    "duplex predict data/shapes/red_star/0040.png --model marks",
)


def main() -> None:
    """Run the commands and write the recording."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "data/shapes").is_dir():
        sys.exit("usage: python docs/recording.py FOLDER, a project with data/shapes")
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    for command in COMMANDS:
        console.print(Text(_wrapped(f"$ {command}", " \\"), "bold"))
        for line in _output(command, Path(sys.argv[1])).splitlines():
            console.print(Text(_wrapped(line)))
    console.print()  # the last line is cut at its lower edge
    picture = FONTS.sub("", console.export_svg(title="duplex", unique_id="terminal"))
    picture = picture.replace("<svg ", f'<svg width="{PIXELS}" ', 1)
    (HERE / "terminal.svg").write_text(picture, encoding="utf-8")


def _wrapped(line: str, end: str = "") -> str:
    """A line cut at spaces to the width of the terminal; cut lines end with `end` and go on indented.

    >>> print(_wrapped("accuracy  0.5,      and more words than a terminal of few columns holds"))
    accuracy  0.5,  and more words than a terminal
      of few columns holds
    """
    parts = textwrap.wrap(re.sub(" {3,}", "  ", line), WIDTH - len(end), subsequent_indent="  ", break_on_hyphens=False)
    return f"{end}\n".join(parts)


def _output(command: str, folder: Path) -> str:
    """What a command prints; exits if it fails."""
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
