"""`check_method` accepts every installed kind and reports each violation of the protocol."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Inspectable, Method
from duplex.methods.layers import unit
from duplex.methods.registry import find_method, installed_methods
from duplex.options import Options
from duplex.testing import MethodFault, check_method


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(installed_methods()) - {"product"}))  # which needs runs: its own test
def test_every_installed_kind_passes(kind):
    check_method(find_method(kind))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("prompts", {"context": "fixed", "vocabulary": "fixed", "paths": "composition", "adapter": "none", "losses": [],
                     "inference": ["semantic"]}),
        ("prompts", {"paths": "composition", "losses": ["semantic"], "inference": ["semantic"]}),
        pytest.param("linear", {"over": "pairs"}, marks=pytest.mark.slow),
        ("duplex", {"graph": False}),
        ("duplex", {"blend": "anchored", "fusion": "additive", "messages": ["counterfactual"]}),
        ("duplex", {"seen_rows": "random", "unseen_rows": "random", "momentum": 0.0}),
    ],
)  # fmt: skip
def test_other_options_pass_too(kind, options):
    check_method(find_method(kind), options)


@dataclass(frozen=True)
class ProbeOptions(Options):
    scale: float = 10.0


class Probe(Method[ProbeOptions]):
    Options = ProbeOptions

    def __init__(self, context, options):
        super().__init__(context, options)
        self.head = nn.Linear(context.dim, context.labels.size)

    def logits(self, z):
        return self.options.scale * self.head(unit(z))

    def losses(self, batch, shared):
        return {"composition": cross_entropy(self.logits(batch.cls), batch.compositions)}

    def scorer(self, candidates):
        rows = torch.as_tensor(candidates)
        return torch.no_grad()(lambda inputs: self.logits(inputs["cls"])[:, rows].softmax(-1))


def test_a_correct_method_passes():
    check_method(Probe, {"scale": 3.0})


def normal(self, train):
    """Draw a bias from a seed that torch chooses."""
    nn.init.normal_(self.head.bias, generator=torch.Generator().manual_seed(torch.seed() % 2**31))


def whitened(self, candidates):
    """Score images by their differences from the mean of the batch."""
    scores = Probe.scorer(self, candidates)
    return lambda inputs: scores({"cls": inputs["cls"] - inputs["cls"].mean(0)})


NARROW = Inspectable(features=lambda inputs: inputs["cls"], semantic=lambda pairs: torch.ones(len(pairs), 3))
FAULTS: dict[str, dict[str, Any]] = {  # message -> functions that violate the protocol
    "mean is a plain tensor": {"start": lambda self, train: setattr(self, "mean", train.cls.mean(0))},
    "registered by start": {"start": lambda self, train: self.register_buffer("mean", train.cls.mean(0))},
    "after saving and loading": {
        "start": lambda self, train: self.register_buffer("mean", train.cls.mean(0), persistent=False),
        "logits": lambda self, z: Probe.logits(self, z - getattr(self, "mean", 0.0)),
    },
    "differs between two runs": {"start": normal},
    "changes the cached input": {"start": lambda self, train: train.cls.mul_(2)},
    "depend on the other images": {"scorer": whitened},
    "ignore the candidates' order": {"scorer": lambda self, candidates: Probe.scorer(self, sorted(candidates))},
    "keeps gradients": {
        "scorer": lambda self, rows: lambda inputs: self.logits(inputs["cls"])[:, torch.as_tensor(rows)]
    },
    "loss 'composition' of a batch of one image is nan": {  # it has no deviation
        "losses": lambda self, batch, shared: {"composition": self.logits(batch.cls).std(0).mean()}
    },
    "depend on no parameter": {"losses": lambda self, batch, shared: {"composition": batch.cls.sum()}},
    "not one number": {"losses": lambda self, batch, shared: {"composition": self.logits(batch.cls).sum(0)}},
    "return a dict of at least one": {"losses": lambda self, batch, shared: {}},
    "a gradient is not finite": {
        "losses": lambda self, batch, shared: {"composition": (0 * self.logits(batch.cls)).sqrt().sum()}
    },
    "training steps change nothing": {"groups": lambda self: [{"params": list(self.parameters()), "lr": 0.0}]},
    "shared.. does not return a tuple": {"shared": lambda self: []},
    "audio": {"needs": classmethod(lambda cls, options: frozenset({"audio"}))},
    "neither cls nor patch": {"needs": classmethod(lambda cls, options: frozenset())},
    "returns list, not a function": {"scorer": lambda self, rows: []},
    "returns list, not a tensor": {"scorer": lambda self, rows: lambda inputs: []},
    "float64; expected .6, 10. of float32": {
        "scorer": lambda self, rows: lambda inputs: torch.zeros(6, len(rows)).double()
    },
    "contain NaN": {"scorer": lambda self, rows: lambda inputs: torch.full((6, len(rows)), torch.nan)},
    "semantic prototypes and features have different widths": {"inspectable": lambda self: NARROW},
    "features are not one row": {"inspectable": lambda self: Inspectable(features=lambda inputs: inputs["cls"][1:])},
    "factors are not one row": {
        "inspectable": lambda self: Inspectable(factors=lambda inputs: 2 * (inputs["cls"][1:],))
    },
    "visual is not one row": {"inspectable": lambda self: Inspectable(visual=lambda pairs: torch.ones(1, 3))},
    "do not sum to the scores": {"score_terms": lambda self, rows: lambda inputs: [("a", torch.zeros(6, len(rows)))]},
    "negative or do not sum to 1": {"probabilities": lambda self, scores: scores},
    "candidate are not 0": {"probabilities": lambda self, scores: torch.ones_like(scores) / scores.shape[1]},
    "an export would divide scores by their sum": {
        "probabilities": lambda self, scores: scores.softmax(-1),
        "portable": lambda self, rows: {
            "classifier.pairs.weight": self.options.scale * self.head.weight[rows].T,
            "classifier.pairs.offset": self.options.scale * self.head.bias[rows],
        },
    },
    "which is not a tensor": {"portable": lambda self, candidates: {"a": 1}},
}


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize("message", FAULTS)
def test_a_violation_is_reported_in_one_line(message):
    with pytest.raises(MethodFault, match=message) as caught:
        check_method(type("Faulty", (Probe,), FAULTS[message]))
    assert "\n" not in str(caught.value)
