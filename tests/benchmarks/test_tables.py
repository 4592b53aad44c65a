"""Each table of docs/results has its commands, and they are well formed."""

import argparse
import importlib
import shlex

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from benchmarks import study
from benchmarks.tables import COMMANDS
from duplex.cli import app
from duplex.config.params import load_params
from tests.subprocesses import ROOT

TABLES: dict[str, str | None] = YAML(typ="safe").load(COMMANDS)


def words_of(command: str | None) -> list[list[str]]:
    """The words of each simple command in a few lines of bash."""
    lines = (command or "").replace("\\\n", "").replace(" && ", "\n").replace("; ", "\n").splitlines()
    return [shlex.split(line.removeprefix("do "), comments=True) for line in lines]


def test_every_table_has_its_commands() -> None:
    assert TABLES.keys() == {path.stem for path in COMMANDS.parent.glob("*.csv")}
    assert [name for name, command in TABLES.items() if not command] == ["scale"]


@pytest.mark.parametrize("name", TABLES)
def test_the_commands_of_a_table_are_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        pass

    def stop(parser: argparse.ArgumentParser) -> None:
        raise Parsed(parse(parser))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.chdir(ROOT)
    for words in words_of(TABLES[name]):
        if words[:2] == ["python", "-m"]:
            monkeypatch.setattr("sys.argv", words[2:])
            with pytest.raises(Parsed) as parsed:
                importlib.import_module(words[2]).main()
            if words[2] == "benchmarks.study":
                check_rows(parsed.value.args[0])
        elif words[0] == "duplex":
            with pytest.raises(SystemExit) as ended:
                get_command(app)([*words[1:], "--help"])
            assert ended.value.code == 0
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file()
        else:
            assert words[0] in ("for", "done"), words


def check_rows(wanted: argparse.Namespace) -> None:
    """Each row is a method of params.yaml with options that its kind has."""
    names = study.split_rows(wanted.methods)
    params = study.with_rows(load_params(), names, wanted.block_rate, wanted.block_epochs)
    assert set(study.split_rows(wanted.of)) <= set(names)
    for name in names:
        params.method(name, "shapes")
        params.finetune(name, "shapes")
