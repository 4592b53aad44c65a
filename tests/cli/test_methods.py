"""`duplex evaluate`, `duplex metrics` and `duplex prepare`."""

import pytest


def test_metrics_without_any_run_name_the_command_that_makes_one(project, command):
    assert command("metrics").refused("no run of params.yaml has been evaluated; `dvc repro`")
    (project / "artifacts").mkdir()
    (project / "artifacts" / "summary.json").write_text("{}")
    for words in ([], ["--json"]):
        assert command("metrics", *words).refused("no run of params.yaml has been evaluated; `dvc repro`")


def test_prepare_writes_a_manifest_with_its_stamp(project, command, monkeypatch):
    monkeypatch.setattr("duplex.project.prepare.draw_missing_images", lambda *_: None)  # it would draw 6,000 images
    assert command("prepare", "--dataset", "shapes").code == 0
    written = {path.name for path in (project / "artifacts" / "shapes").iterdir()}
    assert written == {"manifest.csv", "labels.json", "statistics.json", "prepare.stamp.json"}


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_seed_out_of_range_is_refused(command, stage, seed):
    done = command(stage, "--dataset", "shapes", "--seed", seed)
    assert done.code == 2 and "--seed" in done.err
