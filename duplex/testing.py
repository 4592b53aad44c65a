"""Checks for authors of methods: whether training, evaluation and export work with a class.

    check_method(MyMethod, {"width": 32})

The first violation of the protocol of methods (docs/your_method.md) raises `MethodFault`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.artifacts import RunPaths
from duplex.config.params import EvaluationParams
from duplex.encoders.base import TextTower, load_encoder
from duplex.features.tokens import Examples
from duplex.labels import WORLDS, Ints, LabelSpace
from duplex.methods import portable
from duplex.methods.base import Batch, Inputs, Method, MethodContext, PrimitiveVectors
from duplex.methods.prompts import encode_words
from duplex.methods.registry import KNOWN_NEEDS, temporary_kind
from duplex.options import OptionError, Options, TrainingOptions
from duplex.recognition.export import RunFacts, export
from duplex.recognition.trained import TrainedRun, open_trained
from duplex.recognition.worlds import calibration_for, evaluate_world, term_metrics
from duplex.system.threads import in_initial_modes
from duplex.training.checkpoint import load_checkpoint
from duplex.training.inputs import RunInputs
from duplex.training.loop import make_optimiser, optimiser_step, shuffled_rows
from duplex.training.run import MethodSpec, train_run

IMAGES = 40
PATCHES = 4
WIDTH = 8
CPU = torch.device("cpu")
SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=8, epochs=1)
STATES = ("red", "blue", "striped", "hollow")
OBJECTS = ("circle", "star", "heart")


class MethodFault(AssertionError):
    """Raised if a class violates the protocol of methods; the message names class and fault."""


@in_initial_modes()
def check_method(kind: type[Method[Any]], options: Mapping[str, Any] | None = None) -> None:
    """Check that a class keeps to the protocol of methods (docs/your_method.md); raises `MethodFault` otherwise.

    kind: the class, a subclass of `Method`.
    options: the method's options by name; None: the defaults.
    """
    try:
        parsed = _check_options(kind, dict(options or {}))
        needs = kind.needs(parsed)
        unknown = sorted(needs - set(KNOWN_NEEDS))
        _demand(not unknown, kind, f"needs() returns {unknown[:1]}; known: {', '.join(KNOWN_NEEDS)}")
        _demand(needs & {"cls", "patch"}, kind, "needs() returns neither cls nor patch")
        method = _start(kind, parsed)
        _check_device(method)
        _check_losses(method)
        _check_training(kind, parsed)
        _check_scores(method)
        _check_reload(kind, parsed, method)
        _check_inspectable(method)
        _check_predictions(method)
        with temporary_kind(kind) as name, TemporaryDirectory() as folder:
            _check_run(name, parsed, Path(folder))
    except (MethodFault, OptionError):
        raise
    except Exception as error:
        message = f"{kind.__name__}: {type(error).__name__}: {' '.join(str(error).split())}"
        raise MethodFault(message) from error


def small_labels() -> LabelSpace:
    """A label space of 12 compositions: 8 seen, 2 unseen in val and 2 unseen in test."""
    pairs = [(s, o) for s in STATES for o in OBJECTS]
    seen = [pairs[i] for i in (0, 1, 3, 5, 7, 8, 9, 10)]
    val = [*seen[:2], pairs[2], pairs[4]]
    test = [*seen[2:4], pairs[6], pairs[11]]
    return LabelSpace.from_pairs({"train": seen, "val": val, "test": test})


@cache
def _tower() -> TextTower:
    tower: TextTower = load_encoder("tiny", towers="text").text
    return tower


def small_context() -> MethodContext:
    """The context to build a method with in a small test: labels, shapes, text tower, words."""
    labels = small_labels()
    tower = _tower()
    inputs = {"cls": (tower.dim,), "patch": (PATCHES, WIDTH)}
    return MethodContext(labels, inputs, tower, PrimitiveVectors(*encode_words(labels, tower)))


def small_batch(count: int, seed: int = 0, split: str = "train") -> Batch:
    """`count` images with random patch tokens, and CLS features that form a cluster per pair."""
    labels = small_labels()
    random = torch.Generator().manual_seed(seed)
    listed = torch.as_tensor(labels.pairs[split])
    compositions = listed[torch.arange(count) % len(listed)]
    other = torch.Generator().manual_seed(99)
    centres = normalize(torch.randn(labels.size, _tower().dim, generator=other), dim=-1)
    z = centres[compositions] + 0.02 * torch.randn(count, _tower().dim, generator=random)
    patches = torch.randn(count, PATCHES, WIDTH, generator=random).half()
    return Batch({"cls": z, "patch": patches}, compositions)


def _demand(condition: object, kind: object, fault: str) -> None:
    if not condition:
        name = kind.__name__ if isinstance(kind, type) else type(kind).__name__
        raise MethodFault(f"{name}: {fault}")


def _demand_unchanged(method: Method[Any], place: str, batch: Batch, original: Batch) -> None:
    for name, values in original.inputs.items():
        _demand(torch.equal(values, batch.inputs[name]), method, f"{place} changes the cached input {name!r}")


def _check_options(kind: type[Method[Any]], record: dict[str, Any]) -> Options:
    _demand(issubclass(kind, Method), kind, "is not a subclass of duplex.methods.base.Method")
    frozen = issubclass(kind.Options, Options) and kind.Options.__dataclass_params__.frozen  # type: ignore[attr-defined]
    _demand(frozen, kind, "Options is not a frozen dataclass that extends duplex.options.Options")
    options = kind.Options.from_dict(record)
    reloaded = kind.Options.from_dict(json.loads(json.dumps(options.to_dict())))
    _demand(reloaded == options, kind, f"Options change when saved as JSON: {options} became {reloaded}")
    try:
        kind.Options.from_dict({**record, "no such option": 1})
    except OptionError:
        return options
    raise MethodFault(f"{kind.__name__}: Options accept an unknown key")


def _start(kind: type[Method[Any]], options: Options) -> Method[Any]:
    train = small_batch(IMAGES)
    torch.manual_seed(0)
    method = kind(small_context(), options)
    method.eval().start(train)
    _demand_unchanged(method, "start()", train, small_batch(IMAGES))
    return method


def _check_device(method: Method[Any]) -> None:
    for path, module in method.named_modules():
        registered = {*module._parameters, *module._buffers}
        for name, value in vars(module).items():
            plain = isinstance(value, Tensor) and name not in registered
            place = f"{path}.{name}" if path else name
            _demand(not plain, method, f"{place} is a plain tensor and stays on the CPU; use register_buffer")


def _check_losses(method: Method[Any]) -> None:
    train = small_batch(IMAGES)
    groups = [{**group, "params": list(group["params"])} for group in method.groups()]
    if not groups:
        return
    method.train()
    for count, title in ((8, "a batch"), (1, "a batch of one image")):
        method.zero_grad(set_to_none=True)
        shared = method.shared()
        _demand(isinstance(shared, tuple), method, "shared() does not return a tuple")
        losses = method.losses(train[torch.arange(count)], shared)
        _demand(isinstance(losses, dict) and losses, method, "losses() must return a dict of at least one named term")
        for name, value in losses.items():
            scalar = isinstance(value, Tensor) and value.shape == () and value.is_floating_point()
            _demand(scalar, method, f"loss {name!r} of {title} is not one number; expected a scalar tensor of floats")
            _demand(torch.isfinite(value), method, f"loss {name!r} of {title} is {value}")
        total = torch.stack(list(losses.values())).sum()
        _demand(total.requires_grad, method, "the losses depend on no parameter; groups() should then be empty")
        total.backward()
        method.after_batch()
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    _demand(gradients, method, "the losses depend on none of the parameters in groups()")
    _demand(all(torch.isfinite(g).all() for g in gradients), method, "a gradient is not finite")


def _check_training(kind: type[Method[Any]], options: Options) -> None:
    states = []
    for _ in range(2):  # with one seed: the tensors must be the same, bit for bit
        method = _start(kind, options)
        train = small_batch(IMAGES)
        start = {name: value.clone() for name, value in method.state_dict().items()}
        if method.groups():
            optimiser = make_optimiser(method, SETTINGS)
            method.train()
            torch.manual_seed(7)
            for rows in shuffled_rows(train, torch.Generator().manual_seed(3)).split(SETTINGS.batch_size)[:3]:
                optimiser_step(method, train, rows, SETTINGS, optimiser)
            method.eval().on_features_changed(train)
            method.after_epoch(1)
        _demand_unchanged(method, "a hook of training", train, small_batch(IMAGES))
        states.append(method.state_dict())
    for name, value in states[0].items():
        same = torch.equal(value, states[1][name])
        _demand(same, kind, f"{name} differs between two runs with the same seed; draw from torch's default generator")
        finite = not value.is_floating_point() or bool(torch.isfinite(value).all())
        _demand(finite, kind, f"{name} is not finite after a few steps")
    if method.groups():
        changed = any(not torch.equal(value, start[name]) for name, value in method.state_dict().items())
        _demand(changed, kind, "training steps change nothing in state_dict()")


def _scores(method: Method[Any], candidates: Ints, inputs: Inputs) -> Tensor:
    scorer = method.eval().scorer(candidates.copy())
    _demand(callable(scorer), method, f"scorer() returns {type(scorer).__name__}, not a function")
    scores: Any = scorer(inputs)
    _demand(isinstance(scores, Tensor), method, f"scorer()'s function returns {type(scores).__name__}, not a tensor")
    return cast(Tensor, scores)


def _check_scores(method: Method[Any]) -> None:
    labels = small_labels()
    batch = small_batch(6, seed=1)
    state = {name: value.clone() for name, value in method.state_dict().items()}
    for world in ("closed", "open"):
        candidates = labels.candidates(world, "test")
        scores = _scores(method, candidates, batch.inputs)
        shape = (6, len(candidates))
        right = scores.shape == shape and scores.dtype == torch.float32
        _demand(right, method, f"scores are {tuple(scores.shape)} of {scores.dtype}; expected {shape} of float32")
        _demand(not scores.requires_grad, method, "scorer() keeps gradients; use torch.no_grad()")
        _demand(not scores.isnan().any(), method, "scores contain NaN")
        single = torch.cat([_scores(method, candidates, batch[torch.tensor([row])].inputs) for row in range(6)])
        alike = torch.allclose(scores, single, rtol=1e-4, atol=1e-5)
        _demand(alike, method, "an image's scores depend on the other images of its batch")
        empty = _scores(method, candidates, batch[torch.arange(0)].inputs)
        _demand(empty.shape == (0, len(candidates)), method, "scores of an empty batch are not empty")
        backwards = _scores(method, candidates[::-1].copy(), batch.inputs).flip(1)
        _demand(torch.allclose(backwards, scores, rtol=1e-4, atol=1e-5), method, "scores ignore the candidates' order")
    _demand_unchanged(method, "scorer()'s function", batch, small_batch(6, seed=1))
    for name, value in method.state_dict().items():
        _demand(torch.equal(value, state[name]), method, f"scoring changes {name}")


def _check_reload(kind: type[Method[Any]], options: Options, method: Method[Any]) -> None:
    torch.manual_seed(11)
    loaded = kind(small_context(), options)  # without `start`
    state = method.state_dict()
    different = sorted({*loaded.state_dict()} ^ {*state})
    _demand(not different, kind, f"{different[:1]} is registered by start() alone; register it in __init__")
    try:
        loaded.load_state_dict(state)
    except RuntimeError as error:
        raise MethodFault(f"{kind.__name__}: {str(error).splitlines()[-1].strip()}; register it in __init__") from error
    candidates = small_labels().candidates("open", "test")
    inputs = small_batch(5, seed=2).inputs
    same = torch.equal(_scores(loaded, candidates, inputs), _scores(method, candidates, inputs))
    _demand(same, kind, "scores change after saving and loading; register what they need as buffers")


def _check_run(kind: str, options: Options, folder: Path) -> None:
    inputs = small_inputs()
    settings = EvaluationParams(bootstrap=10)
    run = train_run(MethodSpec(kind, kind, options, SETTINGS, WORLDS, "closed"), inputs, 0, CPU, settings)
    files = RunPaths(folder)
    run.write(files)
    method = load_checkpoint(files.checkpoint, inputs.context(), inputs.encoder)
    for world in WORLDS:
        calibration = calibration_for(run.record, world, kind)
        before = evaluate_world(run.method, inputs, settings, world, calibration).margins
        after = evaluate_world(method, inputs, settings, world, calibration).margins
        same = np.array_equal(before.seen, after.seen, equal_nan=True)
        same = same and np.array_equal(before.unseen, after.unseen, equal_nan=True)
        _demand(same, method, f"scores in the {world} world change after saving and loading")
    term_metrics(method, inputs)
    if method.portable(inputs.labels.candidates("closed", "test")) is not None:
        export(TrainedRun(files.checkpoint, CPU), "closed", folder / "export", RunFacts(kind))
        open_trained(folder / "export", CPU).candidates("closed").scorer(inputs.examples["test"].inputs)


def small_inputs() -> RunInputs:
    """Inputs for a small training run, with random features in place of a feature cache."""
    labels = small_labels()
    examples = {}
    images = []
    for number, split in enumerate(("train", "val", "test")):
        batch = small_batch(IMAGES, number, split)
        rows = np.arange(number * IMAGES, (number + 1) * IMAGES)
        examples[split] = Examples(rows, batch.inputs, batch.compositions)
        images += [{"image": f"{row}.png", "split": split} for row in rows]
    encoder = load_encoder("tiny", towers="text").identity.to_dict()
    record = {**encoder, "text_precision": encoder["precision"], "name": "tiny", "tag": ""}
    return RunInputs(pd.DataFrame(images), labels, examples, _tower(), record, encoder, bad=0)


def _check_inspectable(method: Method[Any]) -> None:
    parts = method.inspectable()
    batch = small_batch(5, seed=3)
    compositions = small_labels().pairs["test"]
    if parts.features is not None:
        _demand(len(parts.features(batch.inputs)) == 5, method, "inspectable(): features are not one row per image")
    spaces = {"semantic": parts.text_space_features or parts.features, "visual": parts.features}
    for name, features in spaces.items():
        if (function := getattr(parts, name)) is None:
            continue
        rows = function(compositions)
        _demand(len(rows) == len(compositions), method, f"inspectable(): {name} is not one row per composition")
        same_width = features is None or features(batch.inputs).shape == (5, rows.shape[1])
        _demand(same_width, method, f"inspectable(): {name} prototypes and features have different widths")
    if parts.factors is not None:
        one_row = all(len(factor) == 5 for factor in parts.factors(batch.inputs))
        _demand(one_row, method, "inspectable(): factors are not one row per image")


def _check_predictions(method: Method[Any]) -> None:
    candidates = small_labels().candidates("closed", "test")
    batch = small_batch(6, seed=4)
    scores = _scores(method, candidates, batch.inputs)
    terms = method.score_terms(candidates)
    if terms is not None:
        total = torch.stack([term for _, term in terms(batch.inputs)]).sum(0)
        _demand(torch.allclose(total, scores, atol=1e-6), method, "score_terms() do not sum to the scores")
    scores[:, 0] = -torch.inf
    p = method.probabilities(scores)
    valid = bool((p >= 0).all()) and torch.allclose(p.sum(1), torch.ones(6), atol=1e-5)
    _demand(valid, method, "probabilities() are negative or do not sum to 1")
    _demand(not p[:, 0].any(), method, "probabilities() of an excluded (-inf) candidate are not 0")
    if (tensors := method.portable(candidates)) is not None:
        odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
        _demand(not odd, method, f"portable() returns {odd[:1]}, which is not a tensor")
        total = torch.stack([term for _, term in portable.score_terms(tensors, batch.inputs["cls"])]).sum(0)
        _demand(torch.allclose(total[:, 1:], scores[:, 1:], atol=1e-5), method, "portable() disagrees with scorer()")
        alike = torch.allclose(portable.probabilities(tensors, scores), p, atol=1e-5)
        _demand(alike, method, "portable(): an export would divide scores by their sum, unlike probabilities()")
