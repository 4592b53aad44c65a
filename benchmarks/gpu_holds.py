"""Checks of `benchmarks.gpu`: the device tests, the results of a CPU, the same bytes for the same seed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_times import Look
from benchmarks.measure import say
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.features.file import ENCODED, PartialCache, Span, read_features
from duplex.features.tokens import DiskTokens
from duplex.methods.base import Batch
from duplex.project.run import ProjectRun
from duplex.project.train import train_stage
from duplex.training.loop import prefetch
from tests.projects import inside, make_project
from tests.subprocesses import ENVIRONMENT, ROOT

TESTS = ("tests/test_life_cycle.py", "tests/system/test_precision.py", "tests/encoders/test_clip_text.py")
METHODS = ("clip", "csp", "duplex", "duplex_paper", "closed_form")
REPEATED = ("duplex", "augmented", "augmented_bf16")  # trained again, and killed: from features, blocks from pixels
DUPLEX = (sys.executable, "-c", "from duplex.cli import main; main()")
FAR_FEATURES, FAR_AUC = 1e-3, 3.0  # largest difference of a feature of length one; of an AUC, in points


def holds(look: Look, folder: Path) -> dict[str, dict[str, Any]]:
    """The results of all checks, and the numbers beside them."""
    held: dict[str, bool] = {"the device tests pass": tests_pass(look)}
    methods = METHODS[1:3] if look.quick else METHODS
    epochs = 3 if look.quick else 8
    say("a small project on both devices")
    here = folder / "here"
    here.mkdir()
    make_project(here, [0], methods, "cpu", epochs, with_pixels)
    there = folder / "there"
    there.mkdir()
    params = make_project(there, [0], methods, look.device, epochs, with_pixels)
    read = compared(here, there, methods)
    held["features are the CPU's"] = read["largest difference of a feature"] <= FAR_FEATURES
    held["metrics are the CPU's"] = all(read[f"AUC moved, {method}"] <= FAR_AUC for method in methods)
    held["tokens from the disk are the file's"] = streams(look, folder / "tokens.h5")
    for method in REPEATED[:1] if look.quick else REPEATED:
        say(f"{method}: one seed twice, and killed")
        held[f"{method}: one seed twice gives the same bytes"] = twice(there, params, method)
        held[f"{method}: killed and started again gives the same bytes"] = killed(there, params, method)
    return {"held": held, "read": read}


def with_pixels(record: dict[str, Any]) -> None:
    """Keep pixels, from which the paper's configuration and an entry with augmented images train all blocks."""
    record["extraction"]["pixels"] = True
    blocks = {"blocks": "all", "adapter": "bottleneck"}
    record["methods"]["duplex_paper"]["finetune"] = blocks
    augment = ["crop", "flip", "perspective", "rotation"]
    record["methods"]["augmented"] = {"extends": "dual", "finetune": {**blocks, "augment": augment}}
    record["methods"]["augmented_bf16"] = {"extends": "augmented", "training": {"precision": "bf16"}}


def tests_pass(look: Look) -> bool:
    """Run the device tests of the suite; a quick trial runs the last file."""
    chosen = TESTS[-1:] if look.quick else TESTS
    words = (sys.executable, "-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider", *chosen)
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    say(done.stdout[-2000:] if done.returncode else done.stdout.strip().splitlines()[-1])
    return done.returncode == 0


def streams(look: Look, path: Path) -> bool:
    """Check that asynchronous copies to the device have the rows of the file."""
    rows, shape = 512, (16, 64)
    held = np.random.default_rng(0).normal(size=(rows, *shape)).astype(np.float16)
    identity = {key: key for key in ("encoder", "weights", "precision", "preprocessing", "manifest")}
    cache = PartialCache.create(path, {**identity, "dim": "4"}, Span(0, rows, rows), 4, {"patch": shape})
    cache.write(0, np.full(rows, ENCODED, np.uint8), cls=np.ones((rows, 4), np.float16), patch=held)
    cache.finish()
    tokens: Any = DiskTokens.open(path).to(torch.device(look.device))
    images = Batch({"patch": tokens}, torch.arange(rows))
    steps = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).split(32)
    read = [batch.inputs["patch"] for batch, _ in prefetch(images, steps)]
    return all(torch.equal(got.cpu(), torch.from_numpy(held[chosen])) for got, chosen in zip(read, steps, strict=True))


def compared(here: Path, there: Path, methods: tuple[str, ...]) -> dict[str, float]:
    """The differences of features and of the test AUC, in points, between GPU and CPU."""
    ours, theirs = (read_features(place / ArtifactPaths().features("own")).cls for place in (here, there))
    found = {"largest difference of a feature": float(np.abs(ours - theirs).max())}
    for method in methods:
        both = [
            json.loads((place / ArtifactPaths().run("own", method, 0).metrics).read_text()) for place in (here, there)
        ]
        moved = [abs(both[0][world]["auc"] - both[1][world]["auc"]) for world in ("closed", "open") if world in both[0]]
        found[f"AUC moved, {method}"] = max(moved)
    return found


def twice(project: Path, params: Params, method: str) -> bool:
    """Train seed 0 twice and compare the bytes of the checkpoints."""
    runs = [RunPaths(project / f"{method}-{time}") for time in ("first", "again")]
    with inside(project):
        for run in runs:
            train_stage(ProjectRun("own", method, 0, params), out=run)
    return runs[0].checkpoint.read_bytes() == runs[1].checkpoint.read_bytes()


def killed(project: Path, params: Params, method: str) -> bool:
    """Train seed 1 in a process that is killed after an epoch, resume it, and compare with an undisturbed run."""
    whole = RunPaths(project / f"{method}-whole")
    broken = RunPaths(project / ArtifactPaths().run("own", method, 1).root)
    with inside(project):
        train_stage(ProjectRun("own", method, 1, params), out=whole)
    words = (*DUPLEX, "train", "--dataset", "own", "--method", method, "--seed", "1")
    running = subprocess.Popen(words, cwd=project, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while running.poll() is None and not (broken.root / "training.partial").exists():
        time.sleep(0.005)
    running.kill()
    ended = running.wait()
    if ended == 0:
        say("the run was over before it could be killed")
    subprocess.run(words, cwd=project, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    return ended != 0 and broken.checkpoint.read_bytes() == whole.checkpoint.read_bytes()
