"""The notebooks of examples/ run from start to end, within two minutes of one core, and are stored without outputs."""

import ast
import json
import re
import resource
from pathlib import Path

import pytest

from tests.subprocesses import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
CPU_SECONDS = 120


def cells(path: Path, kind: str) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert cells(path, "markdown")[0].startswith("# ")
    for source in cells(path, "code"):
        ast.parse(source)


def test_the_method_is_that_of_the_module():
    shown = (ROOT / "examples" / "neighbours.py").read_text(encoding="utf-8")
    (source,) = (source for source in cells(ROOT / "examples" / "own_method.ipynb", "code") if "class Neig" in source)
    without_docstring = shown.partition("\n\n")[2]
    assert ast.dump(ast.parse(source)) == ast.dump(ast.parse(without_docstring))


@pytest.mark.long  # `make docs` executes them, too
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # with more, a line on stderr says which number was chosen
    notebook = nbformat.read(path, as_version=4)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_SECONDS
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    results = [
        output.data["text/html"] for output in outputs if "svg+xml" in output.get("data", {}).get("text/html", "")
    ]
    assert results, "a result is shown as table and curve"
    assert all(re.search(r"<th[^>]*>(?:<[^>]*>)*AUC", page) for page in results)
