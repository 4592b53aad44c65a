"""Arguments of the pipeline's scripts: right ones come back, all others are a line on their use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from duplex.system.script import run_script
from tests.subprocesses import ENVIRONMENT, ROOT

RUN, ROWS = "DATASET METHOD SEED", "row NAME | table"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (RUN, ["shapes", "duplex", "0"]),
        (RUN, ["shapes", "duplex", str(2**63 - 1)]),
        (ROWS, ["row", "static"]),
        (ROWS, ["table"]),
        ("", []),
    ],
)
def test_what_fits_comes_back(monkeypatch, form, words):
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    given: list[str] = []
    run_script(form, lambda *arguments: given.extend(arguments))
    assert given == words


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (RUN, []),
        (RUN, ["shapes", "duplex"]),
        (RUN, ["shapes", "duplex", "0", "1"]),
        *((RUN, ["shapes", "duplex", seed]) for seed in ("one", "-1", "1.5", "", "²", str(2**63), "9" * 5000)),
        (RUN, ["", "duplex", "0"]),
        (ROWS, ["column", "static"]),
        (ROWS, ["row"]),
        ("", ["more"]),
    ],
)
def test_anything_else_is_a_line_on_the_use(monkeypatch, capsys, form, words):
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    with pytest.raises(SystemExit) as left:
        run_script(form, lambda *_: pytest.fail("the work began"))
    assert left.value.code == 2
    assert capsys.readouterr().err == f"usage: script.py {form}".rstrip() + "\n"


SCRIPT = """
import runpy, sys
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("script", sorted((ROOT / "pipeline").glob("*.py")), ids=lambda path: path.name)
def test_every_script_checks_its_arguments_before_it_imports_torch(script):
    """Torch is imported inside of `run_command` only: then Ctrl-C meanwhile is one line, too."""
    command = [sys.executable, "-c", SCRIPT, script, *["x"] * 5]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith("usage: ") and len(done.stderr.splitlines()) == 1
