"""Evaluation of a run whose files change meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from duplex.artifacts import ArtifactPaths
from duplex.errors import DuplexError
from duplex.project import stages
from duplex.training.inputs import load_inputs
from tests.projects import inside, make_project


def test_a_checkpoint_replaced_during_an_evaluation_gives_no_metrics(tmp_path: Path) -> None:
    params, paths = make_project(tmp_path, [0], ["clip", "closed_form"]), ArtifactPaths()
    with inside(tmp_path):
        run, other = (paths.run("own", method, 0) for method in ("clip", "closed_form"))
        before = run.metrics.read_bytes()

        def load(*arguments):
            shutil.copy(other.checkpoint, run.checkpoint)
            return load_inputs(*arguments)

        with pytest.raises(DuplexError, match="its tensors were changed"):
            stages.evaluate_stage(params, "own", "clip", 0, paths, load=load)
        assert run.metrics.read_bytes() == before
