"""The optimiser of a method's parameter groups and the schedule of its learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch

from duplex.errors import DuplexError, shown
from duplex.methods.base import Method
from duplex.options import TrainingOptions
from duplex.training.hooks import TrainingHooks


def make_optimiser(
    method: Method[Any], settings: TrainingOptions, hooks: TrainingHooks = TrainingHooks()
) -> torch.optim.Optimizer:
    """Return the optimiser of the method's parameter groups; for a method without groups, of one unused parameter.

    hooks: `hooks.optimiser`, if given, builds the optimiser; otherwise the training options choose it.
    """
    groups = [{**group, "params": list(group["params"])} for group in method.groups()]
    groups = groups or [{"params": [torch.nn.Parameter(torch.zeros(1))]}]
    if hooks.optimiser is not None:
        with_rates = [{"lr": settings.learning_rate, **group} for group in groups]
        optimiser = hooks.optimiser(with_rates)
        _check_parameters(optimiser, groups)
        return optimiser
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": partial(torch.optim.SGD, momentum=settings.sgd_momentum),
    }
    return kinds[settings.optimiser](groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def _check_parameters(optimiser: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raise `DuplexError` if a user's optimiser misses a parameter that is to be trained, or is LBFGS."""
    place = "the function given as `optimiser`"
    if isinstance(optimiser, torch.optim.LBFGS):
        raise DuplexError(f"{place} returned LBFGS, which computes losses itself; expected an optimiser such as Adam")
    trained = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    wanted = {id(parameter) for group in groups for parameter in group["params"]}
    if missing := len(wanted - trained):
        raise DuplexError(f"{place} returned an optimiser without {missing} of the {len(wanted)} trained parameters")


def make_schedule(
    optimiser: torch.optim.Optimizer, settings: TrainingOptions, hooks: TrainingHooks = TrainingHooks()
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule of an optimiser's learning rates, a factor per epoch.

    The factor is `hooks.schedule(epoch)` or, without this hook, follows the training option `schedule` (`rate_share`).
    """

    def share(epoch: int) -> float:
        if hooks.schedule is None:
            return rate_share(epoch, settings)
        factor = hooks.schedule(epoch)
        if not (isinstance(factor, Real) and 0 <= factor < math.inf):
            raise DuplexError(f"schedule returned {shown(factor)} for epoch {epoch}; expected a number >= 0")
        return float(factor)

    return torch.optim.lr_scheduler.LambdaLR(optimiser, share)


def rate_share(epoch: int, settings: TrainingOptions) -> float:
    """Return the factor of the learning rate in an epoch (counted from 0), by the training option `schedule`.

    The factor rises in equal steps over `warm_up` epochs. Then the schedule `step` multiplies it by `decay` every
    `decay_every` epochs, `cosine` lowers it along half a cosine to 0 at the end of the last epoch, and `constant`
    keeps it.
    """
    if epoch < settings.warm_up:
        return (epoch + 1) / (settings.warm_up + 1)
    if settings.schedule == "step":
        return settings.decay ** (epoch // settings.decay_every)
    if settings.schedule == "cosine":
        progress = (epoch - settings.warm_up) / (settings.epochs - settings.warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return 1.0
