"""Write an HTML page on a data set: its best run's answers, and accuracy by number of training images."""

from __future__ import annotations

from pathlib import Path

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.library.inputs import InputRequest, load_inputs
from duplex.recognition.listed_answers import listed_answers
from duplex.report.own_page import OwnData, write_page
from duplex.stages.featured_run import load_featured_run
from duplex.stages.trained_runs import best_run
from duplex.training.checkpoint import read_record


def run(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> Path:
    """Write the HTML page of a data set to `artifacts/pages`, and return its path.

    The page shows the answers of the run with the best validation AUC, with the labelled pairs as candidates. Raises
    `UsageError` without a trained run that matches params.yaml.
    """
    entry = params.dataset(dataset)
    hint = f"train one with `duplex train --dataset {dataset} --method METHOD`"
    chosen = best_run("closed", paths, dataset=dataset, hint=hint, params=params).files
    method, seed = chosen.root.parent.name, int(chosen.root.name)
    record, trained = read_record(chosen.checkpoint), load_featured_run(params, dataset, method, seed, paths)
    inputs = trained.inputs
    answers = listed_answers(trained.method, inputs.examples["test"], inputs.labels, record.confidence, "closed")
    frozen = load_inputs(params.model_copy(update={"device": "cpu"}), dataset, paths, InputRequest())
    facts = [("encoder", entry.encoder.name), ("run", f"{method}, seed {seed}")]
    own = OwnData(dataset, inputs.labels, inputs.manifest, trained.root, answers, frozen.examples, facts=facts)
    return write_page(own, paths.page(dataset))
