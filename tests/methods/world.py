"""A small world for the methods' tests: a float64 text tower, a label space, random features."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from duplex.encoders.libraries import open_clip
from duplex.encoders.text import ClipTextTower
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, Method, MethodContext
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.methods.prompt_method import PromptMethod, PromptOptions
from duplex.methods.registry import installed_methods
from duplex.options import Options

STATES = ["red", "striped", "hollow", "Faux.Fur"]
OBJECTS = ["circle", "heart", "star"]
DIM = 8
KINDS = sorted(kind for kind, source in installed_methods().items() if source.module.startswith("duplex."))


@cache
def small_tower(seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu"):
    """A random CLIP text tower of two layers, in double precision unless told."""
    torch.manual_seed(seed)
    model = open_clip.CLIP(
        embed_dim=DIM,
        vision_cfg={"layers": 1, "width": 16, "image_size": 8, "patch_size": 8, "head_width": 8},
        text_cfg={"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
    ).to(device, dtype)
    return ClipTextTower(model)


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


def small_context(labels: LabelSpace | None = None, dtype: torch.dtype = torch.float64, **more: Any) -> MethodContext:
    return MethodContext(labels or small_labels(), {"cls": (DIM,)}, small_tower(dtype=dtype), **more)


def small_method(
    options: Options, seed: int = 0, labels: LabelSpace | None = None, dtype: torch.dtype = torch.float64, **more: Any
) -> Any:
    """A method of built-in kind in double precision unless told, started from features, with every parameter random so
    that no gradient vanishes by construction."""
    context = small_context(labels, dtype, **more)  # before seeding: making its tower draws random numbers, once
    kind = {DuplexOptions: Duplex, PromptOptions: PromptMethod}[type(options)]
    torch.manual_seed(seed)
    method = kind(context, options).to(dtype)
    method.start(batch_of(features(40, seed + 1).to(dtype), np.resize(context.labels.pairs["train"], 40)))
    if method.paths.adapter is not None:
        torch.nn.init.normal_(method.paths.adapter.up.weight, std=0.3)
    return method


def every_row(method: Any) -> torch.Tensor:
    """The codebook, whole [M*N, d]."""
    rows: torch.Tensor = method.codebook.prototypes(np.arange(method.labels.size))
    return rows


def batch_of(z: torch.Tensor, compositions: Any) -> Batch:
    return Batch({"cls": z}, torch.as_tensor(compositions))


@dataclass
class Step:
    """What one batch gives, before its write-back."""

    losses: dict[str, torch.Tensor]
    refinement: Any

    @property
    def total(self) -> torch.Tensor:
        return torch.stack(list(self.losses.values())).sum()


def step_of(method: Method[Any], z: torch.Tensor, compositions: Any, shared: Any = None) -> Step:
    losses = method.losses(batch_of(z, compositions), method.shared() if shared is None else shared)
    return Step(losses, getattr(method, "pending", None))


def scores_of(method: Method[Any], columns: Any, z: torch.Tensor) -> torch.Tensor:
    return method.eval().scorer(columns)({"cls": z})
