"""`benchmarks.mutants`: the changes that are made and the mutants that count as killed."""

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
