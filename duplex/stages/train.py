"""Train one method on one data set with one seed: write the checkpoint of its best epoch and the training history."""

from __future__ import annotations

import torch

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.config.run_key import run_records
from duplex.encoders import resolve_device
from duplex.library.inputs import LoadInputs, RunInputs, load_inputs, make_deterministic
from duplex.library.run_training import MethodSpec, train_method
from duplex.methods.registry import report_exits
from duplex.system.files import json_digest
from duplex.system.lock import sole_writer
from duplex.system.threads import threads
from duplex.training.checkpoint import WORD_VECTORS
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
    """Train one run, choose the best epoch by validation AUC, calibrate on validation data, and save.

    Interrupted training continues after its last whole epoch. `out`: where to write, by default the run's own folder.
    """
    out = out or paths.run(dataset, method, seed)
    make_deterministic()
    spec = MethodSpec.of(params, dataset, method)
    device = torch.device(resolve_device(params.device))
    with threads(spec.training.threads), report_exits(spec.kind):
        inputs = load(params, dataset, paths, spec.request)
        with sole_writer(out.checkpoint, "training"):
            key = _resume_key(params, dataset, method, seed, inputs, device)
            resume = ResumePoint(f"{dataset} {method} seed {seed}", out.unfinished_training, key)
            trained = train_method(spec, inputs, seed, device, params.evaluation, resume)
            trained.save(out.root)
            out.unfinished_training.unlink(missing_ok=True)
            return trained.result


def _resume_key(params: Params, dataset: str, method: str, seed: int, inputs: RunInputs, device: torch.device) -> str:
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
    }
    return json_digest(key)
