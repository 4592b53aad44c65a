"""Methods of careless authors: wrong values, exits and writes are errors of one line; methods may remember images."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

import duplex
from duplex.cli import main
from duplex.config.params import EvaluationParams
from duplex.errors import DuplexError, UsageError
from duplex.labels import WORLDS
from duplex.library.run_evaluation import calibration_for, evaluate_world, term_metrics
from duplex.library.run_training import MethodSpec, train_method
from duplex.methods.base import Batch, Inputs, Method, Scorer
from duplex.methods.registry import temporary_kind
from duplex.options import Options
from duplex.testing import SETTINGS, MethodFault, check_method, small_inputs
from duplex.training.checkpoint import load_checkpoint
from tests.library.test_ten_lines import arrays
from tests.test_testing import Probe


def leave(*_: Any) -> Any:
    sys.exit(0)


def fit(method: type[Method[Any]]) -> duplex.Run:
    """Train a class without the program's checks of authors."""
    given = arrays()
    more = {"state": "green", "object": "ring", "split": "val"}  # a second unseen pair, as thresholds need
    table = {name: [*column, more[name]] for name, column in given["table"].items()}
    data = duplex.Dataset.from_arrays(np.concatenate([given["features"], given["features"][-1:]]), table)
    with temporary_kind(method):
        run = duplex.fit(data, method, epochs=1, batch_size=8)
        for world in WORLDS:
            duplex.evaluate(run, data, world=world)
        return run


def score(change: Any) -> dict[str, Any]:
    """Return a scorer whose scores are changed."""

    def scorer(self: Probe, candidates: Any) -> Scorer:
        scores = Probe.scorer(self, candidates)
        return lambda inputs: change(scores(inputs), inputs["cls"])

    return {"scorer": scorer}


def in_place(inputs: Tensor) -> None:
    inputs /= inputs.norm(dim=1, keepdim=True)


FAULTS: dict[str, dict[str, Any]] = {  # message -> functions of a method
    r"losses\(\) returned None; expected a dict": {"losses": lambda *_: None},
    r"losses\(\) returned an empty dict": {"losses": lambda *_: {}},
    r"losses\(\) returned a float as 'a'": {"losses": lambda *_: {"a": 0.5}},
    r"losses\(\) returned a tensor \[\d+, 9\] of float32 as 'a'": {
        "losses": lambda self, b, _: {"a": self.logits(b.cls)}
    },
    r"losses\(\) returned losses that depend on no parameter": {
        "losses": lambda self, batch, _: {"a": batch.cls.sum()}
    },
    r"groups\(\) returned None; expected a list": {"groups": lambda _: None},
    r"groups\(\) returned a list with a tensor \[\d+, \d+\] of float32; expected dicts": {
        "groups": lambda self: list(self.parameters())
    },
    r"groups\(\) returned a list with a dict without a list of parameters": {
        "groups": lambda self: [{"parameters": list(self.parameters())}]
    },
    r"shared\(\) returned a list; expected a tuple": {"shared": lambda _: []},
    r"scorer\(\) returned NoneType; expected a function": {"scorer": lambda *_: None},
    r"scorer\(\) returned None; expected a float32": score(lambda scores, _: None),
    r"scorer\(\) returned a ndarray; expected a float32": score(lambda scores, _: scores.numpy()),
    r"scorer\(\) returned a tensor \[\d, 9\].*expected a float32 tensor \[\d, 8\]": score(
        lambda scores, _: torch.zeros(len(scores), 9)
    ),
    r"of float16; expected a float32": score(lambda scores, _: scores.half()),
    r"of int64; expected a float32": score(lambda scores, _: scores.long()),
    r"scorer\(\) writes into its input 'cls'": score(lambda scores, z: (in_place(z), scores)[1]),
    r"start\(\) writes into its input 'cls'": {"start": lambda self, train: in_place(train.cls)},
    r"on_features_changed\(\) writes into": {"on_features_changed": lambda self, train: in_place(train.cls)},
    r"tune\(\) writes into its input": {"tune": lambda self, inputs, *_: in_place(inputs["cls"])},
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_wrong_method_is_refused_by_name_in_one_line(message: str) -> None:
    faulty = type("Faulty", (Probe,), FAULTS[message])
    with pytest.raises(DuplexError, match=message) as error:
        fit(faulty)
    assert "\n" not in str(error.value)
    with pytest.raises(MethodFault, match="Faulty"):
        check_method(faulty)


@pytest.mark.parametrize("message", [m for m in FAULTS if m.startswith(("losses", "shared"))])
def test_a_wrong_loss_is_refused_by_name_while_threads_are_chosen(message: str) -> None:
    faulty, before = type("Faulty", (Probe,), FAULTS[message]), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(DuplexError, match=message):
            fit(faulty)
    finally:
        torch.set_num_threads(before)


def uncounted(values: Tensor) -> None:
    """Write into a tensor without a trace in its counter of writes."""
    values.numpy()[:] *= 2


def written_in_losses(self: Probe, batch: Batch, shared: Any) -> dict[str, Tensor]:
    uncounted(self.train_images)  # type: ignore[arg-type]
    return Probe.losses(self, batch, shared)


UNCOUNTED: dict[str, dict[str, Any]] = {  # hook -> functions of a method that writes into features that runs share
    "start": {"start": lambda self, train: uncounted(train.cls)},
    "losses": {
        "start": lambda self, train: object.__setattr__(self, "train_images", train.cls),
        "losses": written_in_losses,
    },
    "scorer": score(lambda scores, z: (uncounted(z), scores)[1]),
    "tune": {"tune": lambda self, inputs, *_: inputs["cls"].data.mul_(2)},
    "on_features_changed": {"on_features_changed": lambda self, train: train.cls.data.mul_(2)},
}


@pytest.mark.parametrize("hook", UNCOUNTED)
def test_writes_that_torch_does_not_count_are_noticed_at_the_end_of_training(hook: str) -> None:
    with pytest.raises(DuplexError, match="Faulty writes into its input 'cls', which other runs read too") as error:
        fit(type("Faulty", (Probe,), UNCOUNTED[hook]))
    assert "\n" not in str(error.value)


def test_writes_are_noticed_also_if_training_then_fails() -> None:
    features: list[Tensor] = []  # of training; the copy of the method that is timed has no others

    def losses(*_: Any) -> Any:
        uncounted(features[0])
        raise KeyError("a bug")

    hooks = {"start": lambda self, train: features.append(train.cls), "losses": losses}
    with pytest.raises(DuplexError, match="Faulty writes into its input 'cls', which other runs read too") as error:
        fit(type("Faulty", (Probe,), hooks))
    assert isinstance(error.value.__context__, KeyError)


def test_writes_that_torch_does_not_count_are_noticed_at_the_end_of_evaluation() -> None:
    inputs = small_inputs()
    with temporary_kind(Probe) as kind:
        spec = MethodSpec("probe", kind, Probe.Options(), SETTINGS, WORLDS, "closed")
        run = train_method(spec, inputs, 0, torch.device("cpu"), EvaluationParams())
    faulty = type("Faulty", (Probe,), UNCOUNTED["scorer"])(run.method.context, Probe.Options())
    calibration = calibration_for(run.record, "closed", "probe")
    with pytest.raises(DuplexError, match="Faulty writes into its input 'cls', which other runs read too"):
        evaluate_world(faulty, inputs, EvaluationParams(bootstrap=10), "closed", calibration)
    terms = {"score_terms": lambda self, rows: lambda inputs: [("a", self.scorer(rows)(inputs))]}
    faulty = type("Faulty", (Probe,), {**UNCOUNTED["scorer"], **terms})(run.method.context, Probe.Options())
    with pytest.raises(DuplexError, match="Faulty writes into its input 'cls', which other runs read too"):
        term_metrics(faulty, inputs)


NEEDS: dict[str, Any] = {  # values that `needs` may return, and others
    "set": {"cls"},
    "list": ["cls"],
    "tuple": ("cls",),
    "None": None,
    "str": "cls",
    "int": 3,
    "bytes": b"cls",
    "list of int": [1],
}


@pytest.mark.parametrize("kind", NEEDS)
def test_needs_is_a_collection_of_names_or_an_error_that_names_the_method(kind: str) -> None:
    careless = type("Careless", (Probe,), {"needs": classmethod(lambda cls, options: NEEDS[kind])})
    if kind in ("set", "list", "tuple"):
        expected = fit(Probe).method.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in fit(careless).method.state_dict().items())
        check_method(careless)
        return
    message = r"Careless\.needs\(\) returned .*; expected a frozenset of names"
    with pytest.raises(UsageError, match=message):
        fit(careless)
    with pytest.raises(MethodFault, match=message):
        check_method(careless)


@pytest.mark.parametrize("result", [None, np.ones((3, 8)) / 8], ids=["None", "array"])
def test_wrong_probabilities_are_refused_by_name(result: Any) -> None:
    faulty = type("Faulty", (Probe,), {"probabilities": lambda self, scores: result})
    with pytest.raises(DuplexError, match=r"Faulty\.probabilities\(\) returned .*; expected a floating tensor"):
        fit(faulty)


def test_a_scorer_that_writes_into_the_candidates_changes_no_result() -> None:
    def scorer(self: Probe, candidates: Any) -> Scorer:
        rows = candidates.copy()
        candidates[:] = 0
        return Probe.scorer(self, rows)

    plain, careless = (fit(kind) for kind in (Probe, type("Careless", (Probe,), {"scorer": scorer})))
    assert careless.record.calibration == plain.record.calibration
    assert careless.record.confidence == plain.record.confidence
    check_method(type("Careless", (Probe,), {"scorer": scorer}))


ELSEWHERE: dict[str, dict[str, Any]] = {  # values that torch accepts and nobody can use
    r"losses\(\) returned tensors on cpu, meta; expected": {
        "losses": lambda self, b, _: {"a": self.logits(b.cls).sum(), "b": self.logits(b.cls).sum().to("meta")}
    },
    r"of float32 without values \(on meta\); expected": score(lambda scores, _: scores.to("meta")),
    r"probabilities\(\) gives NaN or infinity for validation images": score(lambda scores, _: scores + torch.inf),
}


@pytest.mark.parametrize("message", ELSEWHERE)
def test_values_without_use_are_refused_by_name(message: str) -> None:
    with pytest.raises(DuplexError, match=message) as error:
        fit(type("Faulty", (Probe,), ELSEWHERE[message]))
    assert "Faulty" in str(error.value)


def fork(*_: Any) -> None:
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)


SIDE_EFFECTS: dict[str, Any] = {
    "prints": lambda *_: print("working"),
    "forks": fork,
    "reseeds": lambda *_: (torch.manual_seed(1), np.random.seed(1), random.seed(1)),
    "draws": lambda *_: torch.rand(7),
    "writes into its batch": lambda batch: batch.cls.zero_(),
}


@pytest.mark.parametrize("effect", SIDE_EFFECTS)
def test_side_effects_of_a_loss_change_no_result(effect: str) -> None:
    def losses(self: Probe, batch: Batch, inputs: Any) -> dict[str, Tensor]:
        terms = Probe.losses(self, Batch({"cls": batch.cls.clone()}, batch.compositions), inputs)
        SIDE_EFFECTS[effect](batch)
        return terms

    careless_kind = type("Careless", (Probe,), {"losses": losses})
    plain, careless = (fit(kind).method.state_dict() for kind in (Probe, careless_kind))
    assert all(torch.equal(plain[name], careless[name]) for name in plain)


EXITS = ("__init__", "start", "losses", "after_step", "scorer", "likelihood", "tune")


@pytest.mark.parametrize("function", EXITS)
def test_a_method_that_exits_is_an_error_that_names_it(function: str) -> None:
    faulty = type("Faulty", (Probe,), {function: leave})
    for work in (fit, check_method):
        with pytest.raises((DuplexError, MethodFault), match=r"Faulty'?.* raised SystemExit\(0\); it must not call"):
            work(faulty)


def test_ctrl_c_inside_a_method_stays_ctrl_c() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(type("Interrupted", (Probe,), {"losses": interrupt}))


def test_a_command_that_a_plug_in_exits_fails(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("duplex.stages.doctor.examine", leave)
    monkeypatch.setattr(sys, "argv", ["duplex", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and "a method or encoder called sys.exit(0)" in capsys.readouterr().err


class Neighbours(Method[Options]):
    """Nearest neighbours: state and object by similarity to remembered training images, without the image itself."""

    def __init__(self, context: Any, options: Options) -> None:
        super().__init__(context, options)
        self.grow("keys", context.dim)
        self.grow("compositions", dtype=torch.int64)

    def start(self, train: Batch) -> None:
        self.keys, self.compositions = normalize(train.cls, dim=1), train.compositions.clone()

    def scorer(self, candidates: Any) -> Scorer:
        states, objects = self.primitives(torch.as_tensor(candidates))
        stored = self.primitives(self.compositions)
        sizes = len(self.labels.states), len(self.labels.objects)

        def scores(inputs: Inputs) -> Tensor:
            near = (20 * normalize(inputs["cls"], dim=1) @ self.keys.T).softmax(1)
            s, o = (near @ one_hot(each, size).float() for each, size in zip(stored, sizes, strict=True))
            return s[:, states] * o[:, objects]

        return scores


def test_a_method_may_remember_its_training_images(tmp_path) -> None:
    check_method(Neighbours)
    run = fit(Neighbours)
    path = run.save(tmp_path) / "checkpoint.safetensors"
    inputs = small_inputs()
    with temporary_kind(Neighbours):
        with pytest.raises(DuplexError, match="other labels"):
            load_checkpoint(path, inputs.task(), run.record.encoder)
        loaded = load_checkpoint(path, run.method.context, run.record.encoder)
    before, after = run.method.state_dict(), loaded.state_dict()
    assert len(after["keys"]) == 28 and all(torch.equal(before[name], after[name]) for name in ("keys", "compositions"))


def test_a_batch_knows_its_places_among_the_training_images() -> None:
    images = Batch({"cls": torch.randn(9, 2)}, torch.arange(9))
    batch = images[torch.tensor([7, 2, 5])]
    assert batch.rows.tolist() == [7, 2, 5] and batch[torch.tensor([2])].rows.tolist() == [5]
    assert torch.equal(images.cls[batch.rows], batch.cls) and np.array_equal(images.rows_np, np.arange(9))
