"""The training loop of all methods, which keeps the tensors of the epoch with the best validation metric."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.features.examples import Examples
from duplex.methods.base import Batch, Method
from duplex.options import TrainingOptions
from duplex.system.memory import peak_resident, reset_peak_memory
from duplex.system.precision import float32_arithmetic
from duplex.system.progress import ProgressBar
from duplex.system.threads import threads
from duplex.training.hooks import EpochReport, StepReport, TrainingHooks
from duplex.training.method_checks import check_shapes, checked, checked_losses, read_only
from duplex.training.optimiser import make_optimiser, make_schedule
from duplex.training.resume import TrainingState
from duplex.training.thread_choice import choose_threads

READ_EVERY = 8  # steps between reads of the losses from the device
AnyMethod = Method[Any]
Validate = Callable[[AnyMethod], float | Mapping[str, float]]  # AUC, or metrics of which the last chooses the epoch


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
    best_auc: float  # validation AUC of the best epoch
    history: list[dict[str, float]]
    timing: dict[str, float]  # seconds per epoch, peak bytes, sizes
    selected_by: str = "auc"  # validation metric that chose the best epoch


def train(
    method: AnyMethod,
    examples: Examples,
    settings: TrainingOptions,
    seed: int,
    validate: Validate,
    resume: ResumePoint = ResumePoint(),
    hooks: TrainingHooks = TrainingHooks(),
) -> TrainingResult:
    """Train a method in place and load the tensors of its best epoch.

    Epoch 0 is the untrained method, and the only epoch of a method without parameters to train.

    examples: training images.
    settings: training options.
    validate: function that returns a method's validation AUC (fraction), or metrics by name of which the last one
    chooses the epoch (see `duplex.training.selection`).
    resume: file in which the training state is saved after each epoch, and from which a killed run continues.
    hooks: the caller's functions, called during training.
    """
    if not len(examples):
        raise DuplexError("no training image is readable")
    check_precision(method, settings)
    check_shapes(method.class_name, method.task.inputs, examples.inputs)
    check_labels(method, examples)
    with threads(settings.threads), nullcontext() if hooks.log is None else closing(hooks.log):
        return _train(method, examples, settings, seed, validate, resume, hooks)


def check_labels(method: AnyMethod, examples: Examples) -> None:
    """Raise `UsageError` for a training image whose composition is not in the method's label space."""
    wrong = (examples.compositions < 0) | (examples.compositions >= method.labels.size)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise UsageError(
            f"training image {place} has the composition {int(examples.compositions[place])}; expected a number from 0 "
            f"to {method.labels.size - 1}"
        )


def check_precision(method: AnyMethod, settings: TrainingOptions) -> None:
    """Raise `UsageError` if a method's text tower runs in another precision than the training options set."""
    present = getattr(method.task.text, "precision", settings.precision)
    if present != settings.precision:
        raise UsageError(
            f"training.precision is {settings.precision} and the text tower was loaded in {present}; load it with "
            f"load_encoder(..., precision={settings.precision!r}), or set precision to {present}"
        )


def _train(
    method: AnyMethod,
    examples: Examples,
    settings: TrainingOptions,
    seed: int,
    validate: Validate,
    resume: ResumePoint,
    hooks: TrainingHooks,
) -> TrainingResult:
    reset_peak_memory(examples.compositions.device)
    images = Batch(examples.inputs, examples.compositions, examples.compositions.cpu().numpy())
    method.checkpointing = settings.checkpointing
    state = _begin(method, images, settings, seed, validate, resume, hooks)
    epochs = settings.epochs if method.groups() else 0
    if epochs:
        _set_threads(state, images, settings, resume.label)
    seconds, trained = 0.0, 0
    steps = math.ceil(len(images) / (settings.batch_size * settings.accumulate))
    with ProgressBar(f"{resume.label}, steps", epochs * steps) as bar:

        def show(step: int, losses: dict[str, float]) -> None:
            bar.show(state.epoch * steps + step, {**losses, "val AUC": state.history[-1]["val_auc"]})

        show(0, {})
        while state.epoch < epochs and state.epoch - state.best_epoch < (settings.patience or math.inf):
            start = time.perf_counter()
            with float32_arithmetic(settings.precision):
                losses = _epoch(state, images, settings, show, hooks)
            seconds += time.perf_counter() - start
            trained += 1
            state.schedule.step()
            state.epoch += 1
            with read_only(f"{method.class_name}.on_features_changed()", images.inputs):
                method.eval().on_features_changed(images)
            method.after_epoch(state.epoch)
            _keep_best(state, _validated(state, validate, settings), losses, hooks)
            show(0, losses)
            if resume.path is not None:
                state.save(resume.path)
    method.load_state_dict(state.best)
    method.eval()
    cuda = state.device.type == "cuda"
    timing = {  # kept out of the metrics because it varies
        "seconds_per_epoch": seconds / trained if trained else 0.0,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else peak_resident(),
        **({"threads": state.threads} if epochs and not cuda else {}),
        **checked(f"{method.class_name}.summary()", method.summary(), dict),
    }
    best = state.history[state.best_epoch]
    return TrainingResult(state.best_epoch, best["val_auc"], state.history, timing, _selecting(best))


def _begin(
    method: AnyMethod,
    images: Batch,
    settings: TrainingOptions,
    seed: int,
    validate: Validate,
    resume: ResumePoint,
    hooks: TrainingHooks,
) -> TrainingState:
    """Return a new training state, or the state that an earlier run with the same key saved."""
    optimiser, order = make_optimiser(method, settings, hooks), torch.Generator().manual_seed(seed)
    schedule = make_schedule(optimiser, settings, hooks)
    state = TrainingState(resume.key, method, optimiser, schedule, order, images.compositions.device)
    torch.manual_seed(seed)
    if resume.path is not None and resume.path.exists():
        reason = state.load(resume.path)
        if reason is None:
            print(f"{resume.label}: continuing after epoch {state.epoch}", file=sys.stderr)
            return state
        print(f"{resume.label}: {resume.path} {reason}; starting from the beginning", file=sys.stderr)
    _keep_best(state, _as_metrics(validate(method)), {}, hooks)
    return state


def _set_threads(state: TrainingState, images: Batch, settings: TrainingOptions, label: str) -> None:
    """Set torch's number of CPU threads: that of the interrupted run, that of the options or, for `auto`, by timing."""
    if not state.threads:
        state.threads = torch.get_num_threads()
        seconds: dict[int, float] = {}
        if settings.threads == "auto":
            state.threads, seconds = choose_threads(state.method, images, settings.batch_size)
        if seconds:
            tried = ", ".join(f"{1000 * value:.0f} ms per step with {count}" for count, value in seconds.items())
            print(f"{label}: threads: {state.threads} ({tried})", file=sys.stderr)
    torch.set_num_threads(state.threads)


def _epoch(
    state: TrainingState,
    images: Batch,
    settings: TrainingOptions,
    show: Callable[[int, dict[str, float]], None],
    hooks: TrainingHooks = TrainingHooks(),
) -> dict[str, float]:
    """Train one epoch and return the mean of each loss term; `show` is called with the step and the means so far."""
    state.method.train()
    size = settings.batch_size * settings.accumulate
    losses = Losses(state.epoch + 1, settings)
    earlier_steps = state.epoch * math.ceil(len(images) / size)
    for step, (batch, rows) in enumerate(prefetch(images, images.shuffled_rows(state.order).split(size)), start=1):
        losses.add(step, len(rows), optimiser_step(state.method, batch, rows, settings, state.optimiser))
        if hooks.reads_steps or step % READ_EVERY == 0:
            losses.read()
        if hooks.reads_steps:
            rates = _rates(state.optimiser)
            hooks.step(StepReport(state.method, state.epoch + 1, earlier_steps + step, losses.last, rates))
        show(step, losses.means)
    losses.read()
    return losses.means


class Losses:
    """Mean of every loss term over the images of an epoch.

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
        """Queue the loss terms of a step, each a mean over `images` images, until `read` is called."""
        self._waiting.append((step, images, tuple(terms), torch.stack(list(terms.values()))))

    def read(self) -> None:
        """Read queued loss terms from the device into `means`; raise `DuplexError` if one is not finite."""
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
    if settings.clip is not None:
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
    optimiser.step()
    method.after_step()
    return terms


def _validated(state: TrainingState, validate: Validate, settings: TrainingOptions) -> dict[str, float]:
    """Return the validation metrics; raise `DuplexError` if the last step left a tensor that is not finite."""
    for name, tensor in state.method.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise DuplexError(
                f"{name} diverged in the last step of epoch {state.epoch}; "
                f"lower training.learning_rate (it is {settings.learning_rate:g})"
            )
    return _as_metrics(validate(state.method))


def _as_metrics(result: float | Mapping[str, float]) -> dict[str, float]:
    return dict(result) if isinstance(result, Mapping) else {"auc": result}


def _keep_best(state: TrainingState, metrics: dict[str, float], losses: dict[str, float], hooks: TrainingHooks) -> None:
    """Add the finished epoch to the history, report it, and copy the tensors if its last metric is the best so far."""
    row = {"epoch": state.epoch, **losses, **{f"val_{name}": value for name, value in metrics.items()}}
    state.history.append(row)
    value = metrics[_selecting(row)]
    is_best = value > state.best_value
    if is_best:
        state.best_value, state.best_epoch = value, state.epoch
        state.best = {name: tensor.detach().clone() for name, tensor in state.method.state_dict().items()}
    means = {name.removeprefix("loss_"): mean for name, mean in losses.items()}
    hooks.epoch(EpochReport(state.method, state.epoch, means, _rates(state.optimiser), metrics, is_best))


def _selecting(row: Mapping[str, float]) -> str:
    """Return the name of the metric that chooses the epoch, the last column of a `row` of the history."""
    return list(row)[-1].removeprefix("val_")


def _rates(optimiser: torch.optim.Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimiser.param_groups)


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
