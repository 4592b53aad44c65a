"""A trained run with its test images at hand: what retrieval, swapping and the maps look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.features.encoding import Kept
from duplex.methods.base import Method
from duplex.methods.registry import find
from duplex.report.qualitative import look_under
from duplex.report.retrieved import Viewing
from duplex.stages.inputs import Inputs, load_inputs
from duplex.stages.train import begin
from duplex.training.checkpoint import load_checkpoint, read_record


@dataclass(frozen=True)
class ShownRun:
    method: Method[Any]
    inputs: Inputs
    root: Path  # of the pictures

    def viewing(self) -> Viewing:
        test = self.inputs.examples["test"]
        images = self.inputs.manifest["image"].to_numpy()[test.rows].tolist()
        return Viewing(self.method.exhibits(), self.inputs.labels, test, images, look_under(self.root))

    @property
    def kept(self) -> Kept:
        """What of a picture the method reads beside its CLS feature."""
        read, made = self.inputs.examples["test"].inputs, self.inputs.encoder
        return Kept("patch" in read, int(made["depth"]) if "deep" in read else 0, int(made.get("bits", 16)))

    def at_start(self, kind: str, seed: int) -> Method[Any]:
        """The method as training found it."""
        fresh = begin(kind, self.method.options, self.method.setting, self.inputs, seed, torch.device("cpu"))
        return fresh.eval()


def load_shown(params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths) -> ShownRun:
    """On the CPU: one pass over a few thousand features."""
    path = paths.run(dataset, method, seed).checkpoint
    record = read_record(path)
    needs, settings = find(record.kind).needs(record.options), params.training(dataset, method)
    asked = params.model_copy(update={"device": "cpu"})
    inputs = load_inputs(asked, dataset, paths, needs, settings.precision, record.tail, settings.memory)
    trained = load_checkpoint(path, inputs.setting(), inputs.encoder)
    return ShownRun(trained, inputs, params.dataset(dataset).source.root)
