"""For whoever writes a method: `check_method(MyMethod)` tries all that the rest of the program asks of it.

    from duplex.testing import check_method
    check_method(MyMethod)                       # default options
    check_method(MyMethod, {"width": 32})

It builds the method in a small world (4 states, 3 objects, the packaged encoder's text tower, made-up features and
patch tokens) and raises `MethodFault`, one sentence, at the first thing that is not as docs/your_method.md says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.encoders import load_encoder
from duplex.encoders.text import TextTower
from duplex.labels import LabelSpace
from duplex.layers import portable
from duplex.layers.word_vectors import word_vectors
from duplex.methods.base import Batch, Inputs, Method, Setting, Words
from duplex.methods.registry import KNOWN_NEEDS
from duplex.options import OptionError, Options, TrainingOptions
from duplex.training.loop import make_optimiser, optimiser_step

IMAGES, PATCHES, WIDTH = 40, 4, 8
SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=8, epochs=1)
STATES, OBJECTS = ("red", "blue", "striped", "hollow"), ("circle", "star", "heart")


class MethodFault(AssertionError):
    """A method does not keep the protocol; the message says where."""


def check_method(kind: type[Method[Any]], options: Mapping[str, Any] | None = None) -> None:
    """Raise `MethodFault` unless the method keeps the protocol with these options."""
    row = _check_options(kind, dict(options or {}))
    setting, train = small_setting(), small_batch(IMAGES)
    _check_needs(kind, row)
    method = _begun(kind, row, setting, train)
    _check_device(method)
    _check_batches(method, train)
    _check_losses(method, train)
    _check_training(kind, row, setting, train)
    _check_scores(method)
    _check_reload(kind, row, setting, method)
    _check_exhibits(method)
    _check_recognition(method)
    _check_likelihood(method)


# -- a small world -----------------------------------------------------------------------------------------------------


def small_labels() -> LabelSpace:
    """12 pairs: 8 seen, 2 unseen ones in val, 2 in test."""
    pairs = [(s, o) for s in STATES for o in OBJECTS]
    seen = [pairs[i] for i in (0, 1, 3, 5, 7, 8, 9, 10)]
    return LabelSpace.from_pairs(
        {"train": seen, "val": [*seen[:2], pairs[2], pairs[4]], "test": [*seen[2:4], pairs[6], pairs[11]]}
    )


@cache
def _tower() -> TextTower:
    tower: TextTower = load_encoder("tiny", towers="text").text
    return tower


def small_setting() -> Setting:
    labels, tower = small_labels(), _tower()
    inputs = {"cls": (tower.dim,), "patch": (PATCHES, WIDTH)}
    return Setting(labels, inputs, tower, Words(*word_vectors(labels, tower)))


def small_batch(count: int, seed: int = 0) -> Batch:
    """Images of seen pairs, one cluster of features a pair."""
    labels, random = small_labels(), torch.Generator().manual_seed(seed)
    seen = torch.as_tensor(labels.pairs["train"])
    compositions = seen[torch.arange(count) % len(seen)]
    centres = normalize(torch.randn(labels.size, _tower().dim, generator=torch.Generator().manual_seed(99)), dim=-1)
    z = centres[compositions] + 0.02 * torch.randn(count, _tower().dim, generator=random)
    patches = torch.randn(count, PATCHES, WIDTH, generator=random).half()
    return Batch({"cls": z, "patch": patches}, compositions)


# -- the checks --------------------------------------------------------------------------------------------------------


def _demand(holds: object, kind: object, sentence: str) -> None:
    if not holds:
        name = kind.__name__ if isinstance(kind, type) else type(kind).__name__
        raise MethodFault(f"{name}: {sentence}")


def _check_options(kind: type[Method[Any]], given: dict[str, Any]) -> Options:
    _demand(issubclass(kind, Method), kind, "is no subclass of duplex.methods.base.Method")
    frozen = issubclass(kind.Options, Options) and kind.Options.__dataclass_params__.frozen  # type: ignore[attr-defined]
    _demand(frozen, kind, "Options is no frozen dataclass made of duplex.options.Options")
    row = kind.Options.from_dict(given)
    again = kind.Options.from_dict(json.loads(json.dumps(row.to_dict())))
    _demand(again == row, kind, f"Options do not survive JSON: {row} came back as {again}")
    try:
        kind.Options.from_dict({**given, "no such option": 1})
    except OptionError:
        return row
    raise MethodFault(f"{kind.__name__}: Options take an unknown key without a word")


def _check_needs(kind: type[Method[Any]], row: Options) -> None:
    needs = kind.needs(row)
    strange = sorted(set(needs) - set(KNOWN_NEEDS))
    _demand(not strange, kind, f"needs() names {strange[:1]}; known: {', '.join(KNOWN_NEEDS)}")
    _demand(set(needs) & {"cls", "patch"}, kind, "needs() names no input; a method reads cls or patch")


def _begun(kind: type[Method[Any]], row: Options, setting: Setting, train: Batch, seed: int = 0) -> Method[Any]:
    torch.manual_seed(seed)
    method = kind(setting, row)
    before = {name: values.clone() for name, values in train.inputs.items()}
    method.start(train)
    for name, values in before.items():
        _demand(torch.equal(values, train.inputs[name]), kind, f"start() changes the cached input {name!r}")
    return method


def _check_device(method: Method[Any]) -> None:
    """Tensors that are neither parameters nor buffers stay behind when the method moves to a GPU."""
    for place, module in method.named_modules():
        registered = {*module._parameters, *module._buffers}
        for name, value in vars(module).items():
            stray = isinstance(value, Tensor) and name not in registered
            where = f"{place}.{name}" if place else name
            _demand(not stray, method, f"{where} is a plain tensor and stays on the CPU; use register_buffer")


def _check_batches(method: Method[Any], train: Batch) -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)  # must make no difference
        found.append([rows.tolist() for rows in method.batches(train, 8, torch.Generator().manual_seed(5))])
    _demand(found[0] == found[1], method, "batches() draws from another generator than `order`; runs would not repeat")
    rows = [row for step in found[0] for row in step]
    _demand(rows and set(rows) <= set(range(len(train))), method, "batches() gives rows that are no training images")


def _check_losses(method: Method[Any], train: Batch) -> None:
    groups = method.groups()
    _demand(isinstance(groups, list), method, "groups() is no list of the optimiser's parameter groups")
    if not groups:
        return
    method.train()
    for count, spoken in ((8, "a batch"), (1, "a batch of one image")):
        method.zero_grad(set_to_none=True)
        shared = method.shared()
        _demand(isinstance(shared, tuple), method, "shared() is no tuple")
        losses = method.losses(train[torch.arange(count)], shared)
        _demand(isinstance(losses, dict) and losses, method, "losses() is no table of named terms, or an empty one")
        for name, value in losses.items():
            scalar = isinstance(value, Tensor) and value.shape == () and value.is_floating_point()
            _demand(scalar, method, f"loss {name!r} of {spoken} is no single number")
            _demand(torch.isfinite(value), method, f"loss {name!r} of {spoken} is {value}")
        total = torch.stack(list(losses.values())).sum()
        _demand(total.requires_grad, method, "the losses reach nothing that is trained; groups() should then be empty")
        total.backward()
        method.after_batch()
    parameters = [p for group in groups for p in group["params"]]
    reached = [p.grad for p in parameters if p.grad is not None]
    _demand(reached, method, "the losses reach no parameter of groups()")
    _demand(all(torch.isfinite(g).all() for g in reached), method, "a gradient is not finite")


def _steps(method: Method[Any], train: Batch, steps: int = 3) -> None:
    optimiser, order = make_optimiser(method, SETTINGS), torch.Generator().manual_seed(3)
    method.train()
    torch.manual_seed(7)
    for rows, _ in zip(_endless(method, train, order), range(steps), strict=False):
        optimiser_step(method, train, rows, SETTINGS, optimiser)
    method.after_epoch(1)


def _endless(method: Method[Any], train: Batch, order: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from method.batches(train, SETTINGS.batch_size, order)


def _check_training(kind: type[Method[Any]], row: Options, setting: Setting, train: Batch) -> None:
    """Two runs of one seed are equal bit for bit, and something moves."""
    ends = []
    for _ in range(2):
        method = _begun(kind, row, setting, train)
        start = {name: value.clone() for name, value in method.state_dict().items()}
        if method.groups():
            _steps(method, train)
        ends.append((start, method.state_dict()))
    for name, value in ends[0][1].items():
        same = torch.equal(value, ends[1][1][name])
        _demand(same, kind, f"{name} differs between two runs of one seed; draw from torch's generator alone")
        finite = not value.is_floating_point() or bool(torch.isfinite(value).all())
        _demand(finite, kind, f"{name} is not finite after a few steps")
    if method.groups():
        moved = any(not torch.equal(value, ends[0][0][name]) for name, value in ends[0][1].items())
        _demand(moved, kind, "training steps change nothing that a checkpoint keeps")


def _scores(method: Method[Any], columns: Any, inputs: Inputs) -> Tensor:
    method.eval()
    return method.scorer(columns)(inputs)


def _check_scores(method: Method[Any]) -> None:
    labels, batch = small_labels(), small_batch(6, seed=1)
    state = {name: value.clone() for name, value in method.state_dict().items()}
    for world in ("closed", "open"):
        columns = labels.target(world, "test")
        scores = _scores(method, columns, batch.inputs)
        right = scores.shape == (6, len(columns)) and scores.dtype == torch.float32
        _demand(
            right, method, f"scores are {tuple(scores.shape)} of {scores.dtype}, not (6, {len(columns)}) of float32"
        )
        _demand(not scores.requires_grad, method, "scorer() keeps gradients; use torch.no_grad()")
        _demand(not scores.isnan().any(), method, "scores contain NaN")
        single = torch.cat([_scores(method, columns, batch[torch.tensor([row])].inputs) for row in range(6)])
        alike = torch.allclose(scores, single, rtol=1e-4, atol=1e-5)
        _demand(alike, method, "an image's scores depend on the other images of its batch")
        none = _scores(method, columns, batch[torch.arange(0)].inputs)
        _demand(none.shape == (0, len(columns)), method, "an empty batch has no empty scores")
        turned = columns[::-1].copy()
        follows = torch.allclose(_scores(method, turned, batch.inputs).flip(1), scores, rtol=1e-4, atol=1e-5)
        _demand(follows, method, "scores do not follow the order of their columns")
    for name, value in method.state_dict().items():
        _demand(torch.equal(value, state[name]), method, f"scoring changes {name}")


def _check_reload(kind: type[Method[Any]], row: Options, setting: Setting, method: Method[Any]) -> None:
    """A method built afresh, never started, given the state of another one."""
    torch.manual_seed(11)
    again, columns, inputs = kind(setting, row), small_labels().target("open", "test"), small_batch(5, seed=2).inputs
    wanted, given = set(again.state_dict()), set(method.state_dict())
    odd = sorted(wanted ^ given)
    _demand(not odd, kind, f"{odd[:1]} is registered by start() alone; register it in __init__, with its shape")
    try:
        again.load_state_dict(method.state_dict())
    except RuntimeError as error:
        raise MethodFault(f"{kind.__name__}: {str(error).splitlines()[-1].strip()}; register it in __init__") from error
    same = torch.equal(_scores(again, columns, inputs), _scores(method, columns, inputs))
    _demand(same, kind, "scores are other ones after saving and loading; register what they need as buffers")


def _check_exhibits(method: Method[Any]) -> None:
    shown, labels, batch = method.exhibits(), small_labels(), small_batch(5, seed=3)
    compositions = labels.pairs["test"]
    if shown.features is not None:
        _demand(shown.features(batch.inputs).shape[0] == 5, method, "exhibits: features are not one row an image")
    beside = {"semantic": shown.spoken or shown.features, "visual": shown.features}
    for name, images in beside.items():
        rows = getattr(shown, name)
        good = rows is None or rows(compositions).shape[0] == len(compositions)
        _demand(good, method, f"exhibits: {name} prototypes are not one row a composition")
        wide = rows is None or images is None or images(batch.inputs).shape == (5, rows(compositions).shape[1])
        _demand(wide, method, f"exhibits: {name} prototypes and the features beside them are not of one width")
    if shown.factors is not None:
        _demand(all(part.shape[0] == 5 for part in shown.factors(batch.inputs)), method, "exhibits: factors are odd")


def _check_likelihood(method: Method[Any]) -> None:
    """Of compositions, where the method has one."""
    found, size = method.likelihood(), small_labels().size
    sound = found is None or (found.shape == (size,) and bool(torch.isfinite(found).all()))
    _demand(sound, method, f"likelihood() is no finite number for each of the {size} compositions")


def _check_recognition(method: Method[Any]) -> None:
    """What answers are made of: parts that sum to the score, probabilities, and an export with the same scores."""
    columns, batch = small_labels().target("closed", "test"), small_batch(6, seed=4)
    scores, parts = _scores(method, columns, batch.inputs), method.evidence(columns)
    if parts is not None:
        total = torch.stack([part for _, part in parts(batch.inputs)]).sum(0)
        _demand(torch.allclose(total, scores, atol=1e-6), method, "terms() do not sum to the scores")
    scores[:, 0] = -torch.inf
    shares = method.probabilities(scores)
    sound = bool((shares >= 0).all()) and torch.allclose(shares.sum(1), torch.ones(6), atol=1e-5)
    _demand(sound, method, "probabilities() are not shares that sum to 1")
    _demand(not shares[:, 0].any(), method, "probabilities() give a column that cannot be a share")
    if (tensors := method.portable(columns)) is not None:
        again = torch.stack([part for _, part in portable.terms(tensors, batch.inputs["cls"])]).sum(0)
        _demand(torch.allclose(again[:, 1:], scores[:, 1:], atol=1e-5), method, "portable() scores otherwise")
