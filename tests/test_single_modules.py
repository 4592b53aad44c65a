"""The modules that docs/library.md lists are there, and light ones load nothing heavy."""

import importlib
import re
import subprocess
import sys

import pytest

from tests.subprocesses import ENVIRONMENT, ROOT

PAGE = (ROOT / "docs" / "library.md").read_text()


@pytest.mark.parametrize("row", re.findall(r"^\| (`duplex\..*?) \|", PAGE, re.M))
def test_every_name_is_there(row):
    first, *others = re.findall(r"`([\w.]+)`", row)
    module, _, name = first.rpartition(".")
    for one in (name, *others):
        assert hasattr(importlib.import_module(module), one), f"{module}.{one}"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("duplex", "torch numpy pandas open_clip"), ("duplex.cli", "torch PIL h5py open_clip"),
     ("duplex.evaluation.metrics", "torch dvc open_clip")],
)  # fmt: skip
def test_a_module_loads_nothing_heavy(module, heavy):
    script = f"import sys, {module}; print(*set({heavy.split()}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()
