"""Small methods in double precision with random weights, for tests against loops (tests/methods/loops.py)."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplex.labels import World
from duplex.methods.base import Batch, MethodContext, PrimitiveVectors
from tests.methods.loops import close
from tests.methods.world import DIM, features, small_context, small_labels

WORD, TOKENS, TOKEN = 6, 5, 7
M, N = 4, 3
LABELS = small_labels()
SEEN = LABELS.pairs["train"].tolist()

# options of `kind: prompts`: one path without an adapter, with everything learned, or without training
SOFT: dict[str, Any] = {"paths": "composition", "adapter": "none", "losses": ("semantic",), "inference": ("semantic",)}
CLIP: dict[str, Any] = {**SOFT, "context": "fixed", "vocabulary": "fixed", "losses": ()}


def words(seed: int = 5) -> PrimitiveVectors:
    random = torch.Generator().manual_seed(seed)
    return PrimitiveVectors(*(torch.randn(count, WORD, generator=random, dtype=torch.float64) for count in (M, N)))


def context(world: World = "closed") -> MethodContext:
    whole = small_context()
    tower: Any = copy.copy(whole.tower)
    random = torch.Generator().manual_seed(6)
    tower.image_projection = torch.randn(TOKEN, DIM, generator=random, dtype=torch.float64)
    inputs = {"cls": (DIM,), "patch": (TOKENS, TOKEN)}
    return replace(whole, text=tower, words=words(), world=world, inputs=inputs)


def batch(count: int, seed: int = 3, compositions: Any = None) -> Batch:
    own = np.random.default_rng(seed).choice(SEEN, count) if compositions is None else compositions
    patches = torch.randn(count, TOKENS, TOKEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 50))
    return Batch({"cls": features(count, seed), "patch": patches}, torch.as_tensor(own))


def build(kind: Any, world: World = "closed", seed: int = 0, shaken: bool = True, **options: Any) -> Any:
    """Return a started method in evaluation mode, with random noise on every parameter if `shaken`."""
    there = context(world)
    torch.manual_seed(seed)
    method = kind(there, kind.Options(**options)).double()
    method.start(batch(30, seed + 7, np.resize(SEEN, 30)))
    if shaken:
        random = torch.Generator().manual_seed(seed + 99)
        with torch.no_grad():
            for parameter in method.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=random, dtype=parameter.dtype))
    return method.eval()


def scores(method: Any, columns: Any, images: Batch) -> Tensor:
    return method.eval().scorer(np.asarray(columns))(images.inputs)


def targets(images: Batch) -> tuple[list[int], list[int], list[int]]:
    """Return each image's composition, as its position among the seen ones, its state and its object."""
    own = images.compositions.tolist()
    return [SEEN.index(c) for c in own], [c // N for c in own], [c % N for c in own]


def primitive_means(rows: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return means of the seen compositions' tensors by state and by object."""
    pairs = list(zip(rows, SEEN, strict=True))
    states = [torch.stack([row for row, c in pairs if c // N == m]).mean(0) for m in range(M)]
    return states, [torch.stack([row for row, c in pairs if c % N == n]).mean(0) for n in range(N)]


def check_losses(method: Any, images: Batch, **expected: float) -> None:
    """Compare losses of a batch with the expected values by name."""
    losses = method.losses(images, method.shared())
    for name, value in expected.items():
        close(losses[name].item(), value)
