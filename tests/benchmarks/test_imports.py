import importlib

import pytest

from tests.subprocesses import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_is_imported(path) -> None:
    importlib.import_module(f"benchmarks.{path.stem}")
