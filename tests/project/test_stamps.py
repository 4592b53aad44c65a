"""Which artifacts are stale after which change, and what commands and stages do about it."""

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from duplex.artifacts import ArtifactPaths
from duplex.cli import app
from duplex.config.params import MethodEntry, Params, load_params
from duplex.errors import DuplexError, UsageError
from duplex.features.file import read_cache_digest
from duplex.project import plan, report, runs
from duplex.project import run as run_module
from duplex.project.evaluate import evaluate_stage
from duplex.project.extract import extract
from duplex.project.inventory import inventory_stage
from duplex.project.plan import planned_data, planned_run, write_plan
from duplex.project.prepare import prepare
from duplex.project.run import (
    DATA_STAGES,
    RUN_STAGES,
    LastDatasetLoader,
    ProjectData,
    ProjectRun,
    load_inputs,
    stage_code,
)
from duplex.project.runs import best_run
from duplex.project.sweep import SweptRun
from duplex.project.train import train_stage
from duplex.recognition.export import model_card_facts
from duplex.system import code
from duplex.system.code import code_files, code_hash
from duplex.system.files import sha256
from duplex.training.inputs import InputRequest
from tests.features.conftest import update_checksums
from tests.projects import inside, make_project, with_evaluation
from tests.subprocesses import ROOT

pytestmark = pytest.mark.slow

PLUGIN = "from duplex.methods.prompt_method import PromptMethod\n\n\nclass Mine(PromptMethod):\n    pass\n"
CSP = ArtifactPaths().run("own", "csp", 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_project(folder, seeds=(0, 1), methods=("clip", "csp"), epochs=1)
    text = (folder / "params.yaml").read_text()
    text = text.replace("\nmethods:\n", '\nmethods:\n  mine: {kind: "mine_for_stamps:Mine", extends: clip}\n', 1)
    text = text.replace("word_vectors: null", "word_vectors:", 1)
    (folder / "params.yaml").write_text(text)
    (folder / "mine_for_stamps.py").write_text(PLUGIN)
    with inside(folder):
        train_stage(ProjectRun("own", "mine", 0, load_params()))
        evaluate_stage(ProjectRun("own", "mine", 0, load_params()))
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a project with evaluated runs, as the current folder."""
    folder = shutil.copytree(made, tmp_path / "project")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "mine_for_stamps", raising=False)
    return folder


def edit(file: str, old: str, new: str) -> None:
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))


def stale() -> set[str]:
    """The stages whose files are not those that they should be; runs with seed 0."""
    params = load_params()
    found = {stage for stage in DATA_STAGES if ProjectData(params, "own").difference(stage)}
    for method in ("clip", "csp", "mine"):
        for stage in RUN_STAGES:
            if ProjectRun("own", method, 0, params).difference(stage):
                found.add(f"{stage} {method}")
    return found


def relabel() -> None:
    table = pd.read_csv("pictures.csv")
    table["state"] = table["state"].replace({"red": "blue", "blue": "red"})
    table.to_csv("pictures.csv", index=False)


def relabel_and_prepare() -> None:
    relabel()
    prepare(ProjectData(load_params(), "own"))


def change_features() -> None:
    with h5py.File("artifacts/own/features.h5", "r+") as file:
        file["cls"][:] = np.asarray(file["cls"])[::-1]
        update_checksums(file)


TRAIN = {"train clip", "train csp", "train mine"}
EVALUATE = {"evaluate clip", "evaluate csp", "evaluate mine"}
CHANGES: list[tuple[Callable[[], object], set[str]]] = [
    (lambda: edit("params.yaml", "num_workers: 0", "num_workers: 1"), set()),
    (lambda: edit("params.yaml", "seeds:\n  - 0", "seeds:\n  - 2\n  - 0"), set()),
    (lambda: edit("params.yaml", "epochs: 1\n", "epochs: 3\n"), TRAIN),
    (lambda: edit("params.yaml", "bootstrap: 20", "bootstrap: 21"), EVALUATE),
    (lambda: edit("params.yaml", "\n  csp:\n", "\n  csp:\n    finetune: auto\n"), {"train csp"}),
    (lambda: edit("params.yaml", "thresholds: 50", "thresholds: 5"), TRAIN | EVALUATE),
    (lambda: edit("params.yaml", "name: tiny\n    training", "name: tiny\n      precision: bf16\n    training"),
     {"extract"} | TRAIN | EVALUATE),
    (lambda: edit("params.yaml", "batch_size: 64\n  num_workers", "batch_size: 32\n  num_workers"), {"extract"}),
    (lambda: edit("params.yaml", "word_vectors:", "word_vectors: pictures.csv"), TRAIN | EVALUATE),
    (lambda: edit("mine_for_stamps.py", "    pass", '    """A docstring."""  # a comment\n\n    pass'), set()),
    (lambda: edit("mine_for_stamps.py", "    pass", "    factor = 2"), {"train mine", "evaluate mine"}),
    (relabel, {"prepare"}),
    (relabel_and_prepare, {"extract"} | TRAIN | EVALUATE),
    (change_features, TRAIN | EVALUATE),
    (lambda: CSP.metrics.write_text("{}"), {"evaluate csp"}),
    (CSP.metrics.unlink, {"evaluate csp"}),
    (lambda: CSP.stamp("train").unlink(), {"train csp"}),
    (lambda: CSP.stamp("train").write_text("{"), {"train csp"}),
    (lambda: shutil.copy(ArtifactPaths().run("own", "csp", 1).checkpoint, CSP.checkpoint),
     {"train csp", "evaluate csp"}),
    (lambda: shutil.copytree(ArtifactPaths().run("own", "csp", 1).root, CSP.root, dirs_exist_ok=True),
     {"train csp", "evaluate csp"}),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_a_change_makes_just_the_artifacts_stale_that_depend_on_it(
    project: Path, change: Callable[[], object], expected: set[str]
) -> None:
    assert stale() == set()
    change()
    assert stale() == expected


def test_what_the_stages_of_a_data_set_record(project: Path) -> None:
    params, folder, out = load_params(), Path("artifacts/own"), ArtifactPaths().inventory("own")
    assert ProjectData(params, "own").settings("prepare")["code"] == stage_code("prepare")
    encoded = {"batch_size", "block_inputs", "encoder", "images", "max_bad", "pixels", "tokens"}
    expected = {"prepare": {"source"}, "extract": encoded, "inventory": {"featured", "shown_as"}, "maps": set()}
    assert {stage: set(ProjectData(params, "own").settings(stage)) - {"code"} for stage in expected} == expected
    inventory_stage(ProjectData(params, "own"))
    left_out = (".stamp.json", ".partial")
    listed = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(left_out)]
    files = {path.relative_to(folder).as_posix(): sha256(path) for path in listed}
    assert json.loads((out / "files.json").read_text()) == files
    assert (out / "featured.json").read_text() == "{}\n", "no run has visual prototypes"
    for title, repository, shown in (("A", "b/c", "A"), (None, "b/c", "b/c"), (None, None, "own csp 0")):
        assert model_card_facts(CSP.root, name=title, licence="mit", repository=repository).name == shown


def test_files_of_encoders_count(project: Path) -> None:
    folder, weights = project / "enc", project / "weights.pt"
    folder.mkdir()
    for path in (folder / "open_clip_model.safetensors", weights):
        path.write_text("before")
    params = load_params()
    for path, encoder in (
        (folder / "open_clip_model.safetensors", {"name": f"local-dir:{folder}"}),
        (weights, {"name": "ViT-B-32", "weights": str(weights)}),
    ):
        given = with_encoder(params, **encoder)
        before = [
            ProjectData(given, "own").settings("extract"),
            ProjectData(given, "own").run("csp", 0).settings("train"),
        ]
        path.write_text("after, of another size")
        after = [
            ProjectData(given, "own").settings("extract"),
            ProjectData(given, "own").run("csp", 0).settings("train"),
        ]
        assert before[0] != after[0] and before[1] != after[1]


def test_weights_that_ship_with_the_package_count(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = shutil.copytree(ROOT / "duplex", project / "duplex", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code, "PACKAGE", package)
    weights = package / "encoders" / "tiny" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    assert stale() == {"extract", *TRAIN, *EVALUATE}


def with_encoder(params: Params, **values: object) -> Params:
    entry = params.datasets["own"]
    entry = entry.model_copy(update={"encoder": entry.encoder.model_copy(update=values)})
    return params.model_copy(update={"datasets": {**params.datasets, "own": entry}})


def test_files_that_are_not_on_this_machine_are_not_compared(project: Path) -> None:
    for path in ("pictures", "pictures.csv", "artifacts/own/features.h5"):
        (shutil.rmtree if path == "pictures" else Path.unlink)(Path(path))  # type: ignore[operator]
    assert stale() == set()


def test_the_report_depends_on_the_results_of_ablations_and_on_the_names_of_rows(project: Path) -> None:
    def planned() -> str:
        write_plan(load_params())
        return Path("artifacts/plan/report.json").read_text()

    before, results = planned(), ArtifactPaths().ablations
    results.parent.mkdir(parents=True)
    results.write_text("{}")
    assert planned() != before
    before, listed = planned(), ProjectData(load_params(), "own").settings("inventory")
    edit("params.yaml", "\n  csp:\n", "\n  csp:\n    shown_as: soft\n")
    assert planned() != before and ProjectData(load_params(), "own").settings("inventory") != listed


# What commands do


def compare(*methods: str) -> str:
    """What `duplex compare` prints on stderr."""
    done = CliRunner().invoke(app, ["compare", "--dataset", "own", "--methods", *(methods or ("clip", "csp"))])
    if done.exception is not None:
        raise done.exception.__context__ or done.exception
    return done.stderr


def test_stale_runs_are_no_default_model(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit("params.yaml", "\n  csp:\n", "\n  csp:\n    training: {epochs: 3}\n")
    assert best_run(params=load_params()).root.parent.name == "clip"
    csp = "duplex: artifacts/own/csp/{} is skipped, as params.yaml differs: training.epochs was 1 and is now 3\n"
    assert capfd.readouterr().err == csp.format(0) + csp.format(1)
    edit("params.yaml", "epochs: 1\n", "epochs: 3\n")
    with pytest.raises(UsageError, match=r"no trained run .* matches params\.yaml; run `dvc repro`, or name one"):
        best_run(params=load_params())
    assert best_run().root.is_dir()


def test_a_run_of_a_method_that_was_removed_is_no_default_model(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    params = load_params()
    without = {name: entry for name, entry in params.methods.items() if name != "csp"}
    assert best_run(params=params.model_copy(update={"methods": without})).root.parent.name != "csp"
    note = "artifacts/own/csp/0 is skipped, as params.yaml differs: it has no method 'csp'\n"
    assert note in capfd.readouterr().err


def test_stale_runs_are_not_queried_or_evaluated(project: Path) -> None:
    assert runs.load_run_or_default(load_params(), "own", "csp", 0)
    edit("params.yaml", "epochs: 1\n", "epochs: 3\n")
    match = r"does not match the method 'csp' in params\.yaml: training.epochs was 1 and is now 3; `duplex train"
    with pytest.raises(DuplexError, match=match):
        runs.load_run_or_default(load_params(), "own", "csp", 0)
    with pytest.raises(DuplexError, match=match):
        evaluate_stage(ProjectRun("own", "csp", 0, load_params()))


def test_a_run_is_not_evaluated_on_other_features_than_those_of_training(project: Path) -> None:
    params, features = load_params(), ArtifactPaths().features("own")
    contents = read_cache_digest(features)
    pictures = sorted(project.glob("pictures/**/*.png"))
    for first, second in zip(pictures[:40], pictures[-40:], strict=True):
        shutil.copyfile(second, first)
    prepare(ProjectData(params, "own"))
    extract(ProjectData(params, "own"), fresh=True)
    assert read_cache_digest(features) != contents
    with pytest.raises(DuplexError, match=r"not match the method 'csp' in params\.yaml: its features have changed"):
        evaluate_stage(ProjectRun("own", "csp", 0, params))


def test_stale_results_are_reported(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report.report_stage(load_params())
    assert compare() == "" and capfd.readouterr().err == ""
    run = ArtifactPaths().run("own", "csp", 1).root
    for name in ("metrics.json", "predictions.csv", "curve.csv"):
        shutil.copy(ArtifactPaths().run("own", "clip", 1).root / name, run / name)
    expected = "its metrics.json has changed since evaluate.stamp.json was written"
    assert f"own/csp/1 does not match csp with seed 1 in params.yaml: {expected}" in compare()
    assert compare("csp", "clip", "clip").count("own/csp/1 does not match") == 1, "though it is in both pairs"
    done = CliRunner().invoke(app, ["metrics"])
    assert "artifacts/summary.json does not match the runs in artifacts; `duplex report`" in done.stderr
    report.report_stage(with_evaluation(load_params(), bootstrap=21, terms=False), ArtifactPaths(), write_metrics=False)
    said = capfd.readouterr().err
    assert "does not match the method clip in params.yaml: evaluation.bootstrap was 20 and is now 21" in said


def test_results_of_a_changed_source_are_not_compared(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    relabel()
    with pytest.raises(DuplexError, match=r"own has to be prepared again: its table.*`duplex prepare --dataset own`"):
        compare()
    report.warn_of_outdated(load_params(), ArtifactPaths())
    assert "own has to be prepared again" in capfd.readouterr().err


def test_a_product_of_members_that_were_trained_again_is_stale(project: Path) -> None:
    params = load_params()
    params = params.model_copy(
        update={"methods": {**params.methods, "both": MethodEntry(kind="product", of=["clip", "csp"])}}
    )
    train_stage(ProjectRun("own", "both", 0, params))
    evaluate_stage(ProjectRun("own", "both", 0, params))
    edit("artifacts/own/csp/0/train.stamp.json", '"epochs": 1', '"epochs": 2')
    CSP.checkpoint.write_bytes(ArtifactPaths().run("own", "csp", 1).checkpoint.read_bytes())
    assert ProjectRun("own", "both", 0, params).difference() == "a run that it combines was trained again"
    CSP.checkpoint.unlink()
    assert ProjectRun("own", "both", 0, params).difference() == ""


# What stages of the pipeline do


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [("epochs: 1\n", "epochs: 3\n", "train"), ("bootstrap: 20", "bootstrap: 30", "evaluate"),
     ("batch_size: 64\n  num_workers", "batch_size: 32\n  num_workers", "extract"),
     ("table: pictures.csv", "table: pictures.csv\n      resplit: 1", "prepare")],
)  # fmt: skip
def test_a_stage_refuses_values_of_its_own_that_changed_since_the_plan(
    project: Path, old: str, new: str, changed: str
) -> None:
    write_plan(load_params())

    def planned(stage: str) -> Params:
        if stage in DATA_STAGES:
            return planned_data("own", stage).params
        return planned_run("own", "csp", "0", stage).params

    edit("params.yaml", old, new)
    for stage in (*DATA_STAGES, *RUN_STAGES):
        if stage == changed:
            with pytest.raises(DuplexError, match=rf"the code has changed since .*{stage}.json.*`dvc repro` again"):
                planned(stage)
        else:
            assert planned(stage) == load_params()
    shutil.rmtree("artifacts/plan")
    assert planned(changed) == load_params()


def test_a_checkpoint_replaced_during_an_evaluation_gives_no_metrics(project: Path) -> None:
    run, other = (ArtifactPaths().run("own", method, 0) for method in ("clip", "csp"))
    before = run.metrics.read_bytes()

    def load(*arguments):
        shutil.copy(other.checkpoint, run.checkpoint)
        return load_inputs(*arguments)

    with pytest.raises(DuplexError, match="its tensors were changed"):
        evaluate_stage(ProjectRun("own", "clip", 0, load_params()), load=load)
    assert run.metrics.read_bytes() == before


def test_a_new_stage_needs_no_more_than_its_script(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "pipeline", project / "pipeline")
    script = project / "pipeline" / "count.py"
    script.write_text("def work(dataset):\n    from duplex.data.tables import read_manifest\n")
    monkeypatch.setattr(plan, "shipped_project", lambda: project)
    monkeypatch.setattr(run_module, "shipped_project", lambda: project)
    write_plan(load_params())
    record = json.loads(Path("artifacts/plan/own/count.json").read_text())
    assert record == {"code": code_hash(script)}
    assert "duplex/data/tables.py" in code_files(script)
    assert planned_data("own", "count").dataset == "own"


def test_a_run_is_stamped_with_the_features_that_it_read(project: Path) -> None:
    run = ProjectRun("own", "csp", 0, load_params())

    def load(*arguments):
        inputs = load_inputs(*arguments)
        change_features()  # another process extracts again meanwhile
        return inputs

    train_stage(run, load=load)
    assert run.difference() == "its features have changed"
    train_stage(run)
    assert run.difference() == ""
    evaluate_stage(run, load=load)
    assert run.difference("evaluate") == "its features have changed"


def test_a_worker_reads_inputs_again_once_their_files_have_changed(project: Path) -> None:
    load, data, request = LastDatasetLoader(), ProjectData(load_params(), "own"), InputRequest()
    first = load(data, request)
    assert load(data, request) is first
    change_features()
    second = load(data, request)
    assert second.read["features.h5"] != first.read["features.h5"]
    assert not torch.equal(second.examples["train"].cls, first.examples["train"].cls)
    relabel_and_prepare()
    with pytest.raises(DuplexError, match="manifest"):  # its features are those of the earlier one
        load(data, request)


def test_a_sweep_refuses_runs_after_the_code_has_changed(project: Path) -> None:
    run = ProjectRun("own", "mine", 0, load_params())
    swept = SweptRun(run, {stage: run.settings(stage) for stage in RUN_STAGES})
    swept.execute(load_inputs)
    edit("mine_for_stamps.py", "    pass", "    factor = 2")
    with pytest.raises(DuplexError, match="changed since the sweep began"):
        swept.execute(load_inputs)


@pytest.mark.parametrize(
    ("script", "words"),
    [("prepare", ["own"]), ("extract", ["own"]), ("train", ["own", "csp", "0"]), ("evaluate", ["own", "csp", "0"]),
     ("product", ["own", "csp", "0"]), ("inventory", ["own"]), ("maps", ["own"])],
)  # fmt: skip
def test_each_script_of_the_pipeline_compares_its_plan(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, words: list[str]
) -> None:
    write_plan(load_params())
    for file in Path("artifacts/plan/own").rglob("*.json"):
        file.write_text("{}")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "pipeline" / f"{script}.py"), run_name="__main__")
    err = capsys.readouterr().err
    assert left.value.code == 1 and err.count("\n") == 1 and "run `dvc repro` again" in err
