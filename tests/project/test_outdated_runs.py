"""Runs, metrics and predictions that do not belong to params.yaml or to each other are refused or reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from duplex.artifacts import ArtifactPaths
from duplex.cli import app
from duplex.config.datasets import set_method
from duplex.config.params import MethodEntry, Params, load_params
from duplex.errors import DuplexError, UsageError
from duplex.features.file import read_contents_digest
from duplex.project import ablate, report, runs, stages
from duplex.project.runs import best_run
from duplex.project.stages import extract
from duplex.project.suspects import rank_suspects
from duplex.project.train import train_stage
from duplex.training.inputs import load_inputs
from tests.projects import make_project


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_project(folder, seeds=(0, 1), methods=("clip", "csp"), epochs=1)
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a project with evaluated runs, as the current folder."""
    folder = tmp_path / "project"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


def compare(capfd: pytest.CaptureFixture[str]) -> str:
    """Return what `duplex compare` prints on stderr."""
    done = CliRunner().invoke(app, ["compare", "--dataset", "own", "--methods", "clip", "csp"])
    if done.exception is not None:
        raise done.exception.__context__ or done.exception
    return done.stderr


def test_outdated_runs_are_no_default_model(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    set_method(load_params(), "csp", "own", {}, {"epochs": 3})
    assert best_run(params=load_params()).files.root.parent.name == "clip"
    csp = "duplex: artifacts/own/csp/{} does not match params.yaml: epochs is 1 instead of 3\n"
    assert capfd.readouterr().err == csp.format(0) + csp.format(1)
    set_method(load_params(), "clip", "own", {}, {"epochs": 3})
    with pytest.raises(UsageError, match=r"no run in .* matches params\.yaml; run `dvc repro`, or name one"):
        best_run(params=load_params())
    assert best_run().files.root.is_dir()


def test_images_are_not_retrieved_by_a_run_of_other_settings_or_another_method(project: Path) -> None:
    assert runs.load_queried_run(load_params(), "own", "csp", 0)
    set_method(load_params(), "csp", "own", {}, {"epochs": 3})
    with pytest.raises(DuplexError, match=r"does not match csp with seed 0 in params\.yaml: epochs is 1 instead of 3"):
        runs.load_queried_run(load_params(), "own", "csp", 0)
    shutil.copy(ArtifactPaths().run("own", "csp", 0).checkpoint, ArtifactPaths().run("own", "clip", 1).checkpoint)
    with pytest.raises(DuplexError, match=r"does not match clip with seed 1 in params\.yaml: seed is 0 instead of 1"):
        runs.load_queried_run(load_params(), "own", "clip", 1)


def test_suspects_by_a_named_run_of_other_settings_say_so(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ArtifactPaths().run("own", "csp", 0).root
    expected = rank_suspects(load_params(), "own", "run", run)
    assert capfd.readouterr().err == ""
    set_method(load_params(), "csp", "own", {}, {"epochs": 3})
    assert rank_suspects(load_params(), "own", "run", run).equals(expected)
    assert f"{run} does not match params.yaml: epochs is 1 instead of 3" in capfd.readouterr().err
    assert rank_suspects(load_params(), "own", "run", run / "checkpoint.safetensors").equals(expected)
    assert f"{run} does not match params.yaml: epochs is 1 instead of 3" in capfd.readouterr().err
    shutil.copytree(run, project.parent / "elsewhere")
    assert rank_suspects(load_params(), "own", "run", project.parent / "elsewhere").equals(expected)
    assert capfd.readouterr().err == ""


def test_a_run_is_not_evaluated_on_other_features_than_those_of_training(project: Path) -> None:
    params, paths = load_params(), ArtifactPaths()
    before, contents = load_inputs(params, "own", paths), read_contents_digest(paths.features("own"))
    stages.evaluate_stage(params, "own", "csp", 0)
    pictures = sorted(project.glob("pictures/**/*.png"))
    for first, second in zip(pictures[:40], pictures[-40:], strict=True):
        shutil.copyfile(second, first)
    extract(params, "own", fresh=True)
    assert read_contents_digest(paths.features("own")) != contents
    with pytest.raises(DuplexError, match=r"does not match csp with seed 0 in params\.yaml: its features have changed"):
        stages.evaluate_stage(params, "own", "csp", 0)
    after = load_inputs(params, "own", paths)  # part of the key by which interrupted training continues
    assert before.identity != after.identity and before.identity["manifest"] == after.identity["manifest"]


@pytest.mark.parametrize("change", [{"feasibility": "words"}, {"feasibility": "none"}, {"thresholds": 7}])
def test_a_run_calibrated_by_another_rule_is_not_evaluated(project: Path, change: dict[str, object]) -> None:
    params = load_params()
    params = params.model_copy(update={"evaluation": params.evaluation.model_copy(update=change)})
    with pytest.raises(DuplexError, match=f"calibration is .* instead of .*{next(iter(change.values()))!r}"):
        stages.evaluate_stage(params, "own", "csp", 0)


def test_the_files_of_another_run_are_reported(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert compare(capfd) == ""
    own = ArtifactPaths().run("own", "csp", 1).root
    for name in ("metrics.json", "predictions.csv", "curve.csv"):
        shutil.copy(ArtifactPaths().run("own", "clip", 1).root / name, own / name)
    assert "own/csp/1 does not match csp with seed 1 in params.yaml: its metrics.json is of another" in compare(capfd)
    report.report_stage(load_params())
    assert "does not match csp in params.yaml: its metrics.json is of another checkpoint" in capfd.readouterr().err
    shutil.rmtree(own)
    shutil.copytree(own.with_name("0"), own)
    assert "own/csp/1 does not match csp with seed 1 in params.yaml: seed is 0 instead of 1" in compare(capfd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 2)}, r"evaluation.k was [1, 2] instead of"),
        ({"worlds": ("closed",)}, "it was not evaluated in the open world"),
        ({"protocol": "sampled"}, "evaluation.protocol was sampled instead of exact"),
        ({"bootstrap": 7}, "evaluation.bootstrap was 7 instead of"),
        ({"terms": False}, "evaluation.terms was False instead of True"),
    ],
)
def test_a_seed_evaluated_with_other_settings_is_reported(
    project: Path, capfd: pytest.CaptureFixture[str], change: dict[str, object], message: str
) -> None:
    params = load_params()
    stages.evaluate_stage(
        params.model_copy(update={"evaluation": params.evaluation.model_copy(update=change)}), "own", "csp", 1
    )
    report.report_stage(params)
    assert f"own/csp/1/metrics.json does not match csp in params.yaml: {message}" in capfd.readouterr().err


def test_doubled_lines_and_rounded_margins_are_not_compared(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = ArtifactPaths().run("own", "csp", 0).predictions
    table = pd.read_csv(file)
    for changed, message in (
        (pd.concat([table, table]), "lists an image twice"),
        (table.assign(margin=table["margin"].round(0)), r"gives an AUC of .*, but metrics\.json says"),
    ):
        changed.to_csv(file, index=False)
        with pytest.raises(DuplexError, match=message):
            compare(capfd)


def changed(params: Params, section: str, **values: object) -> Params:
    """Return params with other values in a section, `evaluation` or the encoder of `own`."""
    if section == "evaluation":
        return params.model_copy(update={"evaluation": params.evaluation.model_copy(update=values)})
    entry = params.datasets["own"]
    entry = entry.model_copy(update={"encoder": entry.encoder.model_copy(update=values)})
    return params.model_copy(update={"datasets": {**params.datasets, "own": entry}})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("encoder", {"name": "ViT-B-32", "weights": "openai"}, "its encoder's name is 'tiny' instead of 'ViT-B-32'"),
        ("encoder", {"precision": "bf16"}, "its encoder's precision is 'fp32' instead of 'bf16'"),
        ("evaluation", {"word_vectors": Path("words.txt")}, "its word vectors have changed"),
    ],
)
def test_runs_of_another_encoder_are_reported(project: Path, capfd, section, values, message) -> None:
    (project / "words.txt").write_text("red 0 1\n")
    params = changed(load_params(), section, **values)
    report.warn_of_outdated(params, ArtifactPaths())
    assert message in capfd.readouterr().err


def test_results_of_a_changed_source_are_not_compared(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = pd.read_csv("pictures.csv")
    table["state"] = table["state"].replace({"red": "blue", "blue": "red"})
    table.to_csv("pictures.csv", index=False)
    with pytest.raises(DuplexError, match=r"pictures\.csv has changed since `duplex prepare` read it"):
        compare(capfd)
    report.warn_of_outdated(load_params(), ArtifactPaths())
    assert "pictures.csv has changed since `duplex prepare`" in capfd.readouterr().err


def test_metrics_of_runs_that_have_changed_are_reported(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def metrics() -> str:
        done = CliRunner().invoke(app, ["metrics"])
        assert done.exit_code == 0
        return done.stderr + capfd.readouterr().err

    report.report_stage(load_params())
    capfd.readouterr()
    assert metrics() == ""
    shutil.rmtree(ArtifactPaths().run("own", "csp", 1).root)
    assert "artifacts/summary.json does not match the runs in artifacts; `duplex report` writes it again" in metrics()
    report.report_stage(load_params())
    capfd.readouterr()
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("thresholds: 50", "thresholds: 5"))
    assert "does not match csp in params.yaml: calibration is" in metrics()


def test_a_damaged_list_of_unreadable_images_is_one_line(project: Path) -> None:
    for content in ('{"bad_images": [{"x": 1}]}', '{"bad_images": 3}'):
        Path("artifacts/own/extraction.json").write_text(content)
        with pytest.raises(DuplexError, match=r"extraction\.json.*bad_images"):
            report.report_stage(load_params())


def test_ablations_run_with_other_settings_are_reported(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    params = load_params()
    run = params.ablation_run.model_copy(update={"datasets": ("own",), "seeds": (0,)})
    entry = params.methods["clip"]
    params = params.model_copy(update={"ablation_run": run, "ablations": {"row": entry}})
    ablate.run(params, "row")
    report.warn_of_outdated(params, ArtifactPaths())
    assert capfd.readouterr().err == ""
    report.warn_of_outdated(changed(params, "evaluation", bootstrap=21), ArtifactPaths())
    assert (
        "ablations/runs/row/own/0 was run with other settings of row than params.yaml has; `make ablations`"
        in capfd.readouterr().err
    )


def test_a_product_of_members_with_other_settings_is_refused(project: Path) -> None:
    entry = MethodEntry(kind="product", of=["clip", "csp"])
    params = load_params()
    params = params.model_copy(update={"methods": {**params.methods, "both": entry}})
    train_stage(params, "own", "both", 0)
    stages.evaluate_stage(params, "own", "both", 0)
    other = changed(params, "evaluation", thresholds=7)
    with pytest.raises(DuplexError, match=r"does not match (clip|csp) with seed 0 in params\.yaml"):
        train_stage(other, "own", "both", 0)
    with pytest.raises(DuplexError, match=r"does not match both with seed 0 in params\.yaml: (clip|csp) with seed 0"):
        stages.evaluate_stage(other, "own", "both", 0)
