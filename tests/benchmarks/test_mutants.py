"""`benchmarks.mutants`: which changes are made, which are left out, and who counts as killed."""

from __future__ import annotations

import ast
import itertools
import re
from types import SimpleNamespace

import pytest

from benchmarks import mutants as tool

MODULE = '''"""A module."""

BLOCK = 1 << 4  # rows at a time
LEAST = 3
TWICE: int = 2


def total(values, strict=False):
    if len(values) > LEAST:
        values.sort()
    for a, b in zip(values, values, strict=True):
        if a < b:
            raise ValueError(f"{1 + 1} is wrong")
    return -sum(values)
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a project of its own, and what mirrors it."""
    (tmp_path / "duplex").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/tests.md").write_text("* duplex/one.py: `LEAST = 3` -> `LEAST = 4`: nobody has four\n")
    (tmp_path / "duplex/one.py").write_text(MODULE)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "HELD", {"duplex/one.py": {"BLOCK"}})
    return "duplex/one.py"


def test_a_change_is_made_of_every_operator_number_condition_and_call(module):
    found = {(one.before, one.after) for one in tool.mutants(tool.ROOT / module)}
    assert found == {
        ("LEAST = 3", "LEAST = 4"),
        ("def total(values, strict=False):", "def total(values, strict=True):"),
        ("if len(values) > LEAST:", "if len(values) >= LEAST:"),
        ("if len(values) > LEAST:", "if False:"),
        ("if len(values) > LEAST:", "if True:"),
        ("values.sort()", "None"),
        ("if a < b:", "if a <= b:"),
        ("if a < b:", "if False:"),
        ("if a < b:", "if True:"),
        ("return -sum(values)", "return +sum(values)"),
    }


def test_a_change_is_of_one_line_and_says_which(module):
    lines = ast.unparse(ast.parse(MODULE)).split("\n")
    for one in tool.mutants(tool.ROOT / module):
        changed = [(a.strip(), b.strip()) for a, b in zip(lines, one.source.split("\n"), strict=True) if a != b]
        assert changed == [(one.before, one.after)]
        assert one.name == f"{module}: `{one.before}` -> `{one.after}`"
        assert one.before.split()[0] in MODULE.split("\n")[one.line - 1]


def test_known_survivors_are_left_out_and_counted(module, monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(tool, "killed", lambda one, seconds: bool(tried.append(one)))
    share = tool.survey([module], 0, 0)
    assert "LEAST = 3" not in {one.before for one in tried}
    said = capsys.readouterr()
    assert share == 0
    assert "0 killed, 9 survived, 1 left out as known" in said.err
    assert "no mutant any more" not in said.out


def test_a_known_survivor_that_is_gone_is_told_of(module, capsys, monkeypatch):
    entry = f"{module}: `LEAST = 5` -> `LEAST = 6`"
    with (tool.ROOT / "docs/tests.md").open("a") as page:
        page.write(f"* {entry}: nobody has six\n* duplex/other.py: `a` -> `b`: another module\n")
    monkeypatch.setattr(tool, "killed", lambda one, seconds: one.line > 0)
    assert tool.survey([module], 0, 0) == 1
    said = capsys.readouterr()
    assert said.out == f"no mutant any more, {entry}\n"
    assert "100.0 % killed, 90.0 % of everything drawn" in said.err


def test_a_run_that_is_stopped_for_hours_goes_on_as_if_it_had_not_been(monkeypatch):
    hours = itertools.count(0, 3600)
    pauses = iter([(0, 0), (0, 0), (7, 0)])
    monkeypatch.setattr(tool, "time", SimpleNamespace(monotonic=lambda: float(next(hours)), sleep=lambda _: None))
    monkeypatch.setattr(tool, "os", SimpleNamespace(fork=lambda: 7, waitpid=lambda *_: next(pauses), WNOHANG=1))
    assert not tool.killed(None, 1.0)


def test_tests_that_never_end_kill(monkeypatch):
    gone = []
    system = SimpleNamespace(
        fork=lambda: 7, waitpid=lambda *_: (0, 0), WNOHANG=1, killpg=lambda process, _: gone.append(process)
    )
    monkeypatch.setattr(tool, "os", system)
    assert tool.killed(None, 2 * tool.LOOK)
    assert gone == [7]


def test_constants_that_are_left_alone_are_there():
    """`HELD` names what has been renamed or removed nowhere."""
    for path, names in tool.HELD.items():
        text = (tool.ROOT / path).read_text(encoding="utf-8")
        assert all(re.search(rf"^ *{name} = ", text, re.M) for name in names), path
