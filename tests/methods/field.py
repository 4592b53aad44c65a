"""Shared by tests of methods: methods in double precision with random weights, and naive loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplex.labels import World
from duplex.methods.base import Batch, PrimitiveVectors, TaskContext
from tests.methods.world import DIM, features, small_labels, small_task

WORD, TOKENS, TOKEN = 6, 5, 7
M, N = 4, 3
LABELS = small_labels()
SEEN = LABELS.pairs["train"].tolist()


def words(seed: int = 5) -> PrimitiveVectors:
    random = torch.Generator().manual_seed(seed)
    return PrimitiveVectors(*(torch.randn(count, WORD, generator=random, dtype=torch.float64) for count in (M, N)))


def task(world: World = "closed") -> TaskContext:
    plain = small_task()
    return replace(plain, words=words(), world=world, inputs={"cls": (DIM,), "patch": (TOKENS, TOKEN)})


def batch(count: int, seed: int = 3, compositions: Any = None) -> Batch:
    own = np.random.default_rng(seed).choice(SEEN, count) if compositions is None else compositions
    patches = torch.randn(count, TOKENS, TOKEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 50))
    return Batch({"cls": features(count, seed), "patch": patches}, torch.as_tensor(own))


def build(kind: Any, world: World = "closed", seed: int = 0, shaken: bool = True, **options: Any) -> Any:
    """Return a started method in evaluation mode, with random noise on every parameter if `shaken`."""
    there = task(world)
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


def close(a: Any, b: Any) -> None:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


# -- loops -------------------------------------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    return x / math.sqrt(sum(float(v) ** 2 for v in x))


def linear(layer: Any, x: Tensor) -> Tensor:
    rows = [sum(float(w) * float(v) for w, v in zip(row, x.detach(), strict=True)) for row in layer.weight.detach()]
    bias = [0.0] * len(rows) if layer.bias is None else layer.bias.tolist()
    return torch.tensor([a + b for a, b in zip(rows, bias, strict=True)], dtype=torch.float64)


def normed(layer: Any, x: Tensor) -> Tensor:
    mean = sum(x.tolist()) / len(x)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in x.tolist()) / len(x) + layer.eps)
    return (x - mean) / deviation * layer.weight.detach() + layer.bias.detach()


def composed(method: Any, c: int) -> Tensor:
    """The embedding of a composition by the method's `composer`, from its words."""
    state = linear(method.composer.state, method.words.states[c // N])
    return unit(state + linear(method.composer.object, method.words.objects[c % N]))


def mlp(layers: Any, x: Tensor) -> Tensor:
    """Linear maps with layer norm and relu between them, one vector at a time."""
    for layer in layers:
        kind = type(layer).__name__
        if kind == "Linear":
            x = linear(layer, x)
        elif kind == "LayerNorm":
            x = normed(layer, x)
        elif kind == "ReLU":
            x = torch.tensor([max(v, 0.0) for v in x.tolist()], dtype=torch.float64)
    return x


def softmax(row: Any) -> list[float]:
    values = row.tolist() if isinstance(row, Tensor) else [float(v) for v in row]
    top = max(values)
    parts = [math.exp(v - top) for v in values]
    return [part / sum(parts) for part in parts]


def cross_entropy(rows: Any, own: Any) -> float:
    """Mean of `-log softmax(row)[own]`."""
    return -sum(math.log(softmax(row)[int(k)]) for row, k in zip(rows, own, strict=True)) / len(rows)


def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
