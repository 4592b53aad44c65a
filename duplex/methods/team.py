"""Processes that train one method together: they divide a step's encoding and take the same step.

Each process holds the whole method and a copy of all random numbers. It encodes its part of a batch's images (blocks of
the image tower) and of the prompts; then the features of all parts are joined, and each process computes the losses of
the whole batch. Local graphs, batch norms and codebooks therefore see what a single process sees. With R processes,
parameters θ, and the features z_r of process r,

    dL/dθ = Σ_r dL_r/dθ,    L_r = L(z_1, ..., z_R) / R

where the gradient of z_r is the sum over the R losses; so parameters of encoders and of what follows need one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

Told = TypeVar("Told")


@dataclass(frozen=True)
class Team:
    """A process's place among the `size` processes of a process group of torch; by default, it is alone."""

    rank: int = 0
    size: int = 1

    def divides(self, total: int) -> bool:
        """Whether each process encodes a part of `total` images or prompts; else each encodes all."""
        return 1 < self.size <= total

    def part(self, total: int) -> slice:
        """The images or prompts that this process encodes."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def join(self, own: Tensor, total: int) -> Tensor:
        """All rows [total, ...], of which each process computed its `part`, with gradients."""
        joined: Tensor = _Joined.apply(own, self.part(total), total)  # type: ignore[no-untyped-call]
        return joined

    def run(self, block: nn.Module, x: Tensor, total: int) -> Tensor:
        """Apply a block to this process's part of `total` images; dropout is that of the whole batch."""
        with _PartOfDropout(self.part(total), total):
            output: Tensor = block(x)
        return output

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Give each parameter the sum of its gradients in all processes."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.size == 1 or not grads:
            return
        every = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(every)
        for grad, summed in zip(grads, every.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))

    def by_first(self, compute: Callable[[], Told]) -> Told:
        """What `compute` returns in the first process, which alone calls it."""
        if self.size == 1:
            return compute()
        told: list[Any] = [None if self.rank else compute()]
        distributed.broadcast_object_list(told, device=torch.device("cpu"))
        value: Told = told[0]
        return value


ALONE = Team()


class _Joined(torch.autograd.Function):
    """Concatenates the rows of all processes; a row's gradient is the sum of those in all processes."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: slice, total: int) -> Tensor:
        ctx.part = part
        joined = own.new_zeros(total, *own.shape[1:])
        joined[part] = own
        distributed.all_reduce(joined)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad)
        return grad[ctx.part], None, None


class _PartOfDropout(TorchFunctionMode):
    """Draws dropout for a whole batch and applies a part, so that all processes draw the same random numbers."""

    def __init__(self, part: slice, total: int) -> None:
        super().__init__()
        self.part = part
        self.total = total

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not dropout:
            return func(*args, **(kwargs or {}))
        x, *options = args
        scales = func(x.new_ones(self.total, *x.shape[1:]), *options, **(kwargs or {}))
        return x * scales[self.part]
