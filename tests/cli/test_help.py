"""`duplex --help` lists all commands in panels, one line each."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.rich_utils
from typer.main import get_command
from typer.testing import CliRunner

from duplex.cli import PANELS, app

COLUMNS = 100


def groups(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    if inner := getattr(command, "commands", None):
        yield words
        for name, child in inner.items():
            yield from groups(child, *words, name)


@pytest.mark.parametrize("words", list(groups(get_command(app))), ids=lambda words: "-".join(words) or "duplex")
def test_each_command_takes_one_line(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.rich_utils, "MAX_WIDTH", COLUMNS)
    shown = CliRunner().invoke(app, [*words, "--help"], env={"NO_COLOR": "1"}).output.splitlines()
    heads = [place for place, line in enumerate(shown) if re.match(r"╭─ (?!Options|Arguments)", line)]
    lines = [line for line in shown[heads[0] :] if line.startswith("│")]
    command = get_command(app)
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines] == list(command.commands)  # type: ignore[attr-defined]


def test_the_panels_stand_in_their_order() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert re.findall(r"╭─ (\w+)", shown) == ["Options", *PANELS]
    assert list(get_command(app).commands) == [name for names in PANELS.values() for name in names]  # type: ignore[attr-defined]
