"""A small CLIP with random weights in a `local-dir:` folder: a real open_clip model that takes milliseconds."""

import json
from itertools import pairwise
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


def write_gemma_tokenizer(
    folder: Path, words: str = "a photo of sliced diced apple potato red blue star heart"
) -> Path:
    """Write a tokenizer.json with Gemma's components, and merges learned from a few words; return its path."""
    vocabulary = dict.fromkeys(["<pad>", "<eos>", "<bos>", "<unk>"]) | {f"<0x{byte:02X}>": None for byte in range(256)}
    vocabulary |= dict.fromkeys("▁" + "".join(sorted(set(words) - {" "})))
    parts = [["▁", *word] for word in words.split()]
    merges = list[list[str]]()
    while pairs := [pair for part in parts for pair in pairwise(part)]:
        best = max(sorted(set(pairs)), key=pairs.count)
        merges.append([*best])
        vocabulary["".join(best)] = None
        for part in parts:
            for place in reversed(range(len(part) - 1)):
                if tuple(part[place : place + 2]) == best:
                    part[place : place + 2] = ["".join(best)]
    model = {"type": "BPE", "byte_fallback": True, "ignore_merges": False, "merges": merges}
    model["vocab"] = {token: number for number, token in enumerate(vocabulary)}
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"normalizer": normalizer, "model": model}))
    return path
