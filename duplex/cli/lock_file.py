"""What dvc.lock remembers of a data set, forgotten without touching a line of another."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from duplex.system.files import replaced

STAGE = re.compile(r"^  \S[^\n]*:\n(?:   [^\n]*\n?|\n)*", re.M)  # its name, and all that is indented further
COMMAND = re.compile(r"^    cmd: (.*)$", re.M)


def forget(dataset: str, lock: Path) -> int:
    """Take out the stages that ran for `dataset`; how many there were. Their commands tell: names may contain names."""
    if not lock.is_file():
        return 0
    text = lock.read_text(encoding="utf-8")
    gone = [found.span() for found in STAGE.finditer(text) if _is_of(found[0], dataset)]
    if gone:
        kept, at = [], 0
        for start, end in gone:
            kept.append(text[at:start])
            at = end
        left = "".join([*kept, text[at:]])
        if not STAGE.search(left):
            left = left.replace("\nstages:\n", "\nstages: {}\n")
        with replaced(lock.resolve()) as scratch:
            scratch.write_text(left, encoding="utf-8")
    return len(gone)


def _is_of(stage: str, dataset: str) -> bool:
    """`python pipeline/train.py shapes duplex 0`; an ablation's inputs are `... ablate.py inputs shapes`."""
    command = COMMAND.search(stage)
    words = shlex.split(command[1]) if command else []
    arguments = words[2:] if words[2:3] != ["inputs"] else words[3:]
    return arguments[:1] == [dataset]
