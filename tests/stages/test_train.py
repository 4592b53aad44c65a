"""Training and evaluation write a run's files to its folder, whatever a method's code does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from duplex.config.params import load_params
from duplex.methods.prompts import PromptMethod
from duplex.stages import evaluate, train
from duplex.stages.extract import extract
from duplex.stages.prepare import prepare
from tests.projects import draw_project


def test_a_method_that_changes_the_working_directory_does_not_move_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    other.mkdir()
    project.mkdir()
    draw_project(project, ["coop"], epochs=1, threads=1)
    monkeypatch.chdir(project)
    params = load_params()
    prepare(params, "own")
    extract(params, "own")
    scorer = PromptMethod.scorer

    def moving(self: Any, candidates: Any) -> Any:
        os.chdir(other)
        return scorer(self, candidates)

    monkeypatch.setattr(PromptMethod, "scorer", moving)
    for stage in (train, evaluate):
        stage.run(params, "own", "coop", 0)
        assert Path.cwd() == project and not any(other.iterdir())
    names = {path.name for path in (project / "artifacts" / "own" / "coop" / "0").iterdir()}
    assert {"checkpoint.safetensors", "history.csv", "metrics.json", "predictions.csv"} <= names
