"""The pipeline's stage `train`: one method on one data set with one seed, from params.yaml to a checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from duplex.artifacts import ArtifactPaths, RunPaths, log_folder
from duplex.config.params import Params
from duplex.encoders.base import resolve_device
from duplex.errors import UsageError
from duplex.methods.registry import find_method
from duplex.options import AutoFinetune, CombinedRunsOptions
from duplex.project import stamps
from duplex.system.files import json_digest, sole_writer, write_json
from duplex.training.checkpoint import load_members, read_checkpoint_header
from duplex.training.inputs import LoadInputs, load_inputs, require_configured_inputs
from duplex.training.logs import TrainingHooks, open_log
from duplex.training.loop import ResumePoint, TrainingResult
from duplex.training.run import MethodSpec, reproducible, train_run


def train_stage(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths = ArtifactPaths(),
    out: RunPaths | None = None,
    load: LoadInputs = load_inputs,
) -> TrainingResult:
    """Train a method on a data set with a seed, as params.yaml says; writes the best epoch to `out`.

    By default, `out` is the run's own folder. Interrupted training continues after its last whole epoch.
    """
    out = out or paths.run(dataset, method, seed)
    stamps.require_data(params, dataset, paths)
    require_configured_inputs(params, dataset, method)
    spec = MethodSpec.of(params, dataset, method)
    device = torch.device(resolve_device(params.device))
    with reproducible(spec.training.threads):
        spec = with_member_paths(spec, params, dataset, seed, paths, out.root)
        inputs = load(params, dataset, paths, spec.request)
        if isinstance(spec.options, CombinedRunsOptions):
            inputs = replace(inputs, members=load_members(spec.options, out.root, inputs.context(), inputs.encoder))
        with sole_writer(out.checkpoint, "training"):
            stamp = stamps.stamp(params, dataset, "train", paths, method, seed)
            is_gpu = device.type == "cuda"
            machine = torch.cuda.get_device_name(device) if is_gpu else torch.get_num_threads()  # decides the last bits
            key = json_digest({**stamp, "machine": machine, "torch": torch.__version__})
            resume = ResumePoint(f"{dataset} {method} seed {seed}", out.unfinished_training, key)
            auto, work = params.finetune(method, dataset), out.root / "recipes.partial"
            place = log_folder(spec.training.log, dataset, method, seed)
            if isinstance(auto, AutoFinetune):
                from duplex.training.recipes import search_block_counts
                from duplex.training.trials import Trial, Trials

                def hooks(trial: Trial) -> TrainingHooks:
                    return TrainingHooks(log=open_log(spec.training.log, place / trial.slug))

                read = partial(load_inputs, params, dataset, paths)  # of each recipe, not kept in memory
                trials = Trials(work / key[:12], read, device, params.evaluation, resume.label, resume.key, hooks=hooks)
                run = search_block_counts(spec, auto, seed, trials, partial(print, file=sys.stderr))
            else:
                log = open_log(spec.training.log, place)
                run = train_run(spec, inputs, seed, device, params.evaluation, resume, TrainingHooks(log=log))
            run.write(out)
            stamps.write(out.stamp("train"), stamp, [out.checkpoint, out.history])
            out.unfinished_training.unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            if out.root == paths.run(dataset, method, seed).root and not inputs.members:
                fingerprint = read_checkpoint_header(out.checkpoint).fingerprint
                write_json(paths.trained(dataset, method, seed), {"checkpoint": fingerprint})
        return run.result


def with_member_paths(
    spec: MethodSpec, params: Params, dataset: str, seed: int, paths: ArtifactPaths, folder: Path
) -> MethodSpec:
    """A product's `spec` with the finished runs to combine, by paths relative to its `folder`; others unchanged."""
    options = spec.options
    if not isinstance(options, CombinedRunsOptions):
        return spec
    if spec.finetune is not None:
        raise UsageError(f"the method {spec.name!r} trains nothing, so it has nothing to fine-tune; remove `finetune`")
    members = []
    finetunes = []
    numbers = params.run.seeds if options.seeds == "all" else (seed,)
    for method, number in itertools.product(options.of, numbers):
        checkpoint = read_checkpoint_header(paths.run(dataset, method, number).checkpoint)
        if method in params.methods:
            stamps.require_current_run(params, dataset, method, number, paths)
        record = checkpoint.record
        if record.world == spec.trained_for and not set(spec.worlds) <= set(record.calibration or {}):
            raise UsageError(f"{checkpoint.path} is for one world only; set `world` of {spec.name} to {record.world}")
        if record.world != spec.trained_for:
            raise UsageError(
                f"{checkpoint.path} is for the {record.world} world, but {spec.name} for the {spec.trained_for} world; "
                f"set `world` of {spec.name} to {record.world}, or combine only runs for the {spec.trained_for} world"
            )
        finetunes += [] if record.finetune is None else [record.finetune]
        members.append(
            {
                "method": method,
                "seed": number,
                "checkpoint": os.path.relpath(checkpoint.path, folder),
                "fingerprint": checkpoint.fingerprint,
                "needs": sorted(find_method(record.kind).needs(record.options)),
                "finetuned": record.finetune is not None,
                "temperature": record.confidence.temperature,
            }
        )
    largest = max(finetunes, key=lambda finetune: finetune.depth, default=None)  # its block inputs serve all members
    return replace(spec, options=replace(options, members=tuple(members)), finetune=largest)
