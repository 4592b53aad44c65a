"""Stages of the pipeline refuse values that differ from those of their plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duplex.config.params import load_params
from duplex.errors import DuplexError
from duplex.project import stamps
from duplex.project.stamps import load_planned
from tests.projects import draw_project, inside
from tests.subprocesses import ENVIRONMENT, ROOT


@pytest.fixture
def planned(tmp_path: Path):
    """A project with a plan, and nothing run."""
    draw_project(tmp_path, ["csp"], scale=0.02)
    with inside(tmp_path):
        stamps.plan_stage(load_params())
        yield tmp_path


def edit(old: str, new: str) -> None:
    text = Path("params.yaml").read_text()
    assert old in text
    Path("params.yaml").write_text(text.replace(old, new))


def test_unchanged_params_are_loaded(planned: Path) -> None:
    assert load_planned("own", "train", "evaluate", method="csp") == load_params()
    assert load_planned("own", "prepare", "extract") == load_params()


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [("epochs: 2", "epochs: 3", "train"), ("bootstrap: 20", "bootstrap: 30", "evaluate"),
     ("name: tiny", "name: tiny\n      precision: bf16", "extract"), ("table: ", "seed: 1\n      table: ", "prepare")],
)  # fmt: skip
def test_a_stage_refuses_values_of_its_own_that_changed(planned: Path, old: str, new: str, changed: str) -> None:
    edit(old, new)
    method = "csp" if changed in ("train", "evaluate") else None
    with pytest.raises(DuplexError, match=rf"params.yaml or the code has changed since .*{changed}.json.*`dvc repro`"):
        load_planned("own", changed, method=method)


def test_values_of_other_stages_may_change(planned: Path) -> None:
    edit("bootstrap: 20", "bootstrap: 30")
    assert load_planned("own", "train", method="csp").evaluation.bootstrap == 30


def test_a_stage_without_a_plan_is_not_checked(planned: Path) -> None:
    Path("artifacts/plan/own/csp/train.json").unlink()
    edit("epochs: 2", "epochs: 3")
    assert load_planned("own", "train", method="csp").training("own", "csp").epochs == 3


@pytest.mark.parametrize(
    ("script", "words"),
    [("prepare", ["own"]), ("extract", ["own"]), ("train", ["own", "csp", "0"]), ("evaluate", ["own", "csp", "0"]),
     ("product", ["own", "csp", "0"])],
)  # fmt: skip
def test_each_script_of_the_pipeline_compares_its_plan(planned: Path, script: str, words: list[str]) -> None:
    for file in Path("artifacts/plan/own").rglob("*.json"):
        file.write_text("{}")
    done = subprocess.run(
        [sys.executable, ROOT / "pipeline" / f"{script}.py", *words], env=ENVIRONMENT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    stage = "train" if script == "product" else script
    assert f"{stage}.json was written" in done.stderr and "run `dvc repro` again" in done.stderr
