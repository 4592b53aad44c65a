"""Notebooks of examples/, executed for the site: a copy with outputs per notebook and state of the package."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def executed_notebook(path: Path, root: Path) -> Path:
    """A copy of a notebook with its outputs, made if the notebook or the package has changed.

    Raises `ValueError` with one line if a cell fails.
    """
    digest = hashlib.sha256(path.read_bytes())
    for module in sorted((root / "duplex").rglob("*.py")):
        digest.update(module.read_bytes())
    copy = root / "build" / "notebooks" / digest.hexdigest()[:16] / path.name
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(run(path), encoding="utf-8")
    return copy


def run(path: Path) -> str:
    """The notebook with outputs, as text, after its cells ran in an empty folder without a network."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": f"{folder}/.cache",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        place = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place)
        try:
            client.execute(env=environment)
        except CellExecutionError as error:
            raise ValueError(f"examples/{path.name}: {error.ename}: {error.evalue}") from None
    return str(nbformat.writes(notebook))
