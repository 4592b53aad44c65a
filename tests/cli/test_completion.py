"""Shells complete names, and editors check params.yaml by its JSON schema."""

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from duplex.cli import app
from tests.commands import Command, command
from tests.subprocesses import ROOT

__all__ = ["command"]


def completions(line: str) -> list[str]:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_DUPLEX_COMPLETE": "complete_bash"}
    return CliRunner().invoke(app, prog_name="duplex", env=words).output.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [("duplex train --dataset sh", {"shapes"}),
     ("duplex data remove mit-states-", {"mit-states-resnet18", "mit-states-blip"}),
     ("duplex sweep --methods clip,du", {"clip,dual", "clip,duplex"}), ("duplex compare --methods cs", {"csp", "cso"}),
     ("duplex fit photos --encoder tin", {"tiny"})],
)  # fmt: skip
def test_names_are_completed(line, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = set(completions(line))
    assert expected <= found and all(name.startswith(line.split()[-1]) for name in found)


def test_outside_of_a_project_nothing_is_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert completions("duplex train --dataset sh") == []


def test_params_prints_methods_and_a_schema_that_marks_mistakes(monkeypatch, command: Command):
    jsonschema = pytest.importorskip("jsonschema")
    monkeypatch.chdir(ROOT)
    check: Any = jsonschema.Draft202012Validator(json.loads(command("params", "--schema").out))
    read = YAML(typ="safe", pure=True)
    assert all(check.is_valid(read.load(Path(path))) for path in ("params.yaml", "ablations/params.yaml"))
    assert json.loads(command("params").out)["methods"]["cso_paper"]["finetune"]["blocks"] == "all"
    for section, change, place in (
        ("evaluation", {"feasibility": "exakt"}, "$.evaluation.feasibility"),
        ("extraction", {"batchsize": 3}, "$.extraction"),
        ("datasets", {"own": {"training": {"epoch": 3}}}, "$.datasets.own.training"),
        ("methods", {"own": {"finetune": {"blocks": 2, "with": 3}}}, "$.methods.own.finetune"),
    ):
        params = read.load(Path("params.yaml"))
        params[section] |= change
        assert [error.json_path for error in check.iter_errors(params)] == [place]
