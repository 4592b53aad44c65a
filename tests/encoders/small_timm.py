"""A small network of timm with random weights, which has no text tower."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from duplex.encoders.libraries import timm

SMALL = "timm:test_efficientnet"


def write_weights(folder: Path) -> Path:
    """Write the network's weights to a file in a folder."""
    path = folder / "weights.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("test_efficientnet", num_classes=0).state_dict(), path)
    return path
