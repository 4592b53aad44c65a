"""Sweeps write the files of the stages, and survive being killed, interrupted, and runs that fail."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duplex.artifacts import ArtifactPaths
from duplex.cli import main
from duplex.config.params import MethodEntry, Params, load_params
from duplex.errors import DuplexError
from duplex.project import sweep as sweep_module
from duplex.project.evaluate import evaluate_stage
from duplex.project.ray import run_on_actors
from duplex.project.run import ProjectRun, load_inputs
from duplex.project.sweep import (
    DvcRepo,
    Outcome,
    SweptRun,
    TaskRunner,
    commit_targets,
    grid,
    run_in_processes,
    sweep,
    workers_and_gpus,
)
from duplex.project.train import train_stage
from duplex.training.checkpoint import read_record
from tests.projects import edited_params, with_evaluation
from tests.subprocesses import ENVIRONMENT, ROOT, Forked, duplex

FILES = ("checkpoint.safetensors", "history.csv", "metrics.json", "curve.csv", "predictions.csv")


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.name in FILES}


def by_stages(params: Params, project: Path, runs: list[ProjectRun]) -> dict[str, bytes]:
    """Return the files of the same runs as the stages write them, one after another, into another folder."""
    paths = ArtifactPaths(project / "by stages")
    for name in {run.dataset for run in runs}:
        (paths.root / name).mkdir(parents=True, exist_ok=True)
        for file in ("manifest.csv", "labels.json", "features.h5"):
            shutil.copy(project / "artifacts" / name / file, paths.root / name / file)
    for run in runs:
        train_stage(ProjectRun(run.dataset, run.method, run.seed, params, paths))
        evaluate_stage(ProjectRun(run.dataset, run.method, run.seed, params, paths))
    return files(paths.root)


def start(*words: str) -> Forked:
    """Start `duplex sweep` as the leader of its own process group, like a shell does."""
    return Forked(lead_a_sweep, *words, env=ENVIRONMENT)


def lead_a_sweep(*words: str) -> None:
    os.setsid()
    sys.argv = ["duplex", "sweep", *words]
    main()


@pytest.mark.slow
def test_files_are_those_of_the_stages_and_a_second_sweep_executes_nothing(project, params):
    runs = grid(params, None, ["csp", "closed_form", "duplex_open"], [0, 1])  # each process gets different methods
    report = sweep(params, runs, 2, "local")
    assert (report.runs, report.complete, report.executed, report.failed) == (6, 0, 6, {})
    assert files(project / "artifacts") == by_stages(params, project, runs)
    before = {path: path.stat().st_mtime_ns for path in (project / "artifacts").rglob("*") if path.is_file()}
    again = sweep(params, runs, 2, "local")
    assert (again.complete, again.executed) == (6, 0)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_only_missing_stages_are_executed(params):
    run = ProjectRun("own", "csp", 0, params)
    sweep(params, [run], 1, "local")
    paths = ArtifactPaths().run("own", "csp", 0)
    trained, metrics = paths.checkpoint.stat().st_mtime_ns, paths.metrics.read_bytes()
    paths.metrics.write_text("{}")
    assert sweep(params, [run], 1, "local").executed == 1
    assert paths.metrics.read_bytes() == metrics
    assert paths.checkpoint.stat().st_mtime_ns == trained, "only evaluation was missing"
    changed = with_evaluation(params, bootstrap=21)
    changed_run = ProjectRun("own", "csp", 0, changed)
    assert sweep(changed, [changed_run], 1, "local").executed == 1
    assert paths.checkpoint.stat().st_mtime_ns == trained
    paths.checkpoint.unlink()
    assert sweep(changed, [changed_run], 1, "local").executed == 1
    assert paths.checkpoint.exists()
    copy = ArtifactPaths().run("own", "csp", 1)
    shutil.copytree(paths.root, copy.root)
    assert sweep(changed, [changed_run, ProjectRun("own", "csp", 1, changed)], 1, "local").executed == 1
    assert read_record(copy.checkpoint).seed == 1, "a copy of another seed's run is not complete"


def test_stages_use_the_threads_of_their_training_options(params):
    used, before = [], torch.get_num_threads()

    def load(*arguments):
        used.append(torch.get_num_threads())
        return load_inputs(*arguments)

    torch.set_num_threads(3)
    try:
        for stage in (train_stage, evaluate_stage):
            stage(ProjectRun("own", "closed_form", 0, params), load=load)
        assert (used, torch.get_num_threads()) == ([1, 1], 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_failed_run_is_reported_and_stops_no_other(project):
    done = duplex("sweep", "--methods", "dfsp_t2i,csp", "--seeds", "0", "--jobs", "1", "--json")
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert lines[:2] == ["run 1 of 2 failed: own dfsp_t2i 0", "run 2 of 2 finished: own csp 0"]
    assert lines[2].startswith("2 runs: 1 trained and evaluated in ") and lines[2].endswith(", 1 failed")
    assert lines[3].startswith("own dfsp_t2i 0: ") and "extraction.tokens" in lines[3]
    assert len(lines) == 4
    assert json.loads(done.stdout)["executed"] == 1
    assert (project / "artifacts/own/csp/0/metrics.json").exists()


class KilledBySeed1(TaskRunner):
    def execute(self, trial: Any) -> Outcome:
        if trial.run.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome(trial)


@pytest.mark.slow
def test_a_process_that_dies_fails_its_current_run_only(params):
    tasks = [SweptRun(ProjectRun("own", "csp", seed, params), {}) for seed in range(4)]
    results = run_in_processes(tasks, KilledBySeed1(1), 1, [])
    errors = {result.trial.run.seed: result.error for result in results}
    assert [seed for seed, error in errors.items() if error is None] == [0, 2, 3]
    assert "was killed by signal 9" in (errors[1] or "")


class PrintsEnvironment(TaskRunner):
    def execute(self, trial: Any) -> Outcome:
        values = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ["OMP_WAIT_POLICY"], torch.get_num_threads()
        return Outcome(trial, output=repr(values))


@pytest.mark.slow
def test_each_process_gets_one_gpu_in_turn(params, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    tasks = [SweptRun(ProjectRun("own", "csp", seed, params), {}) for seed in range(2)]
    results = run_in_processes(tasks, PrintsEnvironment(1), 2, ["4", "7"])
    assert {result.output for result in results} <= {"('4', 'passive', 2)", "('7', 'passive', 2)"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert "OMP_WAIT_POLICY" not in os.environ


@pytest.mark.parametrize(("visible", "gpus"), [(None, ["0", "1", "2"]), ("4,7", ["4", "7"])])
def test_a_sweep_has_one_process_per_visible_gpu(monkeypatch, visible: str | None, gpus: list[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert workers_and_gpus("auto", None, 1) == (len(gpus), gpus)
    assert workers_and_gpus("cuda", 5, 1) == (5, gpus)  # two processes share a GPU
    assert workers_and_gpus("cpu", 5, 1) == (5, [])


class PretendedCluster:
    """What `run_on_actors` uses of Ray: two GPUs, and actors that answer at once."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.killed = 0

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, "GPU": 2.0}

    def remote(self, **options: Any) -> Any:
        def started(create: Any, folder: str) -> Any:
            self.asked.append(options)
            call = create()
            return SimpleNamespace(run=SimpleNamespace(remote=lambda task: (call(task),)))

        return lambda actor_class: SimpleNamespace(remote=started)

    def wait(self, futures: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return futures[:num_returns], futures[num_returns:]

    def kill(self, actor: Any) -> None:
        self.killed += 1


def test_on_ray_each_gpu_has_one_actor():
    cluster = PretendedCluster()
    done = dict(run_on_actors(cluster, lambda: lambda task: 2 * task, range(5), on_gpu=True))
    assert done == {task: (2 * task,) for task in range(5)}
    assert [(each["num_gpus"], each["num_cpus"]) for each in cluster.asked] == [(1, 1), (1, 1)]
    assert cluster.killed == 2
    assert len(dict(run_on_actors(cluster, lambda: abs, range(9), on_gpu=False, cpus=2))) == 9
    assert [(each["num_gpus"], each["num_cpus"]) for each in cluster.asked[2:]] == 3 * [(0, 2)]


def lengthen(project: Path, epochs: int) -> Params:
    with edited_params(project / "params.yaml") as record:
        record["datasets"]["own"]["training"]["epochs"] = epochs
    return load_params(project / "params.yaml")


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_and_resumed_leaves_the_same_bytes(project):
    params, moment = lengthen(project, 8), random.Random(0)
    runs = grid(params, None, ["csp"], None)
    words = ["--methods", "csp", "--jobs", "2"]
    for _ in range(2):
        running = start_until_saved(project, *words)
        time.sleep(moment.uniform(0, 1))
        running.kill()  # its workers notice by themselves that their parent is gone
        running.communicate()
    last = start(*words)
    _, err = last.communicate()
    assert last.returncode == 0, err
    assert "runs: " in err
    assert files(project / "artifacts") == by_stages(params, project, runs)
    assert not list((project / "artifacts").rglob("training.partial"))


def start_until_saved(project: Path, *words: str) -> Forked:
    """Start `duplex sweep`; return when it has saved the state of a training or the stamp of a finished run."""

    def saved() -> set[tuple[str, int]]:
        files = [*project.rglob("training.partial"), *project.rglob("*.stamp.json")]
        return {(str(path), path.stat().st_mtime_ns) for path in files if path.exists()}

    before, running, began = saved(), start(*words), time.monotonic()
    while saved() == before and running.poll() is None:
        assert time.monotonic() - began < 300
        time.sleep(0.01)
    return running


@pytest.mark.slow
def test_ctrl_c_prints_one_line(project):
    lengthen(project, 400)
    running = start_until_saved(project, "--methods", "duplex_open", "--jobs", "2")
    os.killpg(running.pid, signal.SIGINT)  # a terminal signals all of them
    try:
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert (running.returncode, err) == (130, "duplex: stopped; the same command resumes the work\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--methods", "cps"], "unknown method 'cps'"), (["--methods", "module_cso"], "unknown method 'module_cso'"),
     (["--datasets", "shape"], "unknown data set 'shape'"),
     (["--datasets", "cgqa"], "`duplex prepare --dataset cgqa` writes it"), (["--seeds", "0,x"], "--seeds has 'x'"),
     (["--seeds", "0-99999999"], "--seeds has '0-99999999'"), (["--seeds", "4-0"], "--seeds has '4-0'"),
     (["--methods", "csp,csp"], "the method csp is listed twice"),
     (["--engine", "slurm"], "unknown engine 'slurm'; known: local, ray")],
)  # fmt: skip
def test_a_wrong_argument_is_reported_in_one_line(project, command, words, message):
    assert command("sweep", *words).refused(message)


def finished_report(*words: str) -> dict[str, int]:
    process = start(*words, "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


def test_what_is_committed_covers_single_runs_groups_and_products(params):
    methods = {**params.methods, "both": MethodEntry(kind="product", of=["csp", "clip"])}
    params = params.model_copy(update={"methods": methods})
    csp, both = (ProjectRun("own", method, 0, params) for method in ("csp", "both"))
    of_csp = {"train@own-csp-0", "evaluate@own-csp-0"}
    assert commit_targets([csp], of_csp) == ["train", "evaluate"]
    assert set(commit_targets([csp], {*of_csp, "train@own-cso-1"})) == of_csp
    assert commit_targets([csp], {*of_csp, "product@own-both-0"}) == ["train", "evaluate"]
    assert commit_targets([csp, both], {*of_csp, "product@own-both-0"}) == ["train", "product", "evaluate"]
    assert commit_targets([both], {"product@own-both-0", "product@own-both-1"}) == ["product@own-both-0"]


@pytest.mark.usefixtures("in_this_process")
def test_nothing_is_committed_if_params_yaml_changed_during_the_sweep(project, params, monkeypatch):
    run, committed = ProjectRun("own", "csp", 0, params), list[list[str]]()
    changed = {"extract@own", "train@own-csp-0", "evaluate@own-csp-0"}
    repo = SimpleNamespace(commit=committed.append, changed=lambda _: changed, require_free=lambda _: None)
    monkeypatch.setattr(sweep_module.DvcRepo, "at", lambda folder: repo)
    monkeypatch.setattr(sweep_module, "grid", lambda *_: [run])
    before = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(before.replace("bootstrap: 20", "bootstrap: 21"))
    for edited in (None, "run: [half"):
        if edited:
            (project / "params.yaml").write_text(edited)
        report = sweep(params, [run], 1, "local")
        assert str(report.not_committed).startswith("params.yaml has changed since the sweep started, so no run")
        assert (committed, report.committed) == ([], 0)
    (project / "params.yaml").write_text(before)
    assert sweep(params, [run], 1, "local").committed == 1
    assert committed == [["plan", "extract@own", "train", "evaluate"]]  # features made by hand are committed, too


@pytest.mark.usefixtures("in_this_process")
def test_dvc_extracts_outdated_features_before_the_runs(params, monkeypatch):
    run, asked = ProjectRun("own", "csp", 0, params), list[list[str]]()
    monkeypatch.setattr(sweep_module.DvcRepo, "at", lambda folder: SimpleNamespace(repro=asked.append))
    monkeypatch.setattr(sweep_module, "grid", lambda *_: [run])
    monkeypatch.setattr(sweep_module.ProjectData, "difference", lambda *_: "its code has changed")
    with pytest.raises(DuplexError, match="its code has changed"):  # as this one extracted nothing
        sweep(params, [run], 1, "local")
    assert asked == [["extract@own"]]


@pytest.mark.long
def test_dvc_repro_runs_no_stage_of_a_finished_sweep(project, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(project))
    for name in ("PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    for name in ("duplex", "pipeline"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dvc.yaml", project / "dvc.yaml")
    dvc = [sys.executable, "-m", "dvc"]
    for words in (["git", "init", "-q", "."], [*dvc, "init", "-q"]):
        subprocess.run(words, check=True, env=ENVIRONMENT)
    assert DvcRepo.at(project) == DvcRepo(project)
    assert finished_report("--methods", "csp", "--seeds", "0")["committed"] == 1
    report = finished_report()
    assert [report[key] for key in ("runs", "complete", "executed", "committed")] == [4, 1, 3, 3]
    before = files(project / "artifacts")
    done = subprocess.run(
        [*dvc, "repro", "train", "evaluate"], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert re.findall("Running stage '(.*)'", done.stdout) == ["plan"]
    assert files(project / "artifacts") == before


@pytest.mark.slow
def test_files_are_the_same_on_ray(project, params):
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}},
    )  # fmt: skip
    try:
        runs = grid(params, None, ["csp", "dfsp_t2i"], [0])
        report = sweep(params, runs, None, "ray")
    finally:
        ray.shutdown()
    assert report.executed == 1
    assert [name for name in report.failed if "dfsp" not in name] == []
    assert files(project / "artifacts") == by_stages(params, project, runs[:1])
