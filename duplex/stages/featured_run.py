"""Load a trained run with its test images, for searches of nearest images and for the report's t-SNE maps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.errors import DuplexError
from duplex.library.inputs import InputRequest, RunInputs, load_inputs
from duplex.methods.base import Method
from duplex.methods.registry import find_method
from duplex.report.images import RetrievalContext, thumbnails_under
from duplex.stages.outdated_runs import require_current_run
from duplex.training.checkpoint import check_inputs, load_checkpoint, read_checkpoint


@dataclass(frozen=True)
class FeaturedRun:
    """A trained method with the labels, features and images that it was evaluated on."""

    method: Method[Any]
    inputs: RunInputs
    root: Path  # folder of the images

    def retrieval_context(self) -> RetrievalContext:
        """Return the method and test images as a `RetrievalContext`, the argument of nearest-image searches."""
        test = self.inputs.examples["test"]
        images = self.inputs.manifest["image"].to_numpy()[test.rows].tolist()
        thumbnails = thumbnails_under(self.root)
        return RetrievalContext(self.method.inspectable(), self.inputs.labels, test, images, thumbnails)


def load_featured_run(
    params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths, *, current: bool = False
) -> FeaturedRun:
    """Load a run's trained method and its test images with labels and features, on the CPU.

    Raises `DuplexError` if the run was trained on other labels or features; the message names the command to train it.

    current: raise `DuplexError` also if the run was trained with other settings than those of params.yaml.
    """
    path = paths.run(dataset, method, seed).checkpoint
    checkpoint = read_checkpoint(path)
    if current:
        require_current_run(checkpoint, params, dataset, method, seed, paths)
    record = checkpoint.record
    needs = find_method(record.kind).needs(record.options)
    settings = params.training(dataset, method)
    request = InputRequest(needs, settings.precision, record.finetune, settings.memory)
    inputs = load_inputs(params.model_copy(update={"device": "cpu"}), dataset, paths, request)
    try:
        check_inputs(path, record, inputs.labels, inputs.encoder)
    except DuplexError as error:
        command = f"duplex train --dataset {dataset} --method {method} --seed {seed}"
        raise DuplexError(f"{error} (`{command}`)") from error
    trained = load_checkpoint(checkpoint, inputs.context(), inputs.encoder)  # refuses a file replaced since
    return FeaturedRun(trained, inputs, params.dataset(dataset).source.root)
