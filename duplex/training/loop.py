"""The training loop of all methods, which keeps the tensors of the epoch with the best validation metric."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duplex.errors import DuplexError, UsageError
from duplex.features.examples import Examples
from duplex.methods.base import Batch, Method
from duplex.options import TrainingOptions
from duplex.system.memory import peak_resident, reset_peak_memory
from duplex.system.precision import float32_arithmetic
from duplex.system.progress import ProgressBar
from duplex.system.threads import threads
from duplex.training.epoch import learning_rates, train_epoch
from duplex.training.hooks import EpochReport, TrainingHooks
from duplex.training.optimiser import make_optimiser, make_schedule
from duplex.training.resume import TrainingState
from duplex.training.scoring import check_shapes
from duplex.training.thread_choice import choose_threads

AnyMethod = Method[Any]
Validate = Callable[[AnyMethod], float | Mapping[str, float]]  # AUC, or metrics of which the last chooses the epoch


@dataclass(frozen=True)
class ResumePoint:
    """File from which a killed run continues, and the run's key, a hash of everything that the run depends on."""

    label: str = "training"  # for progress and messages
    path: Path | None = None  # written after each epoch; a killed run continues from it bit-identically
    key: str = ""  # hash of everything that the run depends on


@dataclass(frozen=True)
class TrainingResult:
    """Result of training: best epoch, history and timing; the method itself holds the tensors of the best epoch."""

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
        raise DuplexError(
            "no training image is readable; `duplex data check NAME` lists the images that cannot be read"
        )
    check_precision(method, settings)
    check_shapes(method.class_name, method.context.inputs, examples.inputs)
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
    present = getattr(method.context.text, "precision", settings.precision)
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
    labels = examples.compositions.clone()  # other runs read them too
    images = Batch(examples.inputs, labels, labels.cpu().numpy())
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
                losses = train_epoch(state, images, settings, show, hooks)
            seconds += time.perf_counter() - start
            trained += 1
            state.schedule.step()
            state.epoch += 1
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
        **method.summary(),
    }
    best = state.history[state.best_epoch]
    return TrainingResult(state.best_epoch, best["val_auc"], state.history, timing, _selection_metric(best))


def _begin(
    method: AnyMethod,
    images: Batch,
    settings: TrainingOptions,
    seed: int,
    validate: Validate,
    resume: ResumePoint,
    hooks: TrainingHooks,
) -> TrainingState:
    """Return a new training state or, if `resume` names a matching file, the state that a killed run saved there."""
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
    """Set torch's number of CPU threads: the number that the interrupted run used, else the training option `threads`.

    For `threads: auto`, a few timed steps choose between one thread and all.
    """
    if not state.threads:
        state.threads = torch.get_num_threads()
        seconds: dict[int, float] = {}
        if settings.threads == "auto":
            state.threads, seconds = choose_threads(state.method, images, settings.batch_size)
        if seconds:
            tried = ", ".join(f"{1000 * value:.0f} ms with {count}" for count, value in seconds.items())
            print(f"{label}: CPU threads: {state.threads} (time per step: {tried})", file=sys.stderr)
    torch.set_num_threads(state.threads)


def _validated(state: TrainingState, validate: Validate, settings: TrainingOptions) -> dict[str, float]:
    """Return a method's validation metrics after an epoch; raise `DuplexError` if one of its tensors is not finite."""
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
    """Add an epoch to the history and call the hooks; copy the method's tensors if the epoch is the best so far."""
    row = {"epoch": state.epoch, **losses, **{f"val_{name}": value for name, value in metrics.items()}}
    state.history.append(row)
    value = metrics[_selection_metric(row)]
    is_best = value > state.best_value
    if is_best:
        state.best_value, state.best_epoch = value, state.epoch
        state.best = {name: tensor.detach().clone() for name, tensor in state.method.state_dict().items()}
    means = {name.removeprefix("loss_"): mean for name, mean in losses.items()}
    hooks.epoch(EpochReport(state.method, state.epoch, means, learning_rates(state.optimiser), metrics, is_best))


def _selection_metric(row: Mapping[str, float]) -> str:
    """Return the name of the metric that chooses the best epoch: the last column of a `row` of the training history."""
    return list(row)[-1].removeprefix("val_")
