"""`duplex.evaluate`: compute the metrics of a trained method on the validation or test split of a data set."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from duplex.encoders import resolve_device
from duplex.errors import DuplexError, UsageError, require, require_type
from duplex.labels import WORLDS, World
from duplex.library.dataset import Dataset
from duplex.library.fit import deterministic, require_both_groups
from duplex.library.inputs import InputRequest
from duplex.library.result import Result
from duplex.library.run_evaluation import calibration_for, evaluate_world
from duplex.library.run_training import Run
from duplex.methods.registry import find_method
from duplex.system.threads import threads
from duplex.training.checkpoint import check_inputs


def evaluate(run: Run, data: Dataset, *, world: World = "closed", split: str = "test") -> Result:
    """Return the metrics of a trained method, with 95 % intervals, as the DVC pipeline computes them.

    run: the trained method, as `fit` returns it.
    data: the data set of training, or another with the same labels and encoder.
    world: closed (the candidates are the seen pairs and those of the split) or open (all pairs, except unseen ones
        below the feasibility threshold that validation chose).
    split: test or val.
    """
    require_type(run, Run, "run")
    require_type(data, Dataset, "data")
    require(world, WORLDS, "world")
    require(split, ("val", "test"), "split")
    record, training = run.record, run.training
    calibration = calibration_for(record, world, f"the run {run.name}")
    needs = find_method(record.kind).needs(record.options)
    with deterministic(), threads(training.threads):
        inputs = data.inputs(InputRequest(needs, training.precision, record.finetune, training.memory))
        try:
            check_inputs(f"the run {run.name}", record, inputs.labels, inputs.encoder)
        except DuplexError as error:
            raise UsageError(str(error)) from None
        trained_on, here = record.training.get("manifest"), inputs.identity.get("manifest")
        if trained_on is not None and here != trained_on:
            print(
                f"the run {run.name} was trained with another table or split of images than {data.name} has; its "
                "numbers are too high if it was trained on some of these images",
                file=sys.stderr,
            )
        require_both_groups(inputs, split, data.name)
        device = torch.device(resolve_device(data.device))
        on_device = replace(inputs, examples={**inputs.examples, split: inputs.examples[split].to(device)})
        method = run.method.to(device).eval()
        outcome = evaluate_world(method, on_device, data.evaluation, world, calibration, split)
    name = f"{run.name} seed {record.seed}"
    return Result(name, data.name, world, split, outcome.metrics, outcome.predictions, outcome.margins)
