"""Published formulas in plain torch, with tensors by name, and a check of methods against them.

A twin is a function from a method's tensors to its losses by name; autograd then gives what the
gradients must be. Only the text tower, which has tests of its own, is the method's.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from duplex.methods.base import Batch

Tensors = dict[str, Tensor]
TOLERANCE = 1e-5


def tensors_of(method: Any) -> Tensors:
    """Copies of a method's parameters, which need gradients, and of its buffers; prompts are shared."""
    found = {name: value.detach().clone() for name, value in method.named_buffers()}
    for name, value in method.named_parameters():
        shared = "prompts." in name
        found[name] = value if shared else value.detach().clone().requires_grad_()
    return found


def held(method: Any, images: Batch, twin: Callable[[Tensors], Tensors], parts: Iterable[str]) -> None:
    """Compare losses, and gradients of their sum for the parameters `parts`, with those of the twin."""
    own = dict(method.named_parameters())
    losses = method.losses(images, method.shared())
    p = tensors_of(method)
    expected = twin(p)
    assert losses.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value, rtol=TOLERANCE, atol=1e-9, msg=name)
    names = list(parts)
    found = torch.autograd.grad(torch.stack([*losses.values()]).sum(), [own[name] for name in names])
    should = torch.autograd.grad(torch.stack([*expected.values()]).sum(), [p[name] for name in names])
    for name, ours, theirs in zip(names, found, should, strict=True):
        assert theirs.abs().max() > 0, f"{name} has no gradient"
        difference = (ours - theirs).norm() / theirs.norm()
        assert difference < TOLERANCE, f"gradient of {name}: {difference}"


def same_scores(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.detach().double(), rtol=TOLERANCE, atol=1e-6)


def unit(x: Tensor) -> Tensor:
    return x / x.pow(2).sum(-1, keepdim=True).sqrt()


def linear(p: Tensors, name: str, x: Tensor) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def layer_norm(p: Tensors, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / deviation * p[f"{name}.weight"] + p[f"{name}.bias"]


def batch_norm(p: Tensors, name: str, x: Tensor) -> Tensor:
    """In evaluation, with running statistics."""
    deviation = (p[f"{name}.running_var"] + 1e-5).sqrt()
    return (x - p[f"{name}.running_mean"]) / deviation * p[f"{name}.weight"] + p[f"{name}.bias"]


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def quick_gelu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-1.702 * x))


def perceptron(p: Tensors, name: str, x: Tensor, layers: int) -> Tensor:
    """Hidden layers of a linear map, layer norm and relu (and dropout), then a linear map."""
    for place in range(0, 4 * layers, 4):
        x = relu(layer_norm(p, f"{name}.{place + 1}", linear(p, f"{name}.{place}", x)))
    return linear(p, f"{name}.{4 * layers}", x)


def feed_forward(p: Tensors, name: str, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return linear(p, f"{name}.3", activation(linear(p, f"{name}.1", layer_norm(p, f"{name}.0", x))))


def attention(p: Tensors, name: str, heads: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Multi-head attention, a head at a time: outputs [..., Q, d] and mean weights [..., Q, T]."""
    q, k, v = (linear(p, f"{name}.{part}", rows) for part, rows in (("query", x), ("key", y), ("value", y)))
    width = q.shape[-1] // heads
    read, weights = [], []
    for head in range(heads):
        cut = slice(head * width, (head + 1) * width)
        similar = torch.exp(q[..., cut] @ k[..., cut].transpose(-1, -2) / width**0.5)
        weights.append(similar / similar.sum(-1, keepdim=True))
        read.append(weights[-1] @ v[..., cut])
    return linear(p, f"{name}.out", torch.cat(read, -1)), sum(weights[1:], weights[0]) / heads


def cross_block(p: Tensors, name: str, heads: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """CLIP's residual block with queries `x`, keys and values `y`."""
    normed = layer_norm(p, f"{name}.norm_x", x), layer_norm(p, f"{name}.norm_y", y)
    read, weights = attention(p, f"{name}.attend", heads, *normed)
    g = x + read
    return g + feed_forward(p, f"{name}.forward_part", g, quick_gelu), weights


def softmax(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.max(-1, keepdim=True).values)
    return powers / powers.sum(-1, keepdim=True)


def cross_entropy(logits: Tensor, own: Any) -> Tensor:
    rows = torch.arange(len(logits))
    return -softmax(logits)[rows, torch.as_tensor(own)].log().mean()
