"""`duplex evaluate`, `duplex metrics` and `duplex prepare`."""

import pytest

from duplex.evaluation.metrics import headline

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


def test_metrics_without_any_run_name_the_command_that_makes_one(project, command):
    assert command("metrics").refused("no run of params.yaml is evaluated yet; `dvc repro`")
    (project / "artifacts").mkdir()
    (project / "artifacts" / "summary.json").write_text("{}")
    for words in ([], ["--json"]):
        assert command("metrics", *words).refused("no run of params.yaml is evaluated yet; `dvc repro`")


def test_prepare_writes_a_manifest_with_its_stamp(project, command, monkeypatch):
    monkeypatch.setattr("duplex.project.stages.ensure_images", lambda *_: None)  # it would draw 6,000 images
    assert command("prepare", "--dataset", "shapes").code == 0
    written = {path.name for path in (project / "artifacts" / "shapes").iterdir()}
    assert written == {"manifest.csv", "labels.json", "statistics.json", "prepare.stamp.json"}


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_seed_out_of_range_is_refused(command, stage, seed):
    done = command(stage, "--dataset", "shapes", "--seed", seed)
    assert done.code == 2 and "--seed" in done.err
