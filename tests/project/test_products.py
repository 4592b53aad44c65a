"""Products of finished runs: trained members in, one run out, which recognises, exports and sweeps like others."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duplex import Recognizer
from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.errors import DuplexError, UsageError
from duplex.features.file import read_features
from duplex.project.evaluate import evaluate_stage
from duplex.project.plan import write_plan
from duplex.project.run import ProjectData, ProjectRun
from duplex.project.sweep import grid, is_product, sweep
from duplex.project.train import train_stage
from duplex.training.checkpoint import read_record
from tests.commands import Command
from tests.projects import edited_params, encoded_project

pytestmark = pytest.mark.slow

PRODUCTS = {
    "both": {"kind": "product", "of": ["csp", "closed_form"]},
    "csp_seeds": {"kind": "product", "of": ["csp"], "seeds": "all"},
    "deep": {"kind": "product", "of": ["csp", "csp_deep"]},
}
DEEP = {"extends": "csp", "finetune": {"blocks": 1, "adapter": "bottleneck"}}


def add_products(record: dict[str, Any]) -> None:
    record["methods"] |= {**PRODUCTS, "csp_deep": DEEP}
    record["run"]["products"] = ["both", "csp_seeds"]
    record["datasets"]["own"]["encoder"]["block_inputs"] = 1


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with features, and finished runs of the members."""
    folder = tmp_path_factory.mktemp("drawn")
    params, paths = encoded_project(folder, ["csp", "closed_form"], [0, 1], changes=add_products, epochs=1)
    for method, seed in (("csp", 0), ("csp", 1), ("closed_form", 0), ("csp_deep", 0)):
        train_stage(ProjectRun("own", method, seed, params, paths))
        evaluate_stage(ProjectRun("own", method, seed, params, paths))
    return folder


def test_a_product_has_the_metrics_of_its_members_scores(params: Params) -> None:
    train_stage(ProjectRun("own", "both", 0, params))
    found = evaluate_stage(ProjectRun("own", "both", 0, params))
    for name in ("csp", "closed_form"):
        assert found[f"terms_{name}"]["auc"] == pytest.approx(auc_of(name), abs=1.0)  # ties of tiny scores
    assert found["closed"]["auc"] > 0 and found["open"]["auc_all"] > 0
    record = read_record(ArtifactPaths().run("own", "both", 0).checkpoint)
    assert [(m["method"], m["seed"]) for m in record.options.members] == [("csp", 0), ("closed_form", 0)]


def auc_of(method: str) -> float:
    return json.loads(ArtifactPaths().run("own", method, 0).metrics.read_text())["closed"]["auc"]


def test_a_product_of_earlier_runs_is_not_evaluated(params: Params) -> None:
    train_stage(ProjectRun("own", "both", 0, params))
    training = {**params.methods["csp"].training, "learning_rate": 0.05}
    changed = {**params.methods, "csp": params.methods["csp"].model_copy(update={"training": training})}
    params = params.model_copy(update={"methods": changed})
    for work in (
        lambda: evaluate_stage(ProjectRun("own", "csp", 0, params)),
        lambda: train_stage(ProjectRun("own", "both", 0, params)),
    ):
        with pytest.raises(DuplexError, match=r"match the method 'csp' .*learning_rate was .* and is now 0\.05"):
            work()
    train_stage(ProjectRun("own", "csp", 0, params))
    with pytest.raises(DuplexError, match=r"not match the method 'both' .*: members.csp.training.learning_rate was"):
        evaluate_stage(ProjectRun("own", "both", 0, params))
    train_stage(ProjectRun("own", "both", 0, params))
    evaluate_stage(ProjectRun("own", "both", 0, params))
    shutil.rmtree(ArtifactPaths().run("own", "csp", 0).root)
    with pytest.raises(DuplexError, match=r"csp/0/checkpoint\.safetensors does not exist"):
        evaluate_stage(ProjectRun("own", "both", 0, params))


def test_runs_of_all_seeds_are_multiplied_whatever_the_seed(params: Params) -> None:
    for seed in (0, 1):
        train_stage(ProjectRun("own", "csp_seeds", seed, params))
        record = read_record(ArtifactPaths().run("own", "csp_seeds", seed).checkpoint)
        assert [m["seed"] for m in record.options.members] == [0, 1]
    metrics = [evaluate_stage(ProjectRun("own", "csp_seeds", seed, params)) for seed in (0, 1)]
    assert metrics[0] == metrics[1] and not [name for name in metrics[0] if name.startswith("terms_")]


def test_members_with_fine_tuned_blocks_compute_their_own_features(params: Params, command: Command) -> None:
    train_stage(ProjectRun("own", "deep", 0, params))
    found = evaluate_stage(ProjectRun("own", "deep", 0, params))
    assert found["terms_csp_deep"]["auc"] == pytest.approx(auc_of("csp_deep"), abs=1.0)
    assert found["terms_csp"]["auc"] != found["terms_csp_deep"]["auc"]
    assert command("export", "artifacts/own/deep/0", "out").refused("products of these runs cannot be exported")
    picture = next(Path(params.dataset("own").source.root).rglob("*.png"))
    (answer,) = Recognizer.load("artifacts/own/deep/0", device="cpu")([picture])
    assert list(answer.top[0].score_terms) == ["csp", "csp_deep"]


def test_a_product_recognises_and_exports_where_its_members_do(params: Params, project: Path, command: Command) -> None:
    train_stage(ProjectRun("own", "both", 0, params))
    evaluate_stage(ProjectRun("own", "both", 0, params))
    features = np.asarray(read_features(project / "artifacts/own/features.h5").cls[:20], dtype=np.float32)
    here = Recognizer.load("artifacts/own/both/0", device="cpu")
    answers = here(features)
    assert list(answers[0].top[0].score_terms) == ["csp", "closed_form"]
    assert command("export", "artifacts/own/both/0", "out").code == 0
    assert "score terms gaussian, semantic" in Path("out/README.md").read_text()
    there = Recognizer.load("out", device="cpu")
    np.testing.assert_allclose(there.scores(features).numpy(), here.scores(features).numpy(), rtol=1e-4, atol=1e-4)
    names = [answer.best.name for answer in answers]
    assert [answer.best.name for answer in there(features)] == names
    known, labels = set(here.candidates().pairs), here.labels
    new = next((s, o) for s in labels.states for o in labels.objects if (s, o) not in known)
    more = here.with_compositions([new])
    shift = more.scores(features)[:, :-1] - here.scores(features)  # log probabilities among one candidate more
    assert more.candidates().pairs[-1] == new
    np.testing.assert_allclose(shift.numpy(), shift[:, :1].expand_as(shift).numpy(), atol=1e-3)
    np.save("features.npy", features)
    shown = subprocess.run(
        [sys.executable, "out/recognize.py", "features.npy"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == names


def test_unfitting_runs_are_refused_in_one_line(params: Params, project: Path) -> None:
    run = ArtifactPaths().run("own", "csp", 0)
    with pytest.raises(DuplexError, match=r"artifacts/own/closed_form/1/checkpoint.safetensors does not exist"):
        train_stage(ProjectRun("own", "both", 1, params))
    shutil.copy(run.checkpoint, (other := ArtifactPaths().run("own", "csp", 1)).checkpoint)
    with pytest.raises(DuplexError, match=r"csp/1 does not match the method 'csp' in params\.yaml: its checkpoint"):
        train_stage(ProjectRun("own", "csp_seeds", 1, params))
    assert other.checkpoint.exists()
    with edited_params(project / "params.yaml") as record:
        record["methods"]["both"]["world"] = "open"
    with pytest.raises(UsageError, match="is for the closed world, but both for the open world; set"):
        train_stage(ProjectRun("own", "both", 0, load_params()))


def test_runs_of_another_data_set_are_refused(params: Params) -> None:
    labels = ArtifactPaths().labels("own")
    record = json.loads(labels.read_text())
    pairs = record["pairs"]["test"]
    record["pairs"]["test"] = sorted([*pairs, next(c for c in range(192) if c not in pairs)])
    labels.write_text(json.dumps(record))  # those of the runs and one pair more
    with pytest.raises(DuplexError, match="its states, objects or pairs have changed"):
        train_stage(ProjectRun("own", "both", 0, params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["run"].update(products=["csp"]), "csp is not of kind product; move it to run.methods"),
        (lambda r: r["run"].update(methods=["csp", "closed_form", "both"]), "both combines runs; list it"),
        (lambda r: r["run"].update(methods=["csp"]), "both needs closed_form; add closed_form to run.methods"),
        (lambda r: r["methods"]["both"].update(of=["csp", "csp_seeds"]), "both.of: csp_seeds is itself a product"),
        (lambda r: r["methods"]["both"].update(of=["csp", "cps"]), "methods.both.of: 'cps'"),
        (lambda r: r["methods"]["both"].update(members=[]), "both.members: training sets this option"),
        (lambda r: r["methods"]["both"].update(per_dataset={"own": {"of": ["csp"]}}), "per_dataset.own.of"),
    ],
)
def test_wrong_products_in_params_yaml_are_refused(project: Path, change: Any, message: str) -> None:
    with edited_params(project / "params.yaml") as record:
        change(record)
    with pytest.raises(UsageError, match=message):
        load_params()


def test_the_record_of_a_product_changes_with_its_members(params: Params) -> None:
    write_plan(params)
    record = json.loads((ArtifactPaths().plan / "own/both/train.json").read_text())
    assert record["members"]["csp"] == ProjectData(params, "own").run("csp", 0).settings("train")
    assert params.run.methods == ("csp", "closed_form", "both", "csp_seeds")
    more = params.model_copy(update={"run": params.run.model_copy(update={"seeds": (0, 1, 2)})})
    for name, is_changed in (("both", False), ("csp_seeds", True)):
        assert (
            ProjectData(more, "own").run(name, 0).settings("train")
            != ProjectData(params, "own").run(name, 0).settings("train")
        ) == is_changed


@pytest.mark.slow
def test_a_sweep_executes_members_before_their_products(params: Params, project: Path) -> None:
    shutil.rmtree(project / "artifacts/own/csp")
    runs = grid(params, None, ["both", "csp", "closed_form"], [0])
    assert [is_product(run) for run in runs] == [True, False, False]
    report = sweep(params, runs, 2, "local")
    assert report.failed == {} and (report.executed, report.complete) == (2, 1)  # closed_form is there
    assert ArtifactPaths().run("own", "both", 0).metrics.exists()
    assert sweep(params, runs, 1, "local").complete == 3


@pytest.mark.usefixtures("in_this_process")
def test_a_failed_member_fails_its_product_too(params: Params, project: Path) -> None:
    shutil.rmtree(project / "artifacts/own/csp")
    (error,) = sweep(params, grid(params, None, ["both"], [0]), 1, "local").failed.values()
    assert "csp/0/checkpoint.safetensors does not exist" in error
