"""Run a `duplex` command in this process, as its console script runs it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from duplex.cli import main
from tests.subprocesses import ROOT


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    def refused(self, *parts: str) -> bool:
        """Return whether the command printed one line of error with all `parts`, and nothing else."""
        is_one_line = self.out == "" and self.err.startswith("duplex: ") and self.err.count("\n") == 1
        return self.code in (1, 2) and is_one_line and all(part in self.err for part in parts)


Command = Callable[..., CommandResult]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*words: object) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["duplex", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        return CommandResult(int(exit_info.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the repository's params.yaml."""
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path
