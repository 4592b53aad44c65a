"""An extraction for a process of its own, to be killed."""

import sys
import time
from pathlib import Path
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from duplex.encoders.base import Encoder, EncoderIdentity
from duplex.errors import DuplexError
from duplex.features import extract as extraction
from duplex.features.extract import ExtractionSettings, extract


class Slow:
    """Sixty-four pixels through one matrix, slowly, so that a kill finds it at work and starting it costs little."""

    name, dim, device, logit_scale = "slow", 16, torch.device("cpu"), 0.0
    identity = EncoderIdentity("slow", "a", "w", "{}", "fp32", 16, "1", "1", "1")

    def __init__(self) -> None:
        self.matrix = torch.randn(192, 16, generator=torch.Generator().manual_seed(0))

    def image_transform(self, picture: Image.Image) -> Tensor:
        return torch.from_numpy(np.asarray(picture.resize((8, 8))).transpose(2, 0, 1).copy())

    def encode_images(self, pixels: Tensor) -> Tensor:
        time.sleep(0.02)
        return pixels.flatten(1).float() / 255 @ self.matrix


def main(root: Path, out: Path) -> None:
    torch.set_num_threads(1)
    extraction.COMMIT_SECONDS = 0.0
    images = sorted(path.name for path in root.iterdir())
    settings = ExtractionSettings(root, "m" * 64, batch_size=8, num_workers=1, max_bad=1.0)
    report = extract(images, out, cast(Encoder, Slow()), settings)
    print(f"done {report.resumed}", flush=True)


def alone(root: Path, out: Path) -> None:
    """As a command ends: whatever stops it is a line on stderr."""
    try:
        main(root, out)
    except DuplexError as error:
        sys.exit(str(error))
