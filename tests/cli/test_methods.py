"""`duplex evaluate`, `duplex metrics` and `duplex prepare`."""

from __future__ import annotations

import json

import pytest

from duplex.evaluation.metric_table import headline

METRICS = {"seen": 41.304, "unseen": 20.0, "hm": 18.2, "auc": 6.9, "auc_low": 6.1, "auc_high": 7.8}


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        ((), "S 41.30  U 20.00  HM 18.20  AUC 6.90 [6.10, 7.80]"),
        (("auc_low", "auc_high"), "S 41.30  U 20.00  HM 18.20  AUC 6.90"),
        (("unseen", "hm", "auc", "auc_low", "auc_high"), "S 41.30  U –  HM –  AUC –"),
    ],
)
def test_undefined_metrics_are_printed_as_a_dash(absent, line):
    assert headline({key: value for key, value in METRICS.items() if key not in absent}) == line


def test_the_table_of_metrics_is_not_wrapped_in_a_narrow_terminal(project, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    (project / "artifacts").mkdir()
    numbers = {name: 12.5 for key in ("seen", "unseen", "hm", "auc") for name in (key, f"{key}_se", f"{key}_low")}
    worlds = {world: {**numbers, "auc_high": 14.25, "seeds": 2} for world in ("closed", "open")}
    summary = {"shapes": {"clip": worlds, "duplex": worlds}}
    (project / "artifacts" / "summary.json").write_text(json.dumps(summary))
    header, *rows, report = command("metrics").out.splitlines()
    assert header.split("  ")[0] == "data set"
    assert {tuple(row.split()[:3]) for row in rows} >= {("shapes", "closed", "clip"), ("shapes", "open", "duplex")}
    starts = [header.index(name) for name in ("world", "method", "AUC")]
    assert all(row[start - 2 : start] == "  " and row[start] != " " for row in rows for start in starts)
    assert report == "report: artifacts/report/index.html"
    advice = "artifacts/summary.json does not match the runs in artifacts; `duplex report` writes it again"
    assert command("metrics").err.startswith(advice)


def test_metrics_without_any_run_name_the_command_that_makes_one(project, command):
    assert command("metrics").refused("no run of params.yaml is evaluated yet; `dvc repro`")
    (project / "artifacts").mkdir()
    (project / "artifacts" / "summary.json").write_text("{}")
    for words in ([], ["--json"]):
        assert command("metrics", *words).refused("no run of params.yaml is evaluated yet; `dvc repro`")


def test_prepare_writes_four_files(project, command, monkeypatch):
    monkeypatch.setattr("duplex.project.stages.ensure_images", lambda *_: None)  # it would draw 6,000 images
    assert command("prepare", "--dataset", "shapes").code == 0
    written = {path.name for path in (project / "artifacts" / "shapes").iterdir()}
    assert written == {"manifest.csv", "labels.json", "statistics.json", "source.json"}


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_seed_out_of_range_is_refused(command, stage, seed):
    done = command(stage, "--dataset", "shapes", "--seed", seed)
    assert done.code == 2 and "--seed" in done.err
