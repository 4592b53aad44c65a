"""The search for settings trains as the pipeline does, looks at validation images alone, and writes only when asked."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.cli import app
from duplex.config.params import MethodEntry, load_params
from duplex.errors import UsageError
from duplex.project.run import ProjectData, ProjectRun
from duplex.project.sweep import TaskRunner
from duplex.project.train import train_stage
from duplex.project.tune import TuningTrial, best_rows, tune
from duplex.training.checkpoint import read_record
from tests.projects import edited_params, with_evaluation
from tests.subprocesses import ROOT

RATES = [0.0003, 0.001, 0.003]


@pytest.fixture
def with_plugin(project: Path) -> Path:
    """The project with the example plug-in as a module of the folder."""
    shutil.copy(ROOT / "examples" / "linear_probe" / "linear_probe.py", project)
    with edited_params(project / "params.yaml") as record:
        record["methods"]["probe"] = {"kind": "linear_probe:LinearProbe"}
    return project


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["tune", *words], catch_exceptions=False)


@pytest.mark.long
def test_three_rates_and_two_seeds_of_a_method_and_a_plug_in(with_plugin):
    before = (with_plugin / "params.yaml").read_bytes()
    answer = command("--methods", "cso,probe", "--grid", "learning_rate=3e-4,1e-3,3e-3", "--grid", "epochs=2", "--json")
    rows = json.loads(answer.stdout)
    assert answer.exit_code == 0, answer.output
    assert [(row["method"], row["settings"]["learning_rate"]) for row in rows] == [
        (method, rate) for method in ("cso", "probe") for rate in RATES
    ]
    assert all(row["seeds"] == 2 and 0 <= row["val_auc_all"] <= row["val_auc"] <= 100 for row in rows)
    for method in ("cso", "probe"):
        own = [row for row in rows if row["method"] == method]
        assert [row["best"] for row in own].count(True) == 1
        assert max(own, key=lambda row: row["val_auc"])["best"]
    assert (with_plugin / "params.yaml").read_bytes() == before
    assert not list((with_plugin / "artifacts" / "own").glob("*/*/")), "no run of the pipeline is written"


def test_a_trial_is_the_run_that_the_pipeline_would_train(params, tmp_path):
    record = params.methods["csp"].model_dump()
    entry = MethodEntry(**{**record, "training": {"learning_rate": 0.003}, "template": "an image of"})
    changed = params.model_copy(update={"methods": {**params.methods, "csp": entry}})
    train_stage(ProjectRun("own", "csp", 5, changed), RunPaths(tmp_path / "out"))
    record = read_record(tmp_path / "out" / "checkpoint.safetensors")
    settings = {"learning_rate": 0.003, "template": "an image of"}
    read = ProjectData(params, "own").checksums()
    task = TuningTrial(ProjectRun("own", "csp", 5, params), settings, tmp_path / "trials", read)
    outcome = TaskRunner(1).execute(task)
    result = outcome.value
    assert outcome.error is None and (result.auc, result.epoch) == (100 * record.val_auc, record.epoch)
    assert record.val_auc_all is not None and result.auc_all == 100 * record.val_auc_all


def test_test_images_are_not_needed(params, tmp_path):
    executor = TaskRunner(1)
    load = executor.load

    def without_test(*arguments):
        inputs = load(*arguments)
        return dataclasses.replace(inputs, examples={s: inputs.examples[s] for s in ("train", "val")})

    executor.load = without_test
    read = ProjectData(params, "own").checksums()
    trial = TuningTrial(ProjectRun("own", "csp", 0, params), {"epochs": 1}, tmp_path, read)
    assert executor.execute(trial).error is None
    other = dataclasses.replace(trial, settings={"epochs": 2}, read={**trial.read, "features.h5": "others"})
    assert "has changed since this began" in (executor.execute(other).error or "")


@pytest.mark.usefixtures("in_this_process")
def test_a_second_search_trains_only_what_is_missing(params):
    def trained() -> set[int]:
        return {path.stat().st_mtime_ns for path in ArtifactPaths().trials.rglob("checkpoint.safetensors")}

    first = tune(params, "own", ["csp"], {"epochs": [1]}, [0])
    before = trained()
    again = tune(params, "own", ["csp"], {"epochs": [1, 2]}, [0])
    assert again[0].to_dict() == first[0].to_dict() and len(before) == 1
    assert before < trained() and len(trained()) == 2
    tune(with_evaluation(params, thresholds=9), "own", ["csp"], {"epochs": [1]}, [0])
    assert len(trained()) == 1 and not before & trained()


def test_methods_that_choose_their_blocks_are_not_tuned(params):
    entry = params.methods["csp"].model_copy(update={"finetune": {"blocks": "auto"}})
    changed = params.model_copy(update={"methods": {**params.methods, "csp": entry}})
    with pytest.raises(UsageError, match="csp has `finetune: auto`, which `duplex tune` cannot vary"):
        tune(changed, "own", ["csp"], {"epochs": [1]}, [0])


@pytest.mark.usefixtures("in_this_process")
def test_a_failed_trial_leaves_the_others(params):
    rows = tune(params, "own", ["dfsp_t2i", "csp"], {"epochs": [1]}, [0], jobs=1)
    assert "extraction.tokens" in rows[0].errors[0] and not rows[1].errors
    assert set(best_rows(rows)) == {"csp"} and "error" in rows[0].to_dict()


@pytest.mark.usefixtures("in_this_process")
def test_settings_without_effect_are_reported_as_a_tie(project):
    words = ["--methods", "clip", "--grid", "learning_rate=0.001,0.1", "--seeds", "100", "--jobs", "1"]
    before = Path("params.yaml").read_text()
    answer = command(*words, "--write")
    assert answer.exit_code == 0, answer.output
    assert "clip: 2 settings have the same best AUC" in answer.stderr and "none of them is written" in answer.stderr
    assert Path("params.yaml").read_text() == before


@pytest.mark.usefixtures("in_this_process")
def test_a_search_repeated_after_its_best_settings_were_written_trains_nothing(project):
    with edited_params(project / "params.yaml") as record:
        record["run"] |= {"methods": ["clip", "csp"], "products": ["both"]}
        record["methods"]["both"] = {"kind": "product", "of": ["clip", "csp"]}
    found = list[set[int]]()
    for _ in range(2):
        answer = command("--grid", "learning_rate=1e-3,1e-2", "--grid", "epochs=1", "--seeds", "7", "--write")
        assert answer.exit_code == 0, answer.output
        assert "datasets/own.yaml: methods.csp: " in answer.stderr
        assert "; also in effect for csp_maxima, by `extends`" in answer.stderr or found
        found.append({path.stat().st_mtime_ns for path in ArtifactPaths().trials.rglob("checkpoint.safetensors")})
    assert found[0] == found[1] and len(found[0]) == 4


@pytest.mark.slow
def test_the_best_settings_are_written_where_asked(project):
    choices = "learning_rate=1e-3,1e-2", "template=a photo of", "epochs=1"
    grid = [word for choice in choices for word in ("--grid", choice)]
    answer = command("--methods", "csp", *grid, "--seeds", "7", "--write")
    assert answer.exit_code == 0, answer.output
    line = next(line for line in answer.stdout.splitlines() if line.startswith("*"))
    best = float(line.split("learning_rate ")[1].split(",")[0])
    params = load_params()
    assert params.training("own", "csp").learning_rate == best and params.training("own", "csp").epochs == 1
    assert params.methods["csp"].per_dataset["own"].options["template"] == "a photo of"
    assert params.training("shapes", "csp").learning_rate == 0.001, "of the tuned data set alone"
    assert command("--methods", "csp", "--grid", "epochs=2", "--seeds", "7", "--write").exit_code == 0
    assert (
        load_params().training("own", "csp").epochs == 2 and load_params().training("own", "csp").learning_rate == best
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--grid", "learning_rate"], "--grid is 'learning_rate'; expected a setting and its values"),
     (["--grid", "learning_rate=[1"], r"--grid is 'learning_rate=\[1'"),
     (["--grid", "epochs=1", "--grid", "epochs=2"], "has epochs twice"),
     (["--grid", "epoch=1"], "unknown setting of training or of csp 'epoch'"),
     (["--grid", "learning_rate=high"], "learning_rate.*'high'"),
     (["--grid", "epochs=1", "--methods", "cspp"], "unknown method 'cspp'"),
     (["--grid", "epochs=1", "--methods", "dual_scen"], "dual_scen combines finished runs.*tune dual and scen instead"),
     (["--grid", "epochs=1", "--dataset", "owl"], "unknown data set 'owl'"),
     (["--grid", "epochs=1", "--seeds", "x"], "--seeds has 'x'")],
)  # fmt: skip
def test_wrong_requests_are_one_line_before_anything_is_trained(project, words, message):
    more = [] if "--methods" in words else ["--methods", "csp"]
    with pytest.raises(UsageError, match=message) as caught:
        command(*words, *more)
    assert "\n" not in str(caught.value)
