"""The commands and options in README.md and on the pages of docs/ exist."""

import re
import shlex
import subprocess
import sys

import pytest
from typer.main import get_command

from duplex.cli import app
from tests.subprocesses import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
USE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT + USE, re.S))
LINES = [line.split("#")[0].split("&&")[0].strip().removeprefix(".venv/bin/") for line in BLOCKS.splitlines()]
INLINE = [code for code in re.findall(r"`([^`\n]+)`", TEXT + USE) if code.split()[0] in ("duplex", "dvc", "make")]
COMMANDS = sorted({line.rstrip("… ") for line in [*LINES, *INLINE] if " " in line})


def test_commands_are_found():
    assert {"make repro", "make test", "dvc metrics diff"} <= set(COMMANDS)


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("duplex ")])
def test_a_duplex_command_and_its_options_exist(line):
    words = shlex.split(line)[1:]
    command = get_command(app)
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    is_command = not hasattr(command, "commands") or getattr(command, "invoke_without_command", False)
    assert is_command or words[0].startswith("--"), f"{line}: no such command"
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("make ")])
def test_a_make_target_exists(line):
    assert shlex.split(line)[1] in re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.slow
def test_dvc_knows_the_pipeline_and_the_ablations():
    for folder, expected in ((ROOT, "train@shapes-dual-0"), (ROOT / "ablations", "train@shapes-static-4")):
        done = subprocess.run(
            [sys.executable, "-m", "dvc", "stage", "list", "--name-only"],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert {expected, "report"} <= set(done.stdout.split())
