"""The stage `train`: one method on one data set with one seed, params.yaml to checkpoint."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from duplex.artifacts import RunPaths, log_folder
from duplex.encoders.base import resolve_device
from duplex.errors import UsageError
from duplex.methods.registry import find_method
from duplex.methods.team import ALONE, Team
from duplex.options import AutoFinetune, CombinedRunsOptions
from duplex.project.run import LoadInputs, ProjectRun, load_inputs, reader
from duplex.system.files import json_digest, sole_writer, write_json
from duplex.training.checkpoint import load_members, read_checkpoint_header
from duplex.training.devices import in_team
from duplex.training.inputs import require_configured_inputs
from duplex.training.logs import TrainingHooks, open_log
from duplex.training.loop import ResumePoint, TrainingResult
from duplex.training.run import MethodSpec, TrainedMethod, reproducible, train_run, trained_method


def train_stage(run: ProjectRun, out: RunPaths | None = None, load: LoadInputs = load_inputs) -> TrainingResult:
    """Train a run, after its last whole epoch if it was interrupted, and write its best epoch."""
    out = out or run.files
    run.data.require()
    require_configured_inputs(run.params, run.dataset, run.method)
    devices = run.spec.training.devices
    if devices == 1:
        return _train(run, out, load)
    if isinstance(run.params.finetune(run.method, run.dataset), AutoFinetune) or run.entry.members:
        done = "finished runs are combined" if run.entry.members else "finetune: auto tries recipes"
        raise UsageError(f"training.devices is {devices}, but {done} in one process; set it to 1 for {run.method}")
    with sole_writer(out.checkpoint, "training"):
        return in_team(partial(_train_in_team, run, out), devices, resolve_device(run.params.device))


def _train_in_team(run: ProjectRun, out: RunPaths, team: Team) -> TrainingResult:
    return _train(run, out, load_inputs, team)


def _train(run: ProjectRun, out: RunPaths, load: LoadInputs, team: Team = ALONE) -> TrainingResult:
    device = torch.device(resolve_device(run.params.device))
    with reproducible(run.spec.training.threads):
        spec = with_members(run, out.root)
        inputs = load(run.data, spec.request)
        if isinstance(spec.options, CombinedRunsOptions):
            inputs = replace(inputs, members=load_members(spec.options, out.root, inputs.context(), inputs.encoder))
        with sole_writer(out.checkpoint, "training") if team == ALONE else nullcontext():  # its parent holds the lock
            stamp = run.stamp("train", inputs.read)
            is_gpu = device.type == "cuda"
            machine = torch.cuda.get_device_name(device) if is_gpu else torch.get_num_threads()  # decides the last bits
            key = json_digest({**stamp, "machine": machine, "torch": torch.__version__})
            resume = ResumePoint(f"{run.dataset} {run.method} seed {run.seed}", out.unfinished_training, key)
            work = out.root / "recipes.partial"
            if team.rank:  # the first process does the rest
                return trained_method(spec, inputs, run.seed, device, resume, team=team)[1]
            auto = run.params.finetune(run.method, run.dataset)
            if isinstance(auto, AutoFinetune):
                trained = _search(run, spec, auto, inputs.read, resume, work, device)
            else:
                log = open_log(spec.training.log, _log_folder(run))
                hooks = TrainingHooks(log=log)
                trained = train_run(spec, inputs, run.seed, device, run.params.evaluation, resume, hooks, team=team)
            trained.write(out)
            run.write_stamp("train", stamp, [out.checkpoint, out.history])
            out.unfinished_training.unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            if out.root == run.files.root and not inputs.members:
                fingerprint = read_checkpoint_header(out.checkpoint).fingerprint
                write_json(run.paths.trained(run.dataset, run.method, run.seed), {"checkpoint": fingerprint})
        return trained.result


def _search(
    run: ProjectRun,
    spec: MethodSpec,
    auto: AutoFinetune,
    read: Mapping[str, str | None],
    resume: ResumePoint,
    work: Path,
    device: torch.device,
) -> TrainedMethod:
    from duplex.training.recipes import search_block_counts
    from duplex.training.trials import Trial, Trials

    def hooks(trial: Trial) -> TrainingHooks:
        return TrainingHooks(log=open_log(spec.training.log, _log_folder(run) / trial.slug))

    inputs_of = reader(run.data, read)  # of each recipe, not kept in memory
    folder = work / resume.key[:12]
    trials = Trials(folder, inputs_of, device, run.params.evaluation, resume.label, resume.key, hooks=hooks)
    return search_block_counts(spec, auto, run.seed, trials, partial(print, file=sys.stderr))


def _log_folder(run: ProjectRun) -> Path:
    return log_folder(run.spec.training.log, run.dataset, run.method, run.seed)


def with_members(run: ProjectRun, folder: Path) -> MethodSpec:
    """The run's spec; for a product, with finished runs, by paths relative to `folder`."""
    spec = run.spec
    options = spec.options
    if not isinstance(options, CombinedRunsOptions):
        return spec
    if spec.finetune is not None:
        raise UsageError(f"the method {spec.name!r} trains nothing, so it has nothing to fine-tune; remove `finetune`")
    members = []
    finetunes = []
    for member in run.combined.values():
        checkpoint = read_checkpoint_header(member.files.checkpoint)
        if member.method in run.params.methods:
            member.require_current()
        record = checkpoint.record
        if record.world == spec.trained_for and not set(spec.worlds) <= set(record.calibration or {}):
            raise UsageError(f"{checkpoint.path} is for one world only; set `world` of {spec.name} to {record.world}")
        if record.world != spec.trained_for:
            raise UsageError(
                f"{checkpoint.path} is for the {record.world} world, but {spec.name} for the "
                f"{spec.trained_for} world; set `world` of {spec.name} to {record.world}, or "
                f"combine only runs for the {spec.trained_for} world"
            )
        if record.finetune is not None:
            finetunes.append(record.finetune)
        members.append(
            {
                "method": member.method,
                "seed": member.seed,
                "checkpoint": os.path.relpath(checkpoint.path, folder),
                "fingerprint": checkpoint.fingerprint,
                "needs": sorted(find_method(record.kind).needs(record.options)),
                "finetuned": record.finetune is not None,
                "temperature": record.confidence.temperature,
            }
        )
    largest = max(finetunes, key=lambda finetune: finetune.depth, default=None)  # its block inputs serve all members
    return replace(spec, options=replace(options, members=tuple(members)), finetune=largest)
