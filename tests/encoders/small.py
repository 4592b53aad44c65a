"""A small CLIP with random weights in a `local-dir:` folder: a real open_clip model that takes milliseconds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from duplex.encoders.libraries import open_clip

ARCHITECTURE = {
    "embed_dim": 16,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "patch_size": 16, "head_width": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
PREPROCESS = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic", "resize_mode": "shortest"}


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def write_folder(folder: Path, seed: int = 0, **preprocess: object) -> str:
    """Write the folder; return the encoder's name."""
    torch.manual_seed(seed)
    model = open_clip.CLIP(**json.loads(json.dumps(ARCHITECTURE)))
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_cfg": ARCHITECTURE, "preprocess_cfg": {**PREPROCESS, **preprocess}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return f"local-dir:{folder}"


def add_architecture(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, **changes: object) -> None:
    """Register the small architecture with open_clip for one test."""
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    (folder / f"{name}.json").write_text(json.dumps({**ARCHITECTURE, **changes}))
    open_clip.add_model_config(folder / f"{name}.json")
