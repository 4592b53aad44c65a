"""A trained run with its test images, for retrieval, swapping and maps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.features.encoding import OutputSpec
from duplex.methods.base import Method
from duplex.methods.registry import find_method
from duplex.report.prototype_retrieval import RetrievalContext
from duplex.report.thumbnails import thumbnails_under
from duplex.library.inputs import InputRequest, RunInputs, load_inputs
from duplex.stages.train import start_method
from duplex.training.checkpoint import load_checkpoint, read_record


@dataclass(frozen=True)
class FeaturedRun:
    """A trained method and the data that it was evaluated on."""

    method: Method[Any]
    inputs: RunInputs
    root: Path  # folder of the images

    def retrieval_context(self) -> RetrievalContext:
        """Return the method and test images in the form that retrieval needs."""
        test = self.inputs.examples["test"]
        images = self.inputs.manifest["image"].to_numpy()[test.rows].tolist()
        return RetrievalContext(
            self.method.inspectable(), self.inputs.labels, test, images, thumbnails_under(self.root)
        )

    @property
    def output_spec(self) -> OutputSpec:
        """The encoder outputs that the method reads besides the CLS feature."""
        inputs, identity = self.inputs.examples["test"].inputs, self.inputs.encoder
        return OutputSpec(
            "patch" in inputs,
            int(identity["block_inputs"]) if "block_inputs" in inputs else 0,
            int(identity.get("bits", 16)),
        )

    def at_start(self, kind: str, seed: int) -> Method[Any]:
        """Return the method as it was before training."""
        fresh = start_method(kind, self.method.options, self.method.task, self.inputs, seed, torch.device("cpu"))
        return fresh.eval()


def load_featured_run(params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths) -> FeaturedRun:
    """Load a run's checkpoint and test images on the CPU."""
    path = paths.run(dataset, method, seed).checkpoint
    record = read_record(path)
    needs, settings = find_method(record.kind).needs(record.options), params.training(dataset, method)
    on_cpu = params.model_copy(update={"device": "cpu"})
    inputs = load_inputs(
        on_cpu, dataset, paths, InputRequest(needs, settings.precision, record.finetune, settings.memory)
    )
    trained = load_checkpoint(path, inputs.task(), inputs.encoder)
    return FeaturedRun(trained, inputs, params.dataset(dataset).source.root)
