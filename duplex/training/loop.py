"""The training loop: it keeps the best epoch and saves its state to continue a killed run."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from duplex.errors import DuplexError, UsageError
from duplex.features.tokens import Examples
from duplex.methods.base import Batch, Method
from duplex.methods.prompts import Prompts
from duplex.methods.team import ALONE, Team
from duplex.options import TrainingOptions
from duplex.system.processes import ProgressBar
from duplex.system.threads import float32_arithmetic, peak_resident, reset_peak_memory, threads
from duplex.training.checkpoint import read_header, read_tensors, write_model
from duplex.training.compiled import compiled_encoders
from duplex.training.devices import divide, require_equal
from duplex.training.logs import EpochReport, StepReport, TrainingHooks
from duplex.training.scoring import Validated
from duplex.training.thread_choice import choose_threads


def make_optimiser(
    method: Method[Any], settings: TrainingOptions, hooks: TrainingHooks = TrainingHooks()
) -> torch.optim.Optimizer:
    """The optimiser of a method's parameters (a dummy if it has none), by `hooks` or `settings`."""
    groups = [{**group, "params": list(group["params"])} for group in method.groups()]
    if not groups:
        groups.append({"params": [torch.nn.Parameter(torch.zeros(1))]})
    devices = set()
    for group in groups:
        devices |= {parameter.device.type for parameter in group["params"]}
    options: dict[str, Any] = {"eps": settings.eps, "weight_decay": settings.weight_decay}
    if devices == {"cuda"}:
        options["fused"] = True  # one kernel for all parameters
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": partial(torch.optim.Adam, **options),
        "adamw": partial(torch.optim.AdamW, **options),
    }
    make = hooks.optimiser or kinds[settings.optimiser]
    optimiser = make([{"lr": settings.learning_rate, **group} for group in groups])
    fixed = []  # vectors of words without training images, which weight decay would change
    for module in method.modules():
        for name, rows in getattr(module, "fixed_rows", {}).items():
            table = getattr(module, name)
            if len(rows):
                fixed.append((table, rows.to(table.device), table.detach()[rows]))

    @torch.no_grad()
    def restore(*_: Any) -> None:
        for table, rows, start in fixed:
            table[rows] = start

    optimiser.register_step_post_hook(restore)
    return optimiser


def make_schedule(
    optimiser: torch.optim.Optimizer, settings: TrainingOptions, hooks: TrainingHooks = TrainingHooks()
) -> LRScheduler:
    """The learning rates' factor for each epoch, by `hooks.schedule` or else by `settings`."""

    def share(epoch: int) -> float:
        if hooks.schedule is not None:
            return float(hooks.schedule(epoch))
        return rate_share(epoch, settings)

    return LambdaLR(optimiser, share)


def rate_share(epoch: float, settings: TrainingOptions) -> float:
    """The factor by which the learning rate is multiplied in an epoch, counted from 0, or within one."""
    if settings.schedule == "step":
        return float(settings.decay ** (epoch // settings.decay_every))
    if settings.schedule in ("cosine", "cosine_steps"):
        return 0.5 * (1 + math.cos(math.pi * min(epoch / settings.epochs, 1.0)))
    return 1.0


SAVED = ("key", "threads", "epoch", "progress", "best_epoch", "best_value", "chosen_by", "history")


@dataclass
class TrainingState:
    """Everything that the next epoch depends on, in a form that can be saved."""

    key: str  # hash of options, data and seed
    method: Method[Any]
    optimiser: torch.optim.Optimizer
    schedule: LRScheduler
    order: torch.Generator  # draws the order of the images
    device: torch.device
    threads: int = 0  # CPU threads of training, once they are chosen
    epoch: int = 0
    progress: float = 0.0  # share of the training that is done: of its steps or, if larger, of its time
    best_epoch: int = 0
    best_value: float = -math.inf  # of the validation metric that chooses the epoch
    chosen_by: str = "last"  # name of this metric; without validation, the last epoch is kept
    history: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)  # tensors of the best epoch
    team: Team = ALONE  # the processes that take the same steps

    def keep(self) -> None:
        """Make the current epoch the best one."""
        self.best_epoch = self.epoch
        tensors = self.method.state_dict()
        self.best = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def save(self, path: Path) -> None:
        """Write the state to a file atomically."""
        moments = self.optimiser.state_dict()
        tensors = {f"method.{name}": tensor for name, tensor in self.method.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for row, state in moments["state"].items():
            tensors |= {f"optimiser.{row}.{name}": tensor for name, tensor in state.items()}
        tensors |= {"random.order": self.order.get_state(), "random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        fields = {name: getattr(self, name) for name in SAVED}
        fields |= {"groups": moments["param_groups"], "schedule": self.schedule.state_dict()}
        write_model(path, "unfinished training", fields, tensors)

    def load(self, path: Path) -> None:
        """Restore the state from a file; for that of another run, only raises `DuplexError`."""
        header = read_header(path, "unfinished training")
        fields = header.fields
        if fields["key"] != self.key:
            raise DuplexError(f"settings, data, code or hardware changed since {path} was saved; training starts over")
        tensors = read_tensors(header)
        self.method.load_state_dict(_under("method.", tensors))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("optimiser.", tensors).items():
            row, key = name.split(".")
            moments.setdefault(int(row), {})[key] = tensor
        self.optimiser.load_state_dict({"state": moments, "param_groups": fields["groups"]})
        self.schedule.load_state_dict(fields["schedule"])
        best = _under("best.", tensors)
        self.best = {name: tensor.to(self.device) for name, tensor in best.items()}
        self.order.set_state(tensors["random.order"])
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"])
        for name in SAVED:
            setattr(self, name, fields[name])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@dataclass
class Pace:
    """How far a training has come after each step: its share of the steps or of the time."""

    steps: int  # of all epochs
    seconds: float | None = None  # limit; None: every epoch is trained
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._before = self.clock()

    def step(self) -> float:
        """The share of the training that the last step was, also by the time since the one before."""
        by_steps = 1 / self.steps
        if self.seconds is None:
            return by_steps
        now = self.clock()
        taken = now - self._before
        self._before = now
        return max(by_steps, taken / self.seconds)


READ_EVERY = 8  # steps between reads of the losses from the device
STEPS = 2  # steps whose rows are read ahead


def train_epoch(
    state: TrainingState,
    images: Batch,
    settings: TrainingOptions,
    show: Callable[[int, dict[str, float]], None],
    hooks: TrainingHooks = TrainingHooks(),
    pace: Pace | None = None,
) -> dict[str, float]:
    """Train one epoch, or part of it if the time of `pace` ends; returns each loss term's mean.

    Calls `show` with the means so far after each step.
    """
    method = state.method
    method.train()
    epoch = state.epoch + 1
    size = settings.batch_size * settings.accumulate
    losses = EpochLosses(epoch, settings)
    per_epoch = math.ceil(len(images) / size)
    pace = pace or Pace(settings.epochs * per_epoch)
    earlier_steps = state.epoch * per_epoch
    steps = prefetch(images, shuffled_rows(images, state.order).split(size))
    for step, (batch, rows) in enumerate(steps, start=1):
        if settings.schedule == "cosine_steps" and hooks.schedule is None:
            _set_rates(state.optimiser, rate_share(state.progress * settings.epochs, settings))
        terms = optimiser_step(method, batch, rows, settings, state.optimiser, state.team)
        state.progress += pace.step()
        losses.add(step, len(rows), terms)
        if hooks.reads_steps or step % READ_EVERY == 0:
            losses.flush()
        if hooks.reads_steps:
            rates = group_learning_rates(state.optimiser)
            hooks.step(StepReport(method, epoch, earlier_steps + step, losses.last, rates))
        show(step, losses.means)
        if _is_out_of_time(state, pace):
            break
    losses.flush()
    return losses.means


def _set_rates(optimiser: torch.optim.Optimizer, share: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = share * group["initial_lr"]


def _is_out_of_time(state: TrainingState, pace: Pace) -> bool:
    return pace.seconds is not None and state.progress >= 1


def shuffled_rows(images: Batch, order: torch.Generator) -> Tensor:
    """All images' indices, shuffled by `order`; on disk, neighbours stay close together."""
    for values in images.inputs.values():
        if not isinstance(values, Tensor):
            return values.shuffled_rows(order)
    return torch.randperm(len(images), generator=order)


class EpochLosses:
    """Mean of each loss term over an epoch's images; terms of several steps are read at once."""

    def __init__(self, epoch: int, settings: TrainingOptions) -> None:
        self.means: dict[str, float] = {}
        self.last: dict[str, float] = {}  # of the last step that was read
        self._epoch = epoch
        self._settings = settings
        self._sums: dict[str, float] = {}
        self._images = 0
        # step, images, names of terms, values
        self._waiting: list[tuple[int, int, tuple[str, ...], Tensor]] = []

    def add(self, step: int, images: int, terms: dict[str, Tensor]) -> None:
        """Queue a step's loss terms, which are means over `images` images, until `flush`."""
        self._waiting.append((step, images, tuple(terms), torch.stack(list(terms.values()))))

    def flush(self) -> None:
        """Read queued loss terms and update `means`; raises `DuplexError` for NaN or infinity."""
        if not self._waiting:
            return
        values = iter(torch.cat([values for *_, values in self._waiting]).tolist())
        for step, images, names, _ in self._waiting:
            self._images += images
            self.last = {}
            for name in names:
                value = next(values)
                if not math.isfinite(value):
                    settings = self._settings
                    advice = f"lower training.learning_rate (it is {settings.learning_rate:g})"
                    if settings.precision != "fp32":
                        advice += f" or set training.precision to fp32 (it is {settings.precision})"
                    place = f"epoch {self._epoch}, step {step}"
                    raise DuplexError(f"the loss {name!r} became {value} in {place}; {advice}")
                self.last[name] = value
                self._sums[name] = self._sums.get(name, 0.0) + value * images
                self.means[f"loss_{name}"] = self._sums[name] / self._images
        self._waiting.clear()


def optimiser_step(
    method: Method[Any],
    images: Batch,
    rows: Tensor,
    settings: TrainingOptions,
    optimiser: torch.optim.Optimizer,
    team: Team = ALONE,
) -> dict[str, Tensor]:
    """Take one optimiser step on the images of indices `rows`; returns each loss term's mean."""
    optimiser.zero_grad(set_to_none=True)
    shared = method.shared()
    leaves = [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in shared
    ]
    inputs = type(shared)(*leaves) if hasattr(shared, "_fields") else tuple(leaves)  # named tuple
    terms: dict[str, Tensor] = {}
    for batch_rows in rows.split(settings.batch_size):
        share = len(batch_rows) / len(rows)
        losses = method.losses(images[batch_rows], inputs)
        values = torch.stack(list(losses.values()))
        values.backward(torch.full_like(values, share / team.size))
        method.after_batch()
        for name, value in zip(losses, (share * values.detach()).unbind(), strict=True):
            terms[name] = terms[name] + value if name in terms else value
    grads = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]
    reached = [value for value, grad in zip(shared, grads, strict=True) if grad is not None]
    torch.autograd.backward(reached, [grad for grad in grads if grad is not None])
    parameters: list[Tensor] = []
    for group in optimiser.param_groups:
        parameters += group["params"]
    team.add_gradients(parameters)
    if settings.clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
    optimiser.step()
    method.after_step()
    return terms


def group_learning_rates(optimiser: torch.optim.Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimiser.param_groups)


def prefetch(images: Batch, steps: Iterable[Tensor]) -> Iterator[tuple[Batch, Tensor]]:
    """For each step (`steps`: image indices), yield a batch and the positions of its images in it."""
    on_disk: list[Any] = [each for each in images.inputs.values() if not isinstance(each, Tensor)]
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


Validate = Callable[[Method[Any]], float | Validated]  # float: the AUC


@dataclass(frozen=True)
class ResumePoint:
    """Where unfinished training is saved, so that a killed run can continue."""

    label: str = "training"  # for progress and messages
    path: Path | None = None  # written after each epoch; a killed run continues from it bit by bit
    key: str = ""  # hash of everything that the run depends on
    seconds: float | None = None  # after which training ends, within an epoch if need be; None: at its last
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class TrainingResult:
    """Result of training; the method itself then holds the tensors of the best epoch."""

    best_epoch: int
    best_auc: float  # validation AUC of the best epoch; NaN without validation
    history: list[dict[str, float]]  # per epoch: losses and validation metrics
    timing: dict[str, float]  # seconds per epoch, peak memory in bytes, whether compiled, the method's sizes
    selected_by: str = "auc"  # validation metric that chose the best epoch; `last`: it is the last


def train(
    method: Method[Any],
    examples: Examples,
    settings: TrainingOptions,
    seed: int,
    validate: Validate | None,
    resume: ResumePoint = ResumePoint(),
    hooks: TrainingHooks = TrainingHooks(),
    team: Team = ALONE,
) -> TrainingResult:
    """Train a method in place on images; it then holds the tensors of its best epoch.

    validate: called after epochs, from epoch 0 (untrained) on; None: the last epoch is kept.
    team: the processes that all call this with equal arguments; the first one validates and saves.
    """
    if not len(examples):
        raise DuplexError(
            "no training image is readable; fix those that `duplex data check NAME` lists, then run `duplex extract`"
        )
    with threads(settings.threads), nullcontext() if hooks.log is None else closing(hooks.log):
        reset_peak_memory(examples.compositions.device)
        labels = examples.compositions.clone()  # other runs read them too
        images = Batch(examples.inputs, labels, labels.cpu().numpy())
        method.checkpointing = settings.checkpointing
        state = _begin(method, images, settings, seed, validate, resume, hooks, team)
        epochs = settings.epochs if method.groups() else 0
        if epochs:
            _drop_words(method, settings.word_dropout)
            _set_threads(state, images, settings, resume.label)
        seconds = 0.0
        trained = 0
        steps = math.ceil(len(images) / (settings.batch_size * settings.accumulate))
        pace = Pace(max(1, epochs * steps), resume.seconds, resume.clock)
        with (
            compiled_encoders(method, images, settings, resume.label)
            if settings.compile
            else nullcontext() as compiled,
            ProgressBar(f"{resume.label}, steps", 0 if team.rank else epochs * steps) as bar,
        ):

            def show(step: int, losses: dict[str, float]) -> None:
                aucs = [row["val_auc"] for row in state.history if "val_auc" in row]
                bar.show(state.epoch * steps + step, {**losses, "val AUC": aucs[-1]} if aucs else losses)

            show(0, {})
            while state.epoch < epochs and not _is_at_its_end(state, settings, pace):
                start = resume.clock()
                with float32_arithmetic(settings.precision):
                    losses = train_epoch(state, images, settings, show, hooks, pace)
                seconds += resume.clock() - start
                trained += 1
                state.schedule.step()
                state.epoch += 1
                due = state.epoch % settings.validate_every == 0
                validates = due or state.epoch == epochs or _is_out_of_time(state, pace)
                method.eval()
                if validates or method.trains_on_buffers:
                    method.on_features_changed(images)
                method.after_epoch(state.epoch)
                if validates:
                    _check_finite(state, settings)
                validated = _validated(state, validate, settings) if validates else None
                _end_epoch(state, validated, losses, hooks)
                show(0, losses)
                if resume.path is not None and team.rank == 0:
                    state.save(resume.path)
        if validate is None:
            state.keep()
        method.load_state_dict(state.best)
        method.eval()
        cuda = state.device.type == "cuda"
        timing = {  # kept out of the metrics because it varies
            "seconds_per_epoch": seconds / trained if trained else 0.0,
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else peak_resident(),
            **({"threads": state.threads} if epochs and not cuda else {}),
            **({} if compiled is None else {"compiled": compiled}),
            **method.summary(),
        }
        best_auc = state.history[state.best_epoch].get("val_auc", math.nan)
        return TrainingResult(state.best_epoch, best_auc, state.history, timing, state.chosen_by)


def _begin(
    method: Method[Any],
    images: Batch,
    settings: TrainingOptions,
    seed: int,
    validate: Validate | None,
    resume: ResumePoint,
    hooks: TrainingHooks,
    team: Team,
) -> TrainingState:
    divide(method, settings, team)
    optimiser = make_optimiser(method, settings, hooks)
    schedule = make_schedule(optimiser, settings, hooks)
    order = torch.Generator().manual_seed(seed)
    device = images.compositions.device
    state = TrainingState(resume.key, method, optimiser, schedule, order, device, team=team)
    torch.manual_seed(seed)
    if resume.path is not None and resume.path.exists():
        try:
            state.load(resume.path)
            print(f"{resume.label}: continuing after epoch {state.epoch}", file=sys.stderr)
            return state
        except DuplexError as error:
            print(f"{resume.label}: {error}", file=sys.stderr)
    only_the_end = settings.select == "last" and settings.validate_every >= settings.epochs and method.groups()
    first = None if only_the_end else _validated(state, validate, settings)
    _end_epoch(state, first, {}, hooks)
    return state


def _drop_words(method: Method[Any], rate: float) -> None:
    prompts = [part for part in method.modules() if isinstance(part, Prompts)]
    learned = [part for part in prompts if part.vocabulary == "learned"]
    if rate and not learned:
        problem = f"word_dropout is {rate:g}, but {method.class_name} has no learned word vectors"
        raise UsageError(f"{problem}; leave out word_dropout")
    for part in learned:
        part.word_dropout = rate


def _set_threads(state: TrainingState, images: Batch, settings: TrainingOptions, label: str) -> None:
    if not state.threads:
        state.threads = torch.get_num_threads()
        seconds: dict[int, float] = {}
        if settings.threads == "auto" and state.team == ALONE:  # processes could choose different numbers
            state.threads, seconds = choose_threads(state.method, images, settings.batch_size)
        if seconds:
            tried = [f"{1000 * value:.0f} ms with {count}" for count, value in seconds.items()]
            times = f"time per step: {', '.join(tried)}"
            print(f"{label}: CPU threads: {state.threads} ({times})", file=sys.stderr)
    torch.set_num_threads(state.threads)


def _check_finite(state: TrainingState, settings: TrainingOptions) -> None:
    for name, tensor in state.method.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise DuplexError(
                f"the tensor {name} diverged in the last step of epoch {state.epoch}; "
                f"lower training.learning_rate (it is {settings.learning_rate:g})"
            )


def _validated(state: TrainingState, validate: Validate | None, settings: TrainingOptions) -> Validated | None:
    if validate is None:
        return None
    found = state.team.by_first(partial(validate, state.method))
    validated = found if isinstance(found, Validated) else Validated({"auc": found})
    if settings.select == "last" and validated.chosen_by == "auc":  # no metric of the caller
        return Validated({**validated.metrics, "last": float(state.epoch)}, "last")
    return validated


def _end_epoch(
    state: TrainingState, validated: Validated | None, losses: dict[str, float], hooks: TrainingHooks
) -> None:
    # adds the epoch to the history, keeps it if it is the best so far, and reports it
    require_equal(state.method, state.team)
    metrics = {} if validated is None else validated.metrics
    row = {f"val_{name}": value for name, value in metrics.items()}
    state.history.append({"epoch": state.epoch, **losses, **row})
    is_best = validated is not None and validated.value > state.best_value
    if validated is not None and is_best:
        state.best_value = validated.value
        state.chosen_by = validated.chosen_by
        state.keep()
    means = {name.removeprefix("loss_"): mean for name, mean in losses.items()}
    rates = group_learning_rates(state.optimiser)
    hooks.epoch(EpochReport(state.method, state.epoch, means, rates, metrics, is_best))


def _is_at_its_end(state: TrainingState, settings: TrainingOptions, pace: Pace) -> bool:
    if _is_out_of_time(state, pace):
        return True
    # patience is asked after validations alone, so that every epoch before has been compared
    is_validated = "val_auc" in state.history[-1]
    return is_validated and state.epoch - state.best_epoch >= (settings.patience or math.inf)
