"""Small projects with drawn images, whose pipeline has run, for tests of what it writes."""

import atexit
import contextlib
import fcntl
import functools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data.shapes import render_images, shapes_manifest
from duplex.project.evaluate import evaluate_stage
from duplex.project.extract import extract
from duplex.project.prepare import prepare
from duplex.project.run import LastDatasetLoader, ProjectData, ProjectRun
from duplex.project.train import train_stage
from duplex.training import loop
from tests.subprocesses import ROOT, start_duplex

SHIPPED = ROOT / "params.yaml"
METHODS = ("clip", "duplex", "duplex_open")
inside = contextlib.chdir  # a context manager


@contextlib.contextmanager
def edited_params(source: Path, target: Path | None = None) -> Iterator[dict[str, Any]]:
    """Let a block change the content of params.yaml; write it back, or to `target`."""
    record = YAML(typ="safe").load(source.read_text())
    yield record
    with (target or source).open("w") as file:
        YAML().dump(record, file)


def with_evaluation(params: Params, **values: object) -> Params:
    return params.model_copy(update={"evaluation": params.evaluation.model_copy(update=values)})


@functools.cache
def _drawn(scale: float) -> Path:
    """A folder with the images of `shapes_manifest(scale=scale)`, drawn once in this process."""
    folder = Path(tempfile.mkdtemp(prefix="duplex-drawn-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    render_images(shapes_manifest(scale=scale), folder)
    return folder


def draw_table(folder: Path, scale: float) -> dict[str, Any]:
    """Write images to `pictures` and a table of them to `pictures.csv`; return arguments of `duplex.load_dataset`."""
    shutil.copytree(_drawn(scale), folder / "pictures")
    shapes_manifest(scale=scale).to_csv(folder / "pictures.csv", index=False)
    return {"source": folder / "pictures.csv", "images": folder / "pictures", "cache": folder / "cache"}


def draw_project(
    folder: Path,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0,),
    *,
    scale: float = 0.06,
    device: str = "cpu",
    changes: Callable[[dict[str, Any]], None] = lambda record: None,
    **training: object,
) -> None:
    """Write images, their table, and a params.yaml with them as the data set `own`, with absolute paths.

    `changes`: called with the content of params.yaml. `training`: training options of `own`; by default with one
    thread, because the last digits of results depend on the number of threads, which `auto` chooses by timing.
    """
    draw_table(folder, scale)
    with edited_params(SHIPPED, folder / "params.yaml") as record:
        record["run"] = {"datasets": ["own"], "methods": list(methods), "products": [], "seeds": list(seeds)}
        record["device"], record["evaluation"]["bootstrap"] = device, 20
        record["extraction"]["num_workers"] = 0
        record["datasets"]["own"] = {
            "source": {"kind": "table", "root": str(folder / "pictures"), "table": str(folder / "pictures.csv")},
            "encoder": {"name": "tiny"},
            "training": {"learning_rate": 0.001, "batch_size": 64, "epochs": 2, "threads": 1, **training},
        }
        changes(record)


def encoded_project(folder: Path, *arguments: Any, **options: Any) -> tuple[Params, ArtifactPaths]:
    """Draw a project and encode its images."""
    draw_project(folder, *arguments, **options)
    params, paths = load_params(folder / "params.yaml"), ArtifactPaths(folder / "artifacts")
    prepare(ProjectData(params, "own", paths))
    extract(ProjectData(params, "own", paths))
    return params, paths


def make_project(
    folder: Path,
    seeds: Sequence[int],
    methods: Sequence[str] = METHODS,
    device: str = "cpu",
    epochs: int = 2,
    changes: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Params:
    """Train and evaluate `methods` on the data set `own`; return the params."""

    def beside(record: dict[str, Any]) -> None:
        """Use paths relative to the folder in which the stages run."""
        record["datasets"]["own"]["source"] |= {"root": "pictures", "table": "pictures.csv"}
        changes(record)

    draw_project(folder, methods, seeds, device=device, epochs=epochs, changes=beside)
    with inside(folder):
        params, paths, load = load_params(), ArtifactPaths(), LastDatasetLoader()
        prepare(ProjectData(params, "own", paths))
        extract(ProjectData(params, "own", paths))
        for method in methods:
            for seed in seeds:
                train_stage(ProjectRun("own", method, seed, params, paths), load=load)
                evaluate_stage(ProjectRun("own", method, seed, params, paths), load=load)
    return params


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """A folder of this worker with what `build(folder)` writes; the first worker builds it, the others copy it."""
    own = factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"built-{name}"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            made = factory.mktemp(name)
            build(made)
            shutil.copytree(made, shared)
    return Path(shutil.copytree(shared, factory.mktemp(f"{name}-copy"), dirs_exist_ok=True))


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Raise KeyboardInterrupt at the start of the epoch `number` from now, once; return the list of started epochs."""
    epoch, begun = loop.train_epoch, list[int]()

    def counted(*given: Any) -> Any:
        begun.append(len(begun) + 1)
        if len(begun) == number:
            raise KeyboardInterrupt
        return epoch(*given)

    monkeypatch.setattr(loop, "train_epoch", counted)
    return begun


def kill_and_resume_training(project: Any, method: str, kills: int = 1) -> None:
    """Train once whole, and once killed after each time that an epoch is saved: both have the same bytes."""
    run, command = project.paths.run("own", method, 7), ["train", "--dataset", "own", "--method", method, "--seed", "7"]
    files, partial = (run.checkpoint, run.history), run.root / "training.partial"
    assert start_duplex(*command, cwd=project.folder).wait() == 0
    whole = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    moment = random.Random(0)
    for place in range(kills):
        before, process = saved(partial), start_duplex(*command, cwd=project.folder)
        while saved(partial) == before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(moment.uniform(0, 0.3) if place else 0)
        process.kill()
        process.wait()
        assert partial.exists() and not run.checkpoint.exists()
    assert "continuing after epoch" in start_duplex(*command, cwd=project.folder).communicate()[1]
    assert [path.read_bytes() for path in files] == whole


def saved(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
