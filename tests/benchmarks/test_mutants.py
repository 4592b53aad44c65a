"""`benchmarks.mutants`: the changes that are made and the mutants that count as killed."""

from __future__ import annotations

import ast

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
    (tmp_path / "duplex").mkdir()
    (tmp_path / "duplex/one.py").write_text(MODULE)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    return "duplex/one.py"


def test_every_operator_number_condition_and_call_is_changed(module):
    found = {(mutant.before, mutant.after) for mutant in tool.mutants(tool.ROOT / module)}
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


def test_a_mutant_changes_one_line_and_names_it(module):
    lines = ast.unparse(ast.parse(MODULE)).split("\n")
    for mutant in tool.mutants(tool.ROOT / module):
        changed = [(a.strip(), b.strip()) for a, b in zip(lines, mutant.source.split("\n"), strict=True) if a != b]
        assert changed == [(mutant.before, mutant.after)]
        assert mutant.name == f"{module}: `{mutant.before}` -> `{mutant.after}`"
        assert mutant.before.split()[0] in MODULE.split("\n")[mutant.line - 1]


def test_survivors_are_printed_and_counted(module, monkeypatch, capsys):
    monkeypatch.setattr(tool, "killed", lambda mutant, seconds: mutant.before != "LEAST = 3" and mutant.line > 0)
    assert tool.survey([module], 0, 0) == pytest.approx(0.9)
    output = capsys.readouterr()
    assert output.out == f"line 4, {module}: `LEAST = 3` -> `LEAST = 4`\n"
    assert "9 killed, 1 survived" in output.err and "90.0 % killed" in output.err


def test_a_module_is_mirrored_by_the_tests_of_its_name_and_those_that_import_it(tmp_path, monkeypatch):
    files = {
        "duplex/words.py": "",
        "duplex/methods/registry.py": "",
        "duplex/methods/one.py": "",
        "tests/test_words.py": "",
        "tests/test_pipeline.py": "import duplex.words",
        "tests/methods/test_every.py": "from duplex.methods.registry import f",
        "tests/methods/test_one_more.py": "",
        "tests/methods/test_all.py": "from duplex.methods import one\nfrom duplex.methods.one import f",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    tool._imports_of_tests.cache_clear()
    try:
        assert tool.tests_of("duplex/words.py") == ["tests/test_words.py"]
        own = [f"tests/methods/test_{name}.py" for name in ("one_more", "all", "every")]
        assert tool.tests_of("duplex/methods/one.py") == own
    finally:
        tool._imports_of_tests.cache_clear()
