"""The one training loop, for every method: Adam over resident features, best validation AUC kept."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.examples import Examples
from duplex.model.network import Network
from duplex.model.options import TrainingOptions
from duplex.model.prompts import Prototypes
from duplex.progress import Live
from duplex.resume import State

Validate = Callable[[Network], float]


@dataclass(frozen=True)
class Run:
    """Where a run keeps its state, and what that state belongs to."""

    label: str = "training"
    partial: Path | None = None  # each epoch's state is kept here, and a killed run goes on bit-identically
    key: str = ""  # names everything the run depends on


@dataclass(frozen=True)
class Outcome:
    """A finished run: the network holds its best epoch."""

    best_epoch: int
    best_auc: float
    history: list[dict[str, float]]
    timing: dict[str, float]


def train(
    network: Network, examples: Examples, settings: TrainingOptions, seed: int, validate: Validate, run: Run = Run()
) -> Outcome:
    """Train in place and leave the network at its best epoch by `validate`, the validation AUC.

    Epoch 0 is the network as built: a method that trains nothing stays there.
    """
    if not len(examples):
        raise DuplexError("there is no readable training image")
    state = _begin(network, settings, seed, run, validate)
    epochs = settings.epochs if network.trainable() else 0
    seconds, done = 0.0, 0
    steps = math.ceil(len(examples) / (settings.batch_size * settings.accumulate))
    with Live(f"{run.label}, steps", epochs * steps) as live:

        def show(step: int, losses: dict[str, float]) -> None:
            live.show(state.epoch * steps + step, {**losses, "val AUC": state.history[-1]["val_auc"]})

        show(0, {})
        while state.epoch < epochs and not _out_of_patience(state, settings):
            start = time.perf_counter()
            losses = _epoch(state, examples, settings, show)
            seconds, done = seconds + time.perf_counter() - start, done + 1
            state.schedule.step()
            state.epoch += 1
            _keep_best(state, _validated(state, validate, settings), losses)
            show(0, losses)
            if run.partial is not None:
                state.save(run.partial)
    network.load_state_dict(state.best)
    network.eval()
    return Outcome(state.best_epoch, state.best_auc, state.history, _timing(seconds, done, network))


def _begin(network: Network, settings: TrainingOptions, seed: int, run: Run, validate: Validate) -> State:
    """A fresh state, or the one that an earlier run with the same key left."""
    parameters = network.trainable() or [torch.nn.Parameter(torch.zeros(1))]
    optimiser = torch.optim.Adam(parameters, lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, settings.decay_every, settings.decay)
    state = State(run.key, network, optimiser, schedule, torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    if run.partial is not None and run.partial.exists():
        if state.load(run.partial):
            print(f"{run.label}: going on after epoch {state.epoch}", file=sys.stderr)
            return state
        print(f"{run.label}: {run.partial} is of another run; starting afresh", file=sys.stderr)
    _keep_best(state, validate(network), {})
    return state


def _epoch(
    state: State, examples: Examples, settings: TrainingOptions, show: Callable[[int, dict[str, float]], None]
) -> dict[str, float]:
    """One pass over the training images; the mean of every loss term, which `show` is told after each step."""
    state.network.train()
    sums: dict[str, float] = {}
    means: dict[str, float] = {}
    size, seen = settings.batch_size * settings.accumulate, 0
    for step, chosen in enumerate(torch.randperm(len(examples), generator=state.order).split(size)):
        terms = optimiser_step(state.network, examples, chosen.to(examples.z.device), settings, state.optimiser)
        seen += len(chosen)
        for name, value in terms.items():
            if not math.isfinite(value):
                hint = "" if settings.precision == "fp32" else f" or set precision to fp32 (it is {settings.precision})"
                raise DuplexError(
                    f"loss {name} became {value} in epoch {state.epoch + 1}, step {step + 1}; "
                    f"lower training.learning_rate (it is {settings.learning_rate:g}){hint}"
                )
            sums[name] = sums.get(name, 0.0) + value * len(chosen)
            means[f"loss_{name}"] = sums[name] / seen
        show(step + 1, means)
    return means


def optimiser_step(
    network: Network, examples: Examples, chosen: Tensor, settings: TrainingOptions, optimiser: torch.optim.Optimizer
) -> dict[str, float]:
    """One optimiser step over `accumulate` batches; the mean of every loss term.

    Text is encoded once: the batches' gradients gather at the prototypes and go through the text tower together.
    """
    optimiser.zero_grad(set_to_none=True)
    prototypes = network.prototypes(settings.checkpointing)
    leaves = Prototypes(*(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in prototypes))
    terms: dict[str, Tensor] = {}
    for batch in chosen.split(settings.batch_size):
        share = len(batch) / len(chosen)
        step = network(examples.z[batch], examples.compositions[batch], leaves)
        (share * step.total).backward()
        network.commit(step.refinement)
        for name, value in step.losses.items():
            terms[name] = terms.get(name, torch.zeros_like(value)) + share * value.detach()
    reached = [(whole, leaf.grad) for whole, leaf in zip(prototypes, leaves, strict=True) if leaf.grad is not None]
    if reached:
        torch.autograd.backward([whole for whole, _ in reached], [grad for _, grad in reached])
    optimiser.step()
    network.project()
    return dict(zip(terms, torch.stack(list(terms.values())).tolist(), strict=True))


def _validated(state: State, validate: Validate, settings: TrainingOptions) -> float:
    """The validation AUC, after a look at what the epoch's last step left behind."""
    for name, tensor in state.network.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise DuplexError(
                f"{name} diverged in the last step of epoch {state.epoch}; "
                f"lower training.learning_rate (it is {settings.learning_rate:g})"
            )
    return validate(state.network)


def _keep_best(state: State, auc: float, losses: dict[str, float]) -> None:
    """Record an epoch; the first of equal validation AUCs wins."""
    state.history.append({"epoch": state.epoch, **losses, "val_auc": auc})
    if auc > state.best_auc:
        state.best_auc, state.best_epoch = auc, state.epoch
        state.best = {name: tensor.detach().clone() for name, tensor in state.network.state_dict().items()}


def _out_of_patience(state: State, settings: TrainingOptions) -> bool:
    return settings.patience is not None and state.epoch - state.best_epoch >= settings.patience


def _timing(seconds: float, epochs: int, network: Network) -> dict[str, float]:
    """Cost of a run: kept apart from the metrics, which are the same each time."""
    cuda = torch.cuda.is_available() and network.target.is_cuda
    return {
        "seconds_per_epoch": seconds / epochs if epochs else 0.0,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else _peak_resident(),
        **network.summary(),
    }


def _peak_resident() -> int:
    """Most memory this process ever held, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
