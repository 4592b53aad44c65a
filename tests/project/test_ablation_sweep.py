"""A sweep of ablations writes the files of the stage `ablate`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from duplex.artifacts import ArtifactPaths
from duplex.errors import UsageError
from duplex.project import ablate
from duplex.project import ablate as ablation_sweep
from duplex.project.ablate import sweep_ablations

ABLATIONS = ("loss_ct", "module_cso")


@pytest.fixture
def small(params):
    """Two ablations, on the drawn data set."""
    run = params.ablation_run.model_copy(update={"datasets": ("own",), "seeds": (0, 1)})
    rows = {name: params.ablations[name] for name in ABLATIONS}
    return params.model_copy(update={"ablation_run": run, "ablations": rows})


def contents(paths: ArtifactPaths) -> dict[str, bytes]:
    folders = (paths.ablations / "runs", paths.ablations / "rows")
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_files_are_those_of_the_stage(project, small):
    paths = ArtifactPaths()
    for name in ABLATIONS:
        ablate.run(small, name)
    by_stage = contents(paths)
    for name in by_stage:
        (project / name).unlink()
    report = sweep_ablations(small, None, 2, "local")
    assert (report.runs, report.executed, report.failed) == (4, 4, {})
    assert contents(paths) == by_stage
    assert len(by_stage) == 2 * 2 * 3 + 2
    again = sweep_ablations(small, ["loss_ct"], 2, "local")
    assert (again.runs, again.complete, again.executed) == (2, 2, 0)


def test_nothing_is_committed_if_params_yaml_changed_during_the_sweep(project, small, monkeypatch):
    committed: list[list[str]] = []
    changed: dict[str, list[str]] = {f"ablate@{name}": [] for name in ABLATIONS}
    repo = SimpleNamespace(require_free=lambda _: None, changed=lambda _: changed, commit=committed.append)
    monkeypatch.setattr(ablation_sweep.DvcRepo, "at", lambda _: repo)
    monkeypatch.setattr(ablation_sweep, "execute", lambda _, tasks, report: {task.run for task in tasks})
    monkeypatch.setattr(ablate, "copy_results", lambda *_: None)
    for name in ABLATIONS:
        (ArtifactPaths().ablations / "swept.partial" / name).mkdir(parents=True)
    report = sweep_ablations(small, None, 1, "local")  # `small` is not the content of params.yaml
    assert str(report.not_committed).startswith("params.yaml has changed since the sweep started")
    assert (committed, report.committed) == ([], 0)
    monkeypatch.setattr(ablation_sweep, "is_unchanged", lambda *_: True)
    report = sweep_ablations(small, None, 1, "local")
    assert (report.not_committed, report.committed, len(committed)) == (None, 4, 1)


def test_unknown_and_repeated_ablations_are_refused(small):
    with pytest.raises(UsageError, match="unknown ablation 'csp'"):
        sweep_ablations(small, ["csp"], 1, "local")
    with pytest.raises(UsageError, match="the ablation loss_ct is named twice"):
        sweep_ablations(small, ["loss_ct", "loss_ct"], 1, "local")
