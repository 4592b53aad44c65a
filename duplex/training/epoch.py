"""Train a method for one epoch: one pass over the training images, with an optimiser step every few batches.

The result is the mean of each loss term over the epoch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.methods.base import Batch, Method
from duplex.options import TrainingOptions
from duplex.training.hooks import StepReport, TrainingHooks
from duplex.training.resume import TrainingState

READ_EVERY = 8  # steps between reads of the losses from the device
STEPS = 2  # steps whose rows are read ahead


def train_epoch(
    state: TrainingState,
    images: Batch,
    settings: TrainingOptions,
    show: Callable[[int, dict[str, float]], None],
    hooks: TrainingHooks = TrainingHooks(),
) -> dict[str, float]:
    """Train one epoch and return the mean of each loss term; `show` is called with each step and the means so far."""
    state.method.train()
    size = settings.batch_size * settings.accumulate
    losses = Losses(state.epoch + 1, settings)
    earlier_steps = state.epoch * math.ceil(len(images) / size)
    for step, (batch, rows) in enumerate(prefetch(images, images.shuffled_rows(state.order).split(size)), start=1):
        losses.add(step, len(rows), optimiser_step(state.method, batch, rows, settings, state.optimiser))
        if hooks.reads_steps or step % READ_EVERY == 0:
            losses.flush()
        if hooks.reads_steps:
            rates = learning_rates(state.optimiser)
            hooks.step(StepReport(state.method, state.epoch + 1, earlier_steps + step, losses.last, rates))
        show(step, losses.means)
    losses.flush()
    return losses.means


class Losses:
    """Mean of every loss term over an epoch's images, for progress bars, logs and the training history.

    Terms of several steps are read from the device at once, because each read waits until the device is idle.
    """

    def __init__(self, epoch: int, settings: TrainingOptions) -> None:
        self.means: dict[str, float] = {}
        self.last: dict[str, float] = {}  # of the last step that was read
        self._epoch, self._settings = epoch, settings
        self._sums: dict[str, float] = {}
        self._images = 0
        self._waiting: list[tuple[int, int, tuple[str, ...], Tensor]] = []  # step, images, names, values

    def add(self, step: int, images: int, terms: dict[str, Tensor]) -> None:
        """Queue the loss terms of a step, each a mean over `images` images; `flush` copies them from the device."""
        self._waiting.append((step, images, tuple(terms), torch.stack(list(terms.values()))))

    def flush(self) -> None:
        """Copy queued loss terms from the device, update epoch `means`; raise `DuplexError` for NaN or infinity."""
        if not self._waiting:
            return
        values = iter(torch.cat([values for *_, values in self._waiting]).tolist())
        for step, images, names, _ in self._waiting:
            self._images += images
            self.last = {}
            for name in names:
                value = next(values)
                if not math.isfinite(value):
                    rate, precision = self._settings.learning_rate, self._settings.precision
                    hint = "" if precision == "fp32" else f" or set precision to fp32 (it is {precision})"
                    raise DuplexError(
                        f"loss {name} became {value} in epoch {self._epoch}, step {step}; "
                        f"lower training.learning_rate (it is {rate:g}){hint}"
                    )
                self.last[name] = value
                self._sums[name] = self._sums.get(name, 0.0) + value * images
                self.means[f"loss_{name}"] = self._sums[name] / self._images
        self._waiting.clear()


def optimiser_step(
    method: Method[Any], images: Batch, rows: Tensor, settings: TrainingOptions, optimiser: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Take one optimiser step over `accumulate` batches and return the mean of every loss term.

    `rows` [b]: indices of the step's training images in `images`, on the CPU. Tensors that the batches share
    (`Method.shared`, such as encoded text) are computed once; their gradients are summed and propagated once. Nothing
    in a step waits for the device.
    """
    optimiser.zero_grad(set_to_none=True)
    shared = method.shared()
    leaves = [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in shared
    ]
    inputs = type(shared)(*leaves) if hasattr(shared, "_fields") else tuple(leaves)  # may be a named tuple
    terms: dict[str, Tensor] = {}
    for batch_rows in rows.split(settings.batch_size):
        share = len(batch_rows) / len(rows)
        losses = method.losses(images[batch_rows], inputs)
        values = torch.stack(list(losses.values()))
        values.backward(torch.full_like(values, share))
        method.after_batch()
        for name, value in zip(losses, (share * values.detach()).unbind(), strict=True):
            terms[name] = terms[name] + value if name in terms else value
    grads = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]
    reached = [value for value, grad in zip(shared, grads, strict=True) if grad is not None]
    torch.autograd.backward(reached, [grad for grad in grads if grad is not None])
    if settings.clip is not None:
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
    optimiser.step()
    method.after_step()
    return terms


def learning_rates(optimiser: torch.optim.Optimizer) -> tuple[float, ...]:
    """Return the learning rate of each parameter group of an optimiser."""
    return tuple(float(group["lr"]) for group in optimiser.param_groups)


def prefetch(images: Batch, steps: Iterable[Tensor]) -> Iterator[tuple[Batch, Tensor]]:
    """Yield, for each optimiser step, a batch and the indices of its images that the step uses.

    `steps` yields indices [b] of `images` per step. With all inputs in memory the batch is `images`; with inputs on
    disk the batch holds the step's images only, which are read ahead.
    """
    on_disk: list[Any] = [values for values in images.inputs.values() if not isinstance(values, Tensor)]
    if not on_disk:
        for rows in steps:
            yield images, rows
        return
    waiting: deque[Tensor] = deque()
    for rows in steps:
        for values in on_disk:
            values.read_ahead(rows)
        waiting.append(rows)
        if len(waiting) > STEPS:
            yield images[waiting[0]], torch.arange(len(waiting.popleft()))
    for rows in waiting:
        yield images[rows], torch.arange(len(rows))
