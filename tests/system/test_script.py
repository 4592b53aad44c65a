"""Arguments of the pipeline's scripts: right ones come back, all others are a line on their use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duplex.system.script import arguments
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
    assert arguments(form) == words


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
        arguments(form)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"usage: script.py {form}".rstrip() + "\n"


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "pipeline").glob("*.py")))
def test_every_script_checks_its_arguments(script):
    done = subprocess.run(
        [sys.executable, str(Path("pipeline") / script), *["x"] * 5],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ") and len(done.stderr.splitlines()) == 1
