"""A trained network with its test images at hand: what retrieval, swapping and the maps look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from duplex.artifacts import ArtifactPaths
from duplex.checkpoint import load_checkpoint
from duplex.model.network import Network
from duplex.params import Params
from duplex.report.qualitative import look_under
from duplex.report.retrieved import Gaze
from duplex.stages.inputs import Inputs, load_inputs


@dataclass(frozen=True)
class Shown:
    network: Network
    inputs: Inputs
    root: Path  # of the pictures

    def gaze(self) -> Gaze:
        test = self.inputs.examples["test"]
        images = self.inputs.manifest["image"].to_numpy()[test.rows].tolist()
        return Gaze(self.network, self.inputs.labels, test, images, look_under(self.root))


def load_shown(params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths) -> Shown:
    """On the CPU: one pass over a few thousand features."""
    inputs = load_inputs(params.model_copy(update={"device": "cpu"}), dataset, paths)
    network = load_checkpoint(paths.run(dataset, method, seed).checkpoint, inputs.tower, inputs.encoder, inputs.labels)
    return Shown(network, inputs, params.dataset(dataset).source.root)
