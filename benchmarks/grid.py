"""Compare `duplex sweep` with `dvc repro` on `shapes`: seconds, processor seconds, and every byte.

python -m benchmarks.grid [--json] [--runs 40] [--epochs N] [--jobs N] [--no-kill]

40 runs are eight methods with five seeds; features exist on both sides. A third project is swept twice: SIGKILL ends
the first sweep at a random moment, the second resumes it. The sides run one after the other; on a busy machine, compare
processor seconds. Takes several minutes for 40 runs on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.measure import emit, say
from duplex.artifacts import RunPaths
from duplex.runs.run_tasks import OUTPUTS

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("clip", "csp", "duplex", "closed_form", "coop", "cso", "duplex_open", "dual")
COPIED = ("duplex", "pipeline")
DVC = (sys.executable, "-m", "dvc")
DUPLEX = (sys.executable, "-c", "from duplex.cli import main; main()")
START = """
import time
began = time.perf_counter()
from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.stages import evaluate, train
from duplex.library.inputs import load_inputs
imported = time.perf_counter()
load_inputs(load_params(), "shapes", ArtifactPaths())
print(imported - began, time.perf_counter() - imported)
"""


@dataclass(frozen=True)
class Spent:
    seconds: float
    processor: float
    out: str


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which stages import the project's own copy of the package."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}


def spend(folder: Path, *words: str) -> Spent:
    """Run a command and measure it."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return Spent(seconds, sum(after[:2]) - sum(before[:2]), done.stdout)


def grid_of(runs: int) -> tuple[list[str], list[int]]:
    """Return eight methods and as many seeds as needed; for fewer than eight runs, that many methods and one seed."""
    if runs > len(METHODS) and runs % len(METHODS):
        raise SystemExit(f"--runs is {runs}; it is at most {len(METHODS)}, or a multiple of it")
    return list(METHODS[:runs]), list(range(max(1, runs // len(METHODS))))


def prepared(folder: Path, methods: list[str], seeds: list[int], epochs: int | None) -> None:
    """Return a project with features and plan, without runs."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    record = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    record["run"] = {"datasets": ["shapes"], "methods": methods, "seeds": seeds}
    if epochs:
        record["datasets"]["shapes"]["training"]["epochs"] = epochs
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(record, file)
    for words in (("git", "init", "-q", "."), (*DVC, "init", "-q"), (*DVC, "repro", "-q", "extract", "plan")):
        spend(folder, *words)


def results(folder: Path) -> dict[str, bytes]:
    names = {getattr(RunPaths(Path()), name).name for group in OUTPUTS.values() for name in group}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in (folder / "artifacts/shapes").rglob("*")
        if path.name in names
    }


def killed(folder: Path, seconds: float, words: tuple[str, ...]) -> float:
    """Kill a sweep at a random moment; return the moment in seconds."""
    moment = random.SystemRandom().uniform(0.2, 0.8) * seconds
    quiet = subprocess.DEVNULL  # also where it is done before that moment, and reports
    running = subprocess.Popen(words, cwd=folder, env=environment(folder), stdout=quiet, stderr=quiet)
    try:
        running.wait(moment)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()
    return moment


def measure(wanted: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    methods, seeds = grid_of(wanted.runs)
    by_dvc, by_sweep, broken = (scratch / name for name in ("dvc", "sweep", "broken"))
    say("features and plan")
    prepared(by_dvc, methods, seeds, wanted.epochs)
    for other in (by_sweep, broken):
        shutil.copytree(by_dvc, other, symlinks=True)
    words = (*DUPLEX, "sweep", "--json", *(("--jobs", str(wanted.jobs)) if wanted.jobs else ()))
    imports, loading = (float(word) for word in spend(by_dvc, sys.executable, "-c", START).out.split())
    sweep = spend(by_sweep, *words)
    report = json.loads(sweep.out)
    say(f"sweep: {sweep.seconds:.1f} s, {sweep.processor:.1f} s of processor")
    dvc = spend(by_dvc, *DVC, "repro", "train", "evaluate")
    say(f"dvc repro: {dvc.seconds:.1f} s, {dvc.processor:.1f} s of processor")
    whole = results(by_dvc)
    record = {
        "runs": len(methods) * len(seeds),
        "cores": len(os.sched_getaffinity(0)),
        "made": report["made"],
        "handed_to_dvc": report["handed"],
        "files": len(whole),
        "sweep_seconds": sweep.seconds,
        "dvc_seconds": dvc.seconds,
        "times_dvc": dvc.seconds / sweep.seconds,
        "sweep_processor_seconds": sweep.processor,
        "dvc_processor_seconds": dvc.processor,
        "times_dvc_processor": dvc.processor / sweep.processor,
        "import_seconds": imports,  # twice a cell, under `dvc repro`
        "loading_seconds": loading,  # the same
        "equal": results(by_sweep) == whole,
        "stages_run_after": spend(by_sweep, *DVC, "repro", "train", "evaluate").out.count("Running stage"),
    }
    if not wanted.no_kill:
        record["killed_after_seconds"] = killed(broken, sweep.seconds, words)
        record["there_when_started_again"] = json.loads(spend(broken, *words).out)["there"]
        record["equal_after_kill"] = results(broken) == whole
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--runs", type=int, default=40, help="number of runs: at most 8, or a multiple of 8")
    parser.add_argument("--epochs", type=int, help="epochs per run; default: params.yaml's")
    parser.add_argument("--jobs", type=int, help="worker processes of the sweep")
    parser.add_argument("--no-kill", action="store_true", help="skip the sweep that is killed")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="duplex-grid-") as folder:
        record = measure(wanted, Path(folder))
    say("  ".join(f"{key} {value:.4g}" for key, value in record.items()))
    if wanted.json:
        emit(record)


if __name__ == "__main__":
    main()
