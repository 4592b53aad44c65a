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
    assert strict is not None
    rows = BLOCK // 2
    for a, b in zip(values, values, strict=True):
        if a < b:
            raise ValueError(f"{1 + 1} is wrong")
    file.madvise(1)
    return -default_rng(7).permutation(values)[-1]
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "duplex").mkdir()
    (tmp_path / "duplex/one.py").write_text(MODULE)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    return "duplex/one.py"


def test_every_operator_number_condition_and_call_is_changed(module):
    assert {(mutant.before, mutant.after) for mutant in tool.mutants(tool.ROOT / module)} == {
        ("LEAST = 3", "LEAST = 4"), ("def total(values, strict=False):", "def total(values, strict=True):"),
        ("if len(values) > LEAST:", "if len(values) >= LEAST:"), ("if len(values) > LEAST:", "if False:"),
        ("if len(values) > LEAST:", "if True:"), ("values.sort()", "None"), ("if a < b:", "if a <= b:"),
        ("if a < b:", "if False:"), ("if a < b:", "if True:"),
        ("return -default_rng(7).permutation(values)[-1]", "return +default_rng(7).permutation(values)[-1]"),
        ("return -default_rng(7).permutation(values)[-1]", "return -default_rng(7).permutation(values)[0]"),
    }  # fmt: skip


def test_a_mutant_is_checked_by_the_tests_that_run_its_line():
    found = tool.Runs(
        seconds={"tests/test_two.py::a": 1.0, "tests/test_one.py::b": 2.0, "tests/test_two.py::c": tool.SECONDS},
        lines={"duplex/one.py": {"3": ["tests/test_two.py::a", "tests/test_one.py::b"], "4": ["tests/test_two.py::c"]}},
    )
    chosen = {line: found.tests_of(tool.Mutant("duplex/one.py", line, "", "", "")) for line in (3, 4, 1)}
    assert chosen[3] == ["tests/test_one.py::b", "tests/test_two.py::a"]  # its own file first
    assert chosen[4] == ["tests/test_two.py::c"]
    assert chosen[1] == chosen[3]  # run by the import: every test of the module, as long as time is left
    assert found.tests_of(tool.Mutant("duplex/two.py", 1, "", "", "")) == []
