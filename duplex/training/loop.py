"""The training loop of all methods: one optimiser; the epoch with the best validation AUC is kept."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.examples import Examples
from duplex.methods.base import Batch, Method
from duplex.options import TrainingOptions
from duplex.system.precision import float32_arithmetic
from duplex.system.progress import ProgressBar
from duplex.system.threads import threads
from duplex.training.method_checks import checked, checked_losses, read_only
from duplex.training.resume import TrainingState

READ_EVERY = 8  # steps between reads of the losses from the device
AnyMethod = Method[Any]
Validate = Callable[[AnyMethod], float]


@dataclass(frozen=True)
class ResumePoint:
    """File from which a killed run continues, and the key of the run that it belongs to."""

    label: str = "training"  # for progress and messages
    path: Path | None = None  # written after each epoch; a killed run continues from it bit-identically
    key: str = ""  # hash of everything that the run depends on


@dataclass(frozen=True)
class TrainingResult:
    """Result of training: best epoch, history and timing; the tensors of that epoch are in the method."""

    best_epoch: int
    best_auc: float
    history: list[dict[str, float]]
    timing: dict[str, float]  # seconds per epoch, peak bytes, sizes


def train(
    method: AnyMethod,
    examples: Examples,
    settings: TrainingOptions,
    seed: int,
    validate: Validate,
    resume: ResumePoint = ResumePoint(),
) -> TrainingResult:
    """Train a method in place and load the tensors of its best epoch.

    `validate` returns the validation AUC (fraction) that selects the epoch. Epoch 0 is the untrained method; a
    method without parameters to train stays at it.
    """
    if not len(examples):
        raise DuplexError("no training image is readable")
    with threads(settings.threads):
        return _train(method, examples, settings, seed, validate, resume)


def _train(
    method: AnyMethod, examples: Examples, settings: TrainingOptions, seed: int, validate: Validate, resume: ResumePoint
) -> TrainingResult:
    _reset_peak_memory(examples.compositions.device)
    images = Batch(examples.inputs, examples.compositions, examples.compositions.cpu().numpy())
    method.checkpointing = settings.checkpointing
    state = _begin(method, images, settings, seed, validate, resume)
    epochs = settings.epochs if method.groups() else 0
    seconds, trained = 0.0, 0
    steps = math.ceil(len(images) / (settings.batch_size * settings.accumulate))
    with ProgressBar(f"{resume.label}, steps", epochs * steps) as bar:

        def show(step: int, losses: dict[str, float]) -> None:
            bar.show(state.epoch * steps + step, {**losses, "val AUC": state.history[-1]["val_auc"]})

        show(0, {})
        while state.epoch < epochs and state.epoch - state.best_epoch < (settings.patience or math.inf):
            start = time.perf_counter()
            with float32_arithmetic(settings.precision):
                losses = _epoch(state, images, settings, show)
            seconds += time.perf_counter() - start
            trained += 1
            state.schedule.step()
            state.epoch += 1
            with read_only(f"{method.class_name}.on_features_changed()", images.inputs):
                method.eval().on_features_changed(images)
            method.after_epoch(state.epoch)
            _keep_best(state, _validated(state, validate, settings), losses)
            show(0, losses)
            if resume.path is not None:
                state.save(resume.path)
    method.load_state_dict(state.best)
    method.eval()
    cuda = state.device.type == "cuda"
    timing = {  # kept out of the metrics because it varies
        "seconds_per_epoch": seconds / trained if trained else 0.0,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else _peak_resident(),
        **checked(f"{method.class_name}.summary()", method.summary(), dict),
    }
    return TrainingResult(state.best_epoch, state.best_auc, state.history, timing)


def _begin(
    method: AnyMethod, images: Batch, settings: TrainingOptions, seed: int, validate: Validate, resume: ResumePoint
) -> TrainingState:
    """Return a new training state, or the state that an earlier run with the same key saved."""
    optimiser, order = make_optimiser(method, settings), torch.Generator().manual_seed(seed)
    schedule = make_schedule(optimiser, settings)
    state = TrainingState(resume.key, method, optimiser, schedule, order, images.compositions.device)
    torch.manual_seed(seed)
    if resume.path is not None and resume.path.exists():
        reason = state.load(resume.path)
        if reason is None:
            print(f"{resume.label}: continuing after epoch {state.epoch}", file=sys.stderr)
            return state
        print(f"{resume.label}: {resume.path} {reason}; starting from the beginning", file=sys.stderr)
    _keep_best(state, validate(method), {})
    return state


def make_optimiser(method: AnyMethod, settings: TrainingOptions) -> torch.optim.Optimizer:
    """Build the optimiser of the method's parameter groups; without groups, of one unused parameter."""
    groups = checked(f"{method.class_name}.groups()", method.groups(), list)
    groups = groups or [{"params": [torch.nn.Parameter(torch.zeros(1))]}]
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimiser]
    optimiser: torch.optim.Optimizer = kind(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return optimiser


def make_schedule(optimiser: torch.optim.Optimizer, settings: TrainingOptions) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the schedule that multiplies every group's learning rate by `rate_share(epoch)`."""
    return torch.optim.lr_scheduler.LambdaLR(optimiser, lambda epoch: rate_share(epoch, settings))


def rate_share(epoch: int, settings: TrainingOptions) -> float:
    """Return the factor of the learning rate in an epoch (counted from 0).

    The factor rises in equal steps over `warm_up` epochs. Then `step` multiplies it by `decay` every `decay_every`
    epochs, `cosine` lowers it along half a cosine to 0 at the end of the last epoch, and `constant` keeps it.
    """
    if epoch < settings.warm_up:
        return (epoch + 1) / (settings.warm_up + 1)
    if settings.schedule == "step":
        return settings.decay ** (epoch // settings.decay_every)
    if settings.schedule == "cosine":
        progress = (epoch - settings.warm_up) / (settings.epochs - settings.warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return 1.0


def _epoch(
    state: TrainingState, images: Batch, settings: TrainingOptions, show: Callable[[int, dict[str, float]], None]
) -> dict[str, float]:
    """Train one epoch and return the mean of every loss term; `show` is called with the step and the means."""
    state.method.train()
    size = settings.batch_size * settings.accumulate
    losses = Losses(state.epoch + 1, settings)
    for step, (batch, rows) in enumerate(prefetch(images, images.shuffled_rows(state.order).split(size)), start=1):
        losses.add(step, len(rows), optimiser_step(state.method, batch, rows, settings, state.optimiser))
        if step % READ_EVERY == 0:
            losses.read()
        show(step, losses.means)
    losses.read()
    return losses.means


class Losses:
    """Mean of every loss term over the images of an epoch.

    Terms of several steps are read from the device at once, because each read waits until the device is idle.
    """

    def __init__(self, epoch: int, settings: TrainingOptions) -> None:
        self.means: dict[str, float] = {}
        self._epoch, self._settings = epoch, settings
        self._sums: dict[str, float] = {}
        self._images = 0
        self._waiting: list[tuple[int, int, tuple[str, ...], Tensor]] = []  # step, images, names, values

    def add(self, step: int, images: int, terms: dict[str, Tensor]) -> None:
        """Queue the loss terms of a step, means over `images` images."""
        self._waiting.append((step, images, tuple(terms), torch.stack(list(terms.values()))))

    def read(self) -> None:
        """Read queued loss terms from the device into `means`; raise `DuplexError` if one is not finite."""
        if not self._waiting:
            return
        values = iter(torch.cat([values for *_, values in self._waiting]).tolist())
        for step, images, names, _ in self._waiting:
            self._images += images
            for name in names:
                value = next(values)
                if not math.isfinite(value):
                    rate, precision = self._settings.learning_rate, self._settings.precision
                    hint = "" if precision == "fp32" else f" or set precision to fp32 (it is {precision})"
                    raise DuplexError(
                        f"loss {name} became {value} in epoch {self._epoch}, step {step}; "
                        f"lower training.learning_rate (it is {rate:g}){hint}"
                    )
                self._sums[name] = self._sums.get(name, 0.0) + value * images
                self.means[f"loss_{name}"] = self._sums[name] / self._images
        self._waiting.clear()


def optimiser_step(
    method: AnyMethod, images: Batch, rows: Tensor, settings: TrainingOptions, optimiser: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Take one optimiser step over `accumulate` batches and return the mean of every loss term.

    `rows` [b] are rows of `images`, on the CPU. Tensors that the batches share (`Method.shared`, such as encoded text)
    are computed once; their gradients are summed and propagated once. Nothing in a step waits for the device.
    """
    optimiser.zero_grad(set_to_none=True)
    shared = checked(f"{method.class_name}.shared()", method.shared(), tuple)
    leaves = [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in shared
    ]
    inputs = type(shared)(*leaves) if hasattr(shared, "_fields") else tuple(leaves)  # may be a named tuple
    terms: dict[str, Tensor] = {}
    for batch_rows in rows.split(settings.batch_size):
        share = len(batch_rows) / len(rows)
        losses = method.losses(images[batch_rows], inputs)
        values = checked_losses(f"{method.class_name}.losses()", losses)
        values.backward(torch.full_like(values, share))
        method.after_batch()
        for name, value in zip(losses, (share * values.detach()).unbind(), strict=True):
            terms[name] = terms[name] + value if name in terms else value
    grads = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]
    reached = [value for value, grad in zip(shared, grads, strict=True) if grad is not None]
    torch.autograd.backward(reached, [grad for grad in grads if grad is not None])
    optimiser.step()
    method.after_step()
    return terms


def _validated(state: TrainingState, validate: Validate, settings: TrainingOptions) -> float:
    """Return the validation AUC; raise `DuplexError` if the last step left a tensor that is not finite."""
    for name, tensor in state.method.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise DuplexError(
                f"{name} diverged in the last step of epoch {state.epoch}; "
                f"lower training.learning_rate (it is {settings.learning_rate:g})"
            )
    return validate(state.method)


def _keep_best(state: TrainingState, auc: float, losses: dict[str, float]) -> None:
    """Add an epoch to the history and keep its tensors if its AUC is the best so far."""
    state.history.append({"epoch": state.epoch, **losses, "val_auc": auc})
    if auc > state.best_auc:
        state.best_auc, state.best_epoch = auc, state.epoch
        state.best = {name: tensor.detach().clone() for name, tensor in state.method.state_dict().items()}


def _reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of this process, which may have trained larger runs before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_resident() -> int:
    """Return the peak memory of this process in bytes: since the last reset on Linux, else since its start."""
    import resource

    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


STEPS = 2  # steps whose rows are read ahead


def prefetch(images: Batch, steps: Iterable[Tensor]) -> Iterator[tuple[Batch, Tensor]]:
    """Yield, for each optimiser step, a batch and the indices of its images that the step uses.

    `steps` yields indices [b] of `images` per step. With all inputs in memory the batch is `images`; with inputs on
    disk the batch holds the step's images only.
    """
    on_disk: list[Any] = [values for values in images.inputs.values() if not isinstance(values, Tensor)]
    if not on_disk:
        for rows in steps:
            yield images, rows
        return
    waiting: deque[Tensor] = deque()
    for rows in steps:
        for values in on_disk:
            values.expect(rows)
        waiting.append(rows)
        if len(waiting) > STEPS:
            yield images[waiting[0]], torch.arange(len(waiting.popleft()))
    for rows in waiting:
        yield images[rows], torch.arange(len(rows))
