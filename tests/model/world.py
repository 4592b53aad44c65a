"""A small world for the model's tests: a float64 text tower, a label space, random features."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from duplex.encoders.vision_ops import ensure_torchvision
from duplex.labels import LabelSpace
from duplex.model.codebook import initial_rows
from duplex.model.network import Network
from duplex.model.options import Options

STATES = ["red", "striped", "hollow", "Faux.Fur"]
OBJECTS = ["circle", "heart", "star"]
DIM = 8


@cache
def small_tower(seed: int = 0):
    """A random CLIP text tower of two layers in double precision."""
    ensure_torchvision()
    from open_clip.model import CLIP

    from duplex.encoders.text import TextTower

    torch.manual_seed(seed)
    model = CLIP(
        embed_dim=DIM,
        vision_cfg={"layers": 1, "width": 16, "image_size": 8, "patch_size": 8, "head_width": 8},
        text_cfg={"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    ).double()
    return TextTower(model)


def small_labels() -> LabelSpace:
    """7 seen pairs, 2 unseen ones in val, 2 in test; one pair of the 12 in no split."""
    pairs = [(s, o) for s in STATES for o in OBJECTS]
    return LabelSpace.from_pairs(
        {
            "train": [pairs[i] for i in (0, 1, 3, 5, 7, 8, 9)],
            "val": [pairs[i] for i in (0, 5, 2, 4)],
            "test": [pairs[i] for i in (1, 7, 6, 10)],
        }
    )


def features(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_labels(states: int, objects: int, random: np.random.Generator) -> LabelSpace:
    """Any split of some of the pairs: at least one is seen; val and test hold seen and unseen ones."""
    pairs = [(f"state {m}", f"object {n}") for m in range(states) for n in range(objects)]
    random.shuffle(pairs)
    cuts = random.integers(1, len(pairs) + 1), *random.integers(0, len(pairs) + 1, 2)
    train, val, test = pairs[: cuts[0]], pairs[cuts[1] :], pairs[cuts[2] :]
    return LabelSpace.from_pairs({"train": train, "val": val or train[:1], "test": test or train[:1]})


def small_network(options: Options, seed: int = 0, labels: LabelSpace | None = None) -> Network:
    """In double precision, with every parameter random so that no gradient vanishes by construction."""
    labels = labels or small_labels()
    z = torch.nn.functional.normalize(features(40, seed + 1), dim=-1)
    compositions = torch.as_tensor(np.resize(labels.pairs["train"], 40))
    tower = small_tower()  # before seeding: making it draws random numbers, once
    torch.manual_seed(seed)
    rows = initial_rows(options, labels, z, compositions) if options.codebook != "none" else None
    network = Network(options, labels, tower, rows).double()
    if network.adapter is not None:
        torch.nn.init.normal_(network.adapter.up.weight, std=0.3)
    return network
