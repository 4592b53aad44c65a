"""The pipeline's stage `train`: one method on one data set with one seed, from params.yaml to a checkpoint.

It writes the checkpoint of the best epoch and the training history. Whatever else it needs is in `duplex.training`.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from functools import partial

import torch

from duplex.artifacts import ArtifactPaths, RunPaths, log_folder
from duplex.config.params import Params
from duplex.encoders.base import resolve_device
from duplex.errors import DuplexError
from duplex.options import AutoFinetune
from duplex.project.stamps import outdated_member, run_records
from duplex.system.files import json_digest, sole_writer, write_json
from duplex.training.checkpoint import WORD_VECTORS, read_checkpoint
from duplex.training.inputs import LoadInputs, RunInputs, load_inputs, require_inputs
from duplex.training.logs import TrainingHooks, open_log
from duplex.training.loop import ResumePoint, TrainingResult
from duplex.training.members import Members, find_members
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
    """Train a method on a data set with a seed and save its best epoch by validation AUC, as params.yaml says.

    Bias and feasibility threshold are calibrated on validation images. Interrupted training continues after its last
    whole epoch.

    Args:
        out: paths to write to, by default the run's own folder.
        load: function that loads features and labels, by default from disk.
    """
    out = out or paths.run(dataset, method, seed)
    require_inputs(params, dataset, method)
    spec = MethodSpec.of(params, dataset, method)
    device = torch.device(resolve_device(params.device))
    with reproducible(spec.training.threads):
        spec, members = find_members(spec, dataset, seed, params.run.seeds, paths)
        if difference := outdated_member(spec.options, params, dataset, paths):
            raise DuplexError(
                f"{method} cannot combine its runs: {difference}; train that run again, or run `dvc repro`"
            )
        inputs = members.add_to(load(params, dataset, paths, spec.request))
        with sole_writer(out.checkpoint, "training"):
            key = _resume_key(params, dataset, method, seed, inputs, device, members)
            resume = ResumePoint(f"{dataset} {method} seed {seed}", out.unfinished_training, key)
            auto, work = params.finetune(method, dataset), out.root / "recipes.partial"
            if isinstance(auto, AutoFinetune):
                from duplex.training.recipes import train_chosen_blocks
                from duplex.training.trials import Trials

                read = partial(load_inputs, params, dataset, paths)  # of each recipe, not kept in memory
                trials = Trials(work, read, device, params.evaluation, resume.label, resume.key)
                run = train_chosen_blocks(spec, auto, seed, trials, partial(print, file=sys.stderr))
            else:
                log = open_log(spec.training.log, log_folder(spec.training.log, dataset, method, seed))
                run = train_run(spec, inputs, seed, device, params.evaluation, resume, TrainingHooks(log=log))
            if members.headers:
                training = {**run.record.training, "members": members.fingerprints}
                run = replace(run, record=replace(run.record, training=training))
            run.write(out)
            out.unfinished_training.unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            if out.root == paths.run(dataset, method, seed).root and not members.headers:
                fingerprint = read_checkpoint(out.checkpoint).fingerprint
                write_json(paths.trained(dataset, method, seed), {"checkpoint": fingerprint})
        return run.result


def _resume_key(
    params: Params, dataset: str, method: str, seed: int, inputs: RunInputs, device: torch.device, members: Members
) -> str:
    """Digest of everything that training depends on; saved training resumes only if its digest is equal."""
    is_gpu = device.type == "cuda"
    key = {
        **run_records(params, dataset, method)["train"],
        "seed": seed,
        "inputs": inputs.identity,
        "words": inputs.encoder.get(WORD_VECTORS),
        "labels": inputs.labels.to_dict(),
        "device": torch.cuda.get_device_name(device) if is_gpu else torch.get_num_threads(),  # decide the last bits
        "torch": torch.__version__,
        **({"members": members.fingerprints} if members.headers else {}),
    }
    return json_digest(key)
