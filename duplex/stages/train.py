"""Train one method on one data set with one seed: write the checkpoint of its best epoch and the training history."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from duplex.artifacts import ArtifactPaths, RunPaths, log_folder
from duplex.config.params import Params
from duplex.config.run_key import run_records
from duplex.encoders import resolve_device
from duplex.errors import DuplexError
from duplex.library.chosen_blocks import train_chosen_blocks
from duplex.library.inputs import LoadInputs, RunInputs, load_inputs, make_deterministic
from duplex.library.members import find_members
from duplex.library.recipe_runs import RecipeRuns
from duplex.library.requirements import require_inputs
from duplex.library.run_training import MethodSpec, train_method
from duplex.options import AutoFinetune
from duplex.stages.outdated_runs import outdated_member
from duplex.system.files import json_digest, sole_writer, write_json
from duplex.system.threads import threads
from duplex.training.checkpoint import WORD_VECTORS, read_checkpoint
from duplex.training.hooks import TrainingHooks
from duplex.training.logs import open_log
from duplex.training.loop import ResumePoint, TrainingResult


def run(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths = ArtifactPaths(),
    out: RunPaths | None = None,
    load: LoadInputs = load_inputs,
) -> TrainingResult:
    """Train a method on a data set with a seed, save the epoch with the best validation AUC, return history and timing.

    Bias and feasibility threshold are calibrated on validation data. Interrupted training continues after its last
    whole epoch.

    out: paths to write to, by default the run's own folder.
    load: function that loads features and labels, by default from disk.
    """
    out = out or paths.run(dataset, method, seed)
    require_inputs(params, dataset, method)
    make_deterministic()
    spec = MethodSpec.of(params, dataset, method)
    device = torch.device(resolve_device(params.device))
    with threads(spec.training.threads):
        spec, members = find_members(spec, dataset, seed, params.run.seeds, paths)
        if difference := outdated_member(spec.options, params, dataset, paths):
            raise DuplexError(
                f"{method} cannot combine its runs: {difference}; train that run again, or run `dvc repro`"
            )
        inputs = members.add_to(load(params, dataset, paths, spec.request))
        with sole_writer(out.checkpoint, "training"):
            key = _resume_key(params, dataset, method, seed, inputs, device, members.fingerprints)
            resume = ResumePoint(f"{dataset} {method} seed {seed}", out.unfinished_training, key)
            log = open_log(spec.training.log, log_folder(spec.training.log, dataset, method, seed))
            auto, work = params.finetune(method, dataset), out.root / "recipes.partial"
            if isinstance(auto, AutoFinetune):
                read = partial(load_inputs, params, dataset, paths)  # of each recipe, not kept in memory
                runs = RecipeRuns(work, read, seed, device, params.evaluation, resume.label, resume.key)
                trained = train_chosen_blocks(spec, auto, runs, partial(print, file=sys.stderr))
            else:
                hooks = TrainingHooks(log=log)
                trained = train_method(spec, inputs, seed, device, params.evaluation, resume, hooks)
            if members.headers:
                training = {**trained.record.training, "members": members.fingerprints}
                trained = replace(trained, record=replace(trained.record, training=training))
            trained.write(out)
            out.unfinished_training.unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            if out.root == paths.run(dataset, method, seed).root and not members.headers:
                fingerprint = read_checkpoint(out.checkpoint).fingerprint
                write_json(paths.trained(dataset, method, seed), {"checkpoint": fingerprint})
            return trained.result


def _resume_key(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    inputs: RunInputs,
    device: torch.device,
    members: Sequence[str],
) -> str:
    """Return the digest of everything that training depends on; saved training resumes only if its digest is equal."""
    is_gpu = device.type == "cuda"
    key = {
        **run_records(params, dataset, method)["train"],
        "seed": seed,
        "inputs": inputs.identity,
        "words": inputs.encoder.get(WORD_VECTORS),
        "labels": inputs.labels.to_dict(),
        "device": torch.cuda.get_device_name(device) if is_gpu else torch.get_num_threads(),  # decide the last bits
        "torch": torch.__version__,
        **({"members": list(members)} if members else {}),
    }
    return json_digest(key)
