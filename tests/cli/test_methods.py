"""What `duplex evaluate` prints of metrics that are whole, sampled or partly undefined; `duplex prepare` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from duplex.cli import app
from duplex.cli.methods import headline

SHIPPED = Path(__file__).parents[2] / "params.yaml"
WHOLE = {"seen": 41.304, "unseen": 20.0, "hm": 18.2, "auc": 6.9, "auc_low": 6.1, "auc_high": 7.8}


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        ((), "S 41.30  U 20.00  HM 18.20  AUC 6.90 [6.10, 7.80]"),
        (("auc_low", "auc_high"), "S 41.30  U 20.00  HM 18.20  AUC 6.90"),
        (("unseen", "hm", "auc", "auc_low", "auc_high"), "S 41.30  U –  HM –  AUC –"),
    ],
)
def test_what_is_undefined_is_a_dash(absent, line):
    assert headline({key: value for key, value in WHOLE.items() if key not in absent}) == line


def test_evaluation_by_the_sampled_protocol_is_printed(monkeypatch):
    sampled = {"closed": {key: WHOLE[key] for key in ("seen", "unseen", "hm", "auc")}}
    monkeypatch.setattr("duplex.config.params.load_params", lambda: None)
    monkeypatch.setattr("duplex.stages.evaluate.run", lambda *_: sampled)
    done = CliRunner().invoke(app, ["evaluate", "--dataset", "any"])
    assert (done.exit_code, done.stdout) == (0, "closed  S 41.30  U 20.00  HM 18.20  AUC 6.90\n")


def test_metrics_are_a_table_that_nothing_cuts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    (tmp_path / "artifacts").mkdir()
    numbers = {name: 12.5 for key in ("seen", "unseen", "hm", "auc") for name in (key, f"{key}_se", f"{key}_low")}
    worlds = {world: {**numbers, "auc_high": 14.25, "seeds": 2} for world in ("closed", "open")}
    summary = {"shapes": {"clip": worlds, "duplex": worlds}}
    (tmp_path / "artifacts" / "summary.json").write_text(json.dumps(summary))
    done = CliRunner().invoke(app, ["metrics"])
    assert done.exit_code == 0, done.stderr
    header, *rows, report = done.stdout.splitlines()
    assert header.split("  ")[0] == "data set"
    assert {tuple(row.split()[:3]) for row in rows} >= {("shapes", "closed", "clip"), ("shapes", "open", "duplex")}
    starts = [header.index(name) for name in ("world", "method", "AUC")]
    assert all(row[start - 2 : start] == "  " and row[start] != " " for row in rows for start in starts)
    assert report == "report: artifacts/report/index.html"


def test_prepare_writes_what_extraction_asks_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("duplex.stages.prepare.ensure_pictures", lambda *_: None)  # 6,000 pictures
    (tmp_path / "params.yaml").write_text(SHIPPED.read_text())
    done = CliRunner().invoke(app, ["prepare", "--dataset", "shapes"])
    assert done.exit_code == 0, done.stderr
    written = {path.name for path in (tmp_path / "artifacts" / "shapes").iterdir()}
    assert written == {"manifest.csv", "labels.json", "statistics.json"}


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_seed_that_no_generator_takes_is_refused(command, seed):
    done = CliRunner().invoke(app, [command, "--dataset", "shapes", "--seed", seed])
    assert done.exit_code == 2
    assert "--seed" in done.stderr
