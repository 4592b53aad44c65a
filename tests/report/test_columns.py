"""The table of experiments that docs/report.md shows is narrow, and validation numbers come first in it."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duplex.config.params import load_params
from duplex.report.aggregate import aggregate, headlines
from duplex.system.files import write_json
from tests.subprocesses import ROOT

WORLD = dict.fromkeys(("auc", "hm", "seen", "unseen", "auc_low", "auc_high", "state_accuracy"), 1.0)
RUN = {"closed": WORLD, "open": {**WORLD, "auc_all": 1.0, "likelihood": WORLD}, "val_auc": 1.0, "val_auc_all": 1.0}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with the shipped pipeline and the metrics of all its methods."""
    for name in ("params.yaml", "dvc.yaml", "dvc.lock"):
        shutil.copy(ROOT / name, tmp_path)
    params = load_params(tmp_path / "params.yaml")
    names = dict.fromkeys(params.entry(name).shown_as or name for name in params.run.methods)
    table = aggregate({(dataset, name): [RUN, RUN] for dataset in params.run.datasets for name in names})
    write_json(tmp_path / "artifacts" / "metrics.json", headlines(table))
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.slow
def test_the_table_of_experiments_has_at_most_150_columns(project):
    text = (ROOT / "docs" / "report.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^dvc (exp show --csv.*)$", text, re.MULTILINE)]
    assert len(commands) == 1
    shown = subprocess.run([sys.executable, "-m", "dvc", *commands[0]], cwd=project, check=True, capture_output=True)
    columns = next(csv.reader(shown.stdout.decode().splitlines()))
    assert len(columns) <= 150
    metrics = [name for name in columns if name.startswith("shapes.")]
    assert metrics[:2] == ["shapes.clip.validation.auc", "shapes.clip.validation.auc_all"]
    assert len(metrics) <= 14 * 7 and "shapes.duplex.open.auc_all" in metrics
    assert {"run.seeds", "evaluation.feasibility"} <= set(columns)
