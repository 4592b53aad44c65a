"""The one training loop, for every method: one optimiser over resident inputs, best validation AUC kept."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duplex.encoders.arithmetic import arithmetic
from duplex.errors import DuplexError
from duplex.features.examples import Examples
from duplex.methods.base import Batch, Method
from duplex.options import TrainingOptions
from duplex.system.progress import Bar
from duplex.system.threads import threads
from duplex.training.prefetch import ahead
from duplex.training.resume import State

READ_EVERY = 8  # steps after which losses are read for the progress line
AnyMethod = Method[Any]
Validate = Callable[[AnyMethod], float]


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
    method: AnyMethod, examples: Examples, settings: TrainingOptions, seed: int, validate: Validate, run: Run = Run()
) -> Outcome:
    """Train in place and leave the method at its best epoch by `validate`, the validation AUC.

    Epoch 0 is the method as it starts: one that trains nothing stays there.
    """
    if not len(examples):
        raise DuplexError("there is no readable training image")
    with threads(settings.threads):
        return _train(method, examples, settings, seed, validate, run)


def _train(
    method: AnyMethod, examples: Examples, settings: TrainingOptions, seed: int, validate: Validate, run: Run
) -> Outcome:
    _begin_peak(examples.compositions.device)
    images = Batch(examples.inputs, examples.compositions, examples.compositions.cpu().numpy())
    method.checkpointing = settings.checkpointing
    state = _begin(method, settings, seed, run, validate, images.compositions.device)
    epochs = settings.epochs if method.groups() else 0
    seconds, done = 0.0, 0
    steps = math.ceil(len(images) / (settings.batch_size * settings.accumulate))
    with Bar(f"{run.label}, steps", epochs * steps) as bar:

        def show(step: int, losses: dict[str, float]) -> None:
            bar.show(state.epoch * steps + step, {**losses, "val AUC": state.history[-1]["val_auc"]})

        show(0, {})
        while state.epoch < epochs and not _out_of_patience(state, settings):
            start = time.perf_counter()
            with arithmetic(settings.precision):
                shown = images if examples.views is None else replace(images, inputs=examples.views.drawn(state.order))
                losses = _epoch(state, shown, settings, show)
            seconds, done = seconds + time.perf_counter() - start, done + 1
            state.schedule.step()
            state.epoch += 1
            method.eval().follow(images)
            method.after_epoch(state.epoch)
            _keep_best(state, _validated(state, validate, settings), losses)
            show(0, losses)
            if run.partial is not None:
                state.save(run.partial)
    method.load_state_dict(state.best)
    method.eval()
    return Outcome(state.best_epoch, state.best_auc, state.history, _timing(seconds, done, state))


def _begin(
    method: AnyMethod, settings: TrainingOptions, seed: int, run: Run, validate: Validate, device: torch.device
) -> State:
    """A fresh state, or the one that an earlier run with the same key left."""
    optimiser = make_optimiser(method, settings)
    schedule = make_schedule(optimiser, settings)
    state = State(run.key, method, optimiser, schedule, torch.Generator().manual_seed(seed), device)
    torch.manual_seed(seed)
    if run.partial is not None and run.partial.exists():
        other = state.load(run.partial)
        if other is None:
            print(f"{run.label}: going on after epoch {state.epoch}", file=sys.stderr)
            return state
        print(f"{run.label}: {run.partial} is {other}; starting afresh, training again", file=sys.stderr)
    _keep_best(state, validate(method), {})
    return state


def make_optimiser(method: AnyMethod, settings: TrainingOptions) -> torch.optim.Optimizer:
    """A method that trains nothing gets an optimiser of nothing."""
    groups = method.groups() or [{"params": [torch.nn.Parameter(torch.zeros(1))]}]
    kinds: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind: Any = kinds[settings.optimiser]
    made: torch.optim.Optimizer = kind(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return made


def make_schedule(optimiser: torch.optim.Optimizer, settings: TrainingOptions) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate of each epoch, as a share of every group's own."""
    return torch.optim.lr_scheduler.LambdaLR(optimiser, lambda epoch: rate_share(epoch, settings))


def rate_share(epoch: int, settings: TrainingOptions) -> float:
    """`warm_up` epochs rise in equal steps; then `decay` to the power of the whole `decay_every` epochs gone (`step`),
    or half a cosine down to 0 at the last epoch's end (`cosine`)."""
    if epoch < settings.warm_up:
        return (epoch + 1) / (settings.warm_up + 1)
    if settings.schedule == "step":
        return settings.decay ** (epoch // settings.decay_every)
    if settings.schedule == "cosine":
        gone = (epoch - settings.warm_up) / (settings.epochs - settings.warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(gone, 1.0)))
    return 1.0


def _epoch(
    state: State, images: Batch, settings: TrainingOptions, show: Callable[[int, dict[str, float]], None]
) -> dict[str, float]:
    """One pass over the training images; the mean of every loss term, which `show` is told after each step."""
    state.method.train()
    size = settings.batch_size * settings.accumulate
    losses = Losses(state.epoch + 1, settings)
    for step, (held, chosen) in enumerate(ahead(images, state.method.batches(images, size, state.order)), start=1):
        losses.add(step, len(chosen), optimiser_step(state.method, held, chosen, settings, state.optimiser))
        if step % READ_EVERY == 0:
            losses.read()
        show(step, losses.means)
    losses.read()
    return losses.means


class Losses:
    """Mean of every loss term over an epoch's images. Terms stay on the device until some steps of them are read at
    once: a value read makes the host wait for all that the device has yet to do."""

    def __init__(self, epoch: int, settings: TrainingOptions) -> None:
        self.means: dict[str, float] = {}
        self._epoch, self._settings = epoch, settings
        self._sums: dict[str, float] = {}
        self._seen = 0
        self._waiting: list[tuple[int, int, tuple[str, ...], Tensor]] = []  # step, images, names, values

    def add(self, step: int, images: int, terms: dict[str, Tensor]) -> None:
        self._waiting.append((step, images, tuple(terms), torch.stack(list(terms.values()))))

    def read(self) -> None:
        if not self._waiting:
            return
        values = iter(torch.cat([part for *_, part in self._waiting]).tolist())
        for step, images, names, _ in self._waiting:
            self._seen += images
            for name in names:
                value = next(values)
                self._refuse(name, value, step)
                self._sums[name] = self._sums.get(name, 0.0) + value * images
                self.means[f"loss_{name}"] = self._sums[name] / self._seen
        self._waiting.clear()

    def _refuse(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            return
        rate, precision = self._settings.learning_rate, self._settings.precision
        hint = "" if precision == "fp32" else f" or set precision to fp32 (it is {precision})"
        raise DuplexError(
            f"loss {name} became {value} in epoch {self._epoch}, step {step}; "
            f"lower training.learning_rate (it is {rate:g}){hint}"
        )


def optimiser_step(
    method: AnyMethod, images: Batch, chosen: Tensor, settings: TrainingOptions, optimiser: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """One optimiser step over `accumulate` batches; the mean of every loss term.

    What the batches share, such as encoded text, is made once: their gradients gather at it and go through it together.
    `chosen` are rows on the host; nothing in a step waits for the device.
    """
    optimiser.zero_grad(set_to_none=True)
    shared = method.shared()
    leaves = [_leaf(part) for part in shared]
    terms: dict[str, Tensor] = {}
    for rows in chosen.split(settings.batch_size):
        share = len(rows) / len(chosen)
        losses = method.losses(images[rows], _like(shared, leaves))
        values = torch.stack(list(losses.values()))
        values.backward(torch.full_like(values, share))
        method.after_batch()
        for name, value in zip(losses, (share * values.detach()).unbind(), strict=True):
            terms[name] = terms[name] + value if name in terms else value
    reached = [(part, leaf.grad) for part, leaf in zip(shared, leaves, strict=True) if _has_gradient(leaf)]
    torch.autograd.backward([part for part, _ in reached], [grad for _, grad in reached])
    optimiser.step()
    method.after_step()
    return terms


def _leaf(part: Any) -> Any:
    return part.detach().requires_grad_(part.requires_grad) if isinstance(part, Tensor) else part


def _like(shared: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    """The parts in a tuple of the same kind, named or not."""
    return type(shared)(*parts) if hasattr(shared, "_fields") else tuple(parts)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.grad is not None


def _validated(state: State, validate: Validate, settings: TrainingOptions) -> float:
    """The validation AUC, after a look at what the epoch's last step left behind."""
    for name, tensor in state.method.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise DuplexError(
                f"{name} diverged in the last step of epoch {state.epoch}; "
                f"lower training.learning_rate (it is {settings.learning_rate:g})"
            )
    return validate(state.method)


def _keep_best(state: State, auc: float, losses: dict[str, float]) -> None:
    """Record an epoch; the first of equal validation AUCs wins."""
    state.history.append({"epoch": state.epoch, **losses, "val_auc": auc})
    if auc > state.best_auc:
        state.best_auc, state.best_epoch = auc, state.epoch
        state.best = {name: tensor.detach().clone() for name, tensor in state.method.state_dict().items()}


def _out_of_patience(state: State, settings: TrainingOptions) -> bool:
    return settings.patience is not None and state.epoch - state.best_epoch >= settings.patience


def _timing(seconds: float, epochs: int, state: State) -> dict[str, float]:
    """Cost of a run: kept apart from the metrics, which are the same each time."""
    cuda = state.device.type == "cuda"
    return {
        "seconds_per_epoch": seconds / epochs if epochs else 0.0,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else _peak_resident(),
        **state.method.summary(),
    }


def _begin_peak(device: torch.device) -> None:
    """Let the high-water mark fall to what is held: a warm process may have trained larger runs before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # elsewhere than on Linux it stays
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_resident() -> int:
    """Most memory this process held since `_begin_peak`, in bytes; on other systems than Linux, ever."""
    import resource

    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
