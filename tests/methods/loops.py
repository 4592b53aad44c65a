"""Naive loops over vectors, heads and nodes, in double precision."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def close(a: Any, b: Any) -> None:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


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


def products(features: Iterable[Tensor], prototypes: Iterable[Tensor], scale: float = 1.0) -> list[list[float]]:
    """Return scaled dot products, one row per feature."""
    prototypes = list(prototypes)
    return [[scale * dot(f.detach(), p) for p in prototypes] for f in features]


def sums_of_posteriors(c: Any, s: Any, o: Any, candidates: Sequence[int], n: int) -> list[list[float]]:
    """Return `p(c|x) + p(s|x) p(o|x)` of the candidates, from logits of candidates, states and objects."""
    rows = zip(map(softmax, c), map(softmax, s), map(softmax, o), strict=True)
    return [[p + q[k // n] * r[k % n] for p, k in zip(a, candidates, strict=True)] for a, q, r in rows]


def composed(method: Any, c: int) -> Tensor:
    """The embedding of a composition by the method's `composer`, from its words."""
    n = len(method.words.objects)
    state = linear(method.composer.state, method.words.states[c // n])
    return unit(state + linear(method.composer.object, method.words.objects[c % n]))


def attend(part: Any, x: Tensor, y: Iterable[Tensor]) -> tuple[Tensor, list[float]]:
    """Return the output of multi-head attention for one query `x`, and its mean weights of the rows `y`."""
    y, q, width = list(y), linear(part.query, x), part.query.out_features // part.heads
    keys, values = ([linear(layer, row) for row in y] for layer in (part.key, part.value))
    read, mean = [], [0.0] * len(y)
    for h in range(part.heads):
        cut = slice(h * width, (h + 1) * width)
        weights = softmax([dot(q[cut], k[cut]) / math.sqrt(width) for k in keys])
        read.append(torch.stack([w * v[cut] for w, v in zip(weights, values, strict=True)]).sum(0))
        mean = [a + w / part.heads for a, w in zip(mean, weights, strict=True)]
    return linear(part.out, torch.cat(read)), mean


def feed_forward(part: Any, g: Tensor) -> Tensor:
    """Return `g + F(norm(g))`."""
    norm, first, gelu, second = part
    return g + linear(second, gelu(linear(first, normed(norm, g))))


def cross_block(block: Any, x: Tensor, y: Iterable[Tensor]) -> tuple[Tensor, list[float]]:
    """Return a `CrossBlock`'s output for one query, and its attention weights."""
    read, weights = attend(block.attend, normed(block.norm_x, x), [normed(block.norm_y, row) for row in y])
    return feed_forward(block.forward_part, x + read), weights


def convolved(layers: Any, states: Tensor, objects: Tensor, target: Any, outside: Any = (), weights: Any = None) -> Any:
    """Return features of states, objects and compositions (`target`, then `outside`), `D^-1 (A + I) H W` with a dense
    matrix; compositions outside the graph are leaves. `weights` scale messages from compositions to primitives."""
    m, n = len(states), len(objects)
    pairs = [*target, *outside]
    A = torch.eye(m + n + len(pairs), dtype=torch.float64)
    for k, c in enumerate(pairs):
        s, o, node = c // n, m + c % n, m + n + k
        A[node, s] = A[node, o] = 1.0
        if k < len(target):
            A[s, o] = A[o, s] = A[s, node] = A[o, node] = 1.0 if weights is None else float(weights[c])
    A = A / A.sum(1, keepdim=True)
    H = torch.stack([*states, *objects, *((states[c // n] + objects[c % n]) / 2 for c in pairs)]).detach()
    for depth, layer in enumerate(layers):
        H = torch.stack([linear(layer, row) for row in A @ H])
        H = H if depth == len(layers) - 1 else H.relu()
    return H[:m], H[m : m + n], H[m + n :]
