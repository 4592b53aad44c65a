"""A sweep's files against the stages' own, and sweeps that are killed, stopped, or have a cell that fails."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.errors import UsageError
from duplex.runs.dvc_repo import Project
from duplex.runs.run_tasks import Cell, Made, Maker, Task, mark_of, missing_stages
from duplex.runs.sweep import grid, missing_of, sweep, targets_of
from duplex.runs.worker_pool import on_processes
from duplex.stages import evaluate, train
from duplex.stages.plan import planned
from tests.subprocesses import ENVIRONMENT, ROOT, duplex

FILES = ("checkpoint.safetensors", "history.csv", "metrics.json", "curve.csv", "predictions.csv")
HEARING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # tests in the background do not
DUPLEX = [sys.executable, "-c", f"{HEARING}; from duplex.cli import main; main()"]


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.name in FILES}


def by_stages(params: Params, project: Path, cells: list[Cell]) -> dict[str, bytes]:
    """The same cells by the stages, one after another, elsewhere."""
    paths = ArtifactPaths(project / "by stages")
    for name in {cell.dataset for cell in cells}:
        keep = ("manifest.csv", "labels.json", "features.h5")
        for file in keep:
            (paths.root / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(project / "artifacts" / name / file, paths.root / name / file)
    for cell in cells:
        train.run(params, cell.dataset, cell.method, cell.seed, paths)
        evaluate.run(params, cell.dataset, cell.method, cell.seed, paths)
    return files(paths.root)


def start(*words: str) -> subprocess.Popen[str]:
    """`duplex sweep` as a user starts it, the leader of its own group."""
    return subprocess.Popen(
        [*DUPLEX, "sweep", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_its_files_are_those_of_the_stages_and_a_second_one_makes_nothing(project, params):
    cells = grid(params, None, ["csp", "closed_form", "duplex_open"], [0, 1])  # warm processes mix them
    report = sweep(params, cells, 2, "local")
    assert (report.cells, report.there, report.made, report.failed) == (6, 0, 6, {})
    assert files(project / "artifacts") == by_stages(params, project, cells)
    before = {path: path.stat().st_mtime_ns for path in (project / "artifacts").rglob("*") if path.is_file()}
    again = sweep(params, cells, 2, "local")
    assert (again.there, again.made) == (6, 0)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_only_what_is_missing_is_made(params):
    cell = Cell("own", "csp", 0)
    sweep(params, [cell], 1, "local")
    run = ArtifactPaths().run("own", "csp", 0)
    trained, whole = run.checkpoint.stat().st_mtime_ns, run.metrics.read_bytes()
    run.metrics.write_text("{}")
    assert sweep(params, [cell], 1, "local").made == 1
    assert run.metrics.read_bytes() == whole
    assert run.checkpoint.stat().st_mtime_ns == trained, "its checkpoint was good"
    changed = params.model_copy(update={"evaluation": params.evaluation.model_copy(update={"bootstrap": 21})})
    assert sweep(changed, [cell], 1, "local").made == 1
    assert run.checkpoint.stat().st_mtime_ns == trained
    run.checkpoint.unlink()
    assert sweep(changed, [cell], 1, "local").made == 1
    assert run.checkpoint.exists()


def test_what_dvc_has_is_there_and_marks_tell_of_the_rest(tmp_path):
    task = Task(Cell("d", "m", 0), tmp_path, {"train": "t", "evaluate": "e"})

    def stages(by_dvc):
        return [("train", "evaluate") if one.train else ("evaluate",) for one in missing_of([task], by_dvc)]

    assert stages({}) == [("train", "evaluate")]
    assert stages({task.cell: ()}) == []
    assert stages({task.cell: ("evaluate",)}) == [("evaluate",)]
    assert stages({task.cell: ("train",)}) == [("train", "evaluate")]
    assert stages({task.cell: ("train", "evaluate")}) == [("train", "evaluate")]


class Asked(Exception):
    pass


def test_training_and_evaluation_keep_to_their_threads_and_the_plan_has_them(params):
    seen, before = [], torch.get_num_threads()

    def load(*_, **__):
        seen.append(torch.get_num_threads())
        raise Asked

    train.run(params, "own", "closed_form", 0)
    torch.set_num_threads(3)
    try:
        for stage in (train, evaluate):
            with pytest.raises(Asked):
                stage.run(params, "own", "closed_form", 0, load=load)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]
    record = planned(params, "own", "csp")
    assert (record["train"]["training"]["threads"], record["evaluate"]["threads"]) == (1, 1)


@pytest.mark.parametrize("mark", ["", "[]", "null", '{"train": 3}', '{"train": ["other", []], "evaluate": []}'])
def test_a_mark_that_says_something_else_is_none(tmp_path, mark):
    for name in FILES:
        (tmp_path / name).write_text(name)
    mark_of(tmp_path).write_text(mark)
    assert missing_stages(Task(Cell("d", "m", 0), tmp_path, {"train": "t", "evaluate": "e"})) == ("train", "evaluate")


@pytest.mark.slow
def test_a_cell_that_fails_is_named_and_stops_no_other(project):
    done = duplex("sweep", "--methods", "dfsp_t2i,csp", "--seeds", "0", "--jobs", "1", "--json")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("2 cells: 1 made in ") and lines[0].endswith(", 1 failed")
    assert lines[1].startswith("own dfsp_t2i 0: ") and "extraction.tokens" in lines[1]
    assert len(lines) == 2
    assert json.loads(done.stdout)["made"] == 1
    assert (project / "artifacts/own/csp/0/metrics.json").exists()


class Mortal(Maker):
    """Dies over seed 1."""

    def make(self, task: Task) -> Made:
        if task.cell.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return Made(task, 0.0)


def test_a_process_that_dies_costs_one_cell(params):
    tasks = [Task(Cell("own", "csp", seed), Path("out"), {}) for seed in range(4)]
    found = {
        made.task.cell.seed: made.failed for made in on_processes(tasks, Mortal(params, ArtifactPaths(), 1), 1, [])
    }
    assert [seed for seed, failed in found.items() if failed is None] == [0, 2, 3]
    assert "was killed by signal 9" in (found[1] or "")


class Telling(Maker):
    def make(self, task: Task) -> Made:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ["OMP_WAIT_POLICY"], torch.get_num_threads()
        return Made(task, 0.0, said=repr(seen))


def test_gpus_go_to_the_processes_in_turn(params, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    tasks = [Task(Cell("own", "csp", seed), Path("out"), {}) for seed in range(2)]
    found = {made.said for made in on_processes(tasks, Telling(params, ArtifactPaths(), 1), 2, ["4", "7"])}
    assert found <= {"('4', 'passive', 2)", "('7', 'passive', 2)"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert "OMP_WAIT_POLICY" not in os.environ


def lengthen(project: Path, epochs: int) -> Params:
    path = project / "params.yaml"
    record = YAML(typ="safe").load(path.read_text())
    record["datasets"]["own"]["training"]["epochs"] = epochs
    with path.open("w") as file:
        YAML().dump(record, file)
    return load_params(path)


@pytest.mark.slow
def test_killed_at_any_moment_and_started_again_it_leaves_the_same_bytes(project):
    params, moment = lengthen(project, 8), random.Random(0)
    cells = grid(params, None, ["csp"], None)
    words = ["--methods", "csp", "--jobs", "2"]
    for _ in range(2):
        running, before, began = start(*words), saved(project), time.monotonic()
        while saved(project) == before and running.poll() is None:
            assert time.monotonic() - began < 300
            time.sleep(0.01)
        time.sleep(moment.uniform(0, 1))
        running.kill()  # its workers are no group of ours: they must see for themselves
        running.communicate()
    last = start(*words)
    _, err = last.communicate()
    assert last.returncode == 0, err
    assert "cells: " in err
    assert files(project / "artifacts") == by_stages(params, project, cells)
    assert not list((project / "artifacts").rglob("training.partial"))


def saved(project: Path) -> set[tuple[str, int]]:
    """What unfinished and finished training there is."""
    kept = [*project.rglob("training.partial"), *project.rglob("swept.partial")]
    return {(str(path), path.stat().st_mtime_ns) for path in kept if path.exists()}


@pytest.mark.slow
def test_ctrl_c_is_one_sentence(project):
    lengthen(project, 400)
    running, began = start("--methods", "duplex_open", "--jobs", "2"), time.monotonic()
    while not saved(project):
        assert time.monotonic() - began < 300
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all of them
    try:
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert (running.returncode, err) == (130, "duplex: stopped; the same command takes it up again\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--methods", "cps"], "unknown method 'cps'"),
        (["--datasets", "shape"], "unknown data set 'shape'"),
        (["--datasets", "cgqa"], "`duplex prepare --dataset cgqa` writes it"),
        (["--seeds", "0,x"], "--seeds has 'x'"),
        (["--seeds", "0-99999999"], "--seeds has '0-99999999'"),
        (["--seeds", "4-0"], "--seeds has '4-0'"),
        (["--methods", "csp,csp"], "the method csp is named twice"),
        (["--engine", "slurm"], "unknown engine 'slurm'; known: local, ray"),
    ],
)
def test_a_wrong_request_is_one_sentence(project, capsys, monkeypatch, words, says):
    from duplex.cli import main

    monkeypatch.setattr(sys, "argv", ["duplex", "sweep", *words])
    with pytest.raises(SystemExit) as left:
        main()
    err = capsys.readouterr().err
    assert left.value.code in (1, 2)
    assert says in err
    assert err.count("\n") == 1


def test_the_grid_is_run_s_where_nobody_names_another(params):
    assert grid(params, None, None, None) == [
        Cell("own", method, seed) for method in ("csp", "closed_form") for seed in (0, 1)
    ]
    assert grid(params, None, ["cso"], [5]) == [Cell("own", "cso", 5)]
    with pytest.raises(UsageError):
        grid(params, None, ["module_cso"], None)


def test_a_group_is_named_only_where_nothing_else_of_it_has_changed():
    tasks = [Task(Cell("d", "m", seed), Path(str(seed)), {}) for seed in (0, 1)]
    own = [f"{stage}@d-m-{seed}" for stage in ("train", "evaluate") for seed in (0, 1)]
    assert targets_of(tasks, ["plan", *own]) == ["plan", "train", "evaluate"]
    assert targets_of(tasks, [*own, "train@d-m-2"]) == ["plan", *own]
    assert targets_of(tasks[:1], own) == ["plan", "train@d-m-0", "evaluate@d-m-0"]


@pytest.mark.long
def test_dvc_runs_nothing_of_it(project, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(project))
    for name in ("PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    for name in ("duplex", "pipeline"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dvc.yaml", project / "dvc.yaml")
    dvc = [sys.executable, "-m", "dvc"]
    for words in (["git", "init", "-q", "."], [*dvc, "init", "-q"], [*dvc, "commit", "-fq", "prepare", "extract"]):
        subprocess.run(words, check=True, env=ENVIRONMENT)
    assert Project.at(project) == Project(project)
    first = start("--methods", "csp", "--seeds", "0", "--json")
    out, err = first.communicate()
    assert first.returncode == 0, err
    assert json.loads(out)["handed"] == 1
    assert not list(project.rglob("swept.partial"))
    rest = start("--json")
    out, err = rest.communicate()
    assert rest.returncode == 0, err
    found = json.loads(out)
    assert (found["cells"], found["there"], found["made"], found["handed"]) == (4, 1, 3, 3)
    whole = files(project / "artifacts")
    done = subprocess.run(
        [*dvc, "repro", "train", "evaluate"], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert "Running stage" not in done.stdout
    assert files(project / "artifacts") == whole
    (project / "artifacts/own/features.h5").touch()
    (project / "artifacts/own/labels.json").write_text("{}")
    stale = start()
    _, err = stale.communicate()
    assert stale.returncode == 1
    assert "`dvc commit prepare@own` keeps what is there" in err


@pytest.mark.slow
def test_on_ray_the_files_are_the_same(project, params):
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=3, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}},
    )  # fmt: skip
    try:
        cells = grid(params, None, ["csp", "dfsp_t2i"], [0, 1])
        report = sweep(params, cells, None, "ray")
    finally:
        ray.shutdown()
    assert report.made == 2
    assert [name for name in report.failed if "dfsp" not in name] == []
    assert files(project / "artifacts") == by_stages(params, project, cells[:2])
