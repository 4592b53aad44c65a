"""`check_method` accepts every installed kind and reports each violation of the protocol."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Inspectable, Method
from duplex.methods.registry import find_method, installed_methods
from duplex.options import Options
from duplex.testing import MethodFault, check_method


@pytest.mark.parametrize("kind", sorted(installed_methods()))
def test_every_installed_kind_passes(kind):
    check_method(find_method(kind))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("prompts", {"context": "fixed", "vocabulary": "fixed", "paths": "composition", "adapter": "none", "losses": [],
                     "inference": ["semantic"]}),
        ("prompts", {"paths": "composition", "losses": ["semantic"], "inference": ["semantic"]}),
        ("duplex", {"graph": False}),
        ("duplex", {"blend": "anchored"}),
        ("duplex", {"fusion": "additive", "messages": ["counterfactual"]}),
        ("duplex", {"seen_rows": "random", "unseen_rows": "random", "momentum": 0.0}),
    ],
)  # fmt: skip
def test_other_options_pass_too(kind, options):
    check_method(find_method(kind), options)


@dataclass(frozen=True)
class ProbeOptions(Options):
    scale: float = 10.0


class Probe(Method[ProbeOptions]):
    """A linear head over the compositions; each subclass violates the protocol in one way."""

    Options = ProbeOptions

    def __init__(self, task, options):
        super().__init__(task, options)
        self.head = nn.Linear(task.dim, task.labels.size)

    def logits(self, z):
        return self.options.scale * self.head(z)

    def losses(self, batch, shared):
        return {"composition": cross_entropy(self.logits(batch.cls), batch.compositions)}

    def scorer(self, candidates):
        rows = torch.as_tensor(candidates)
        return torch.no_grad()(lambda inputs: self.logits(inputs["cls"])[:, rows].softmax(-1))


def test_a_correct_method_passes():
    check_method(Probe)
    check_method(Probe, {"scale": 3.0})


class PlainTensor(Probe):
    def start(self, train):
        self.mean = train.cls.mean(0)


class RegisteredLate(Probe):
    def start(self, train):
        self.register_buffer("mean", train.cls.mean(0))


class NotSaved(Probe):
    def start(self, train):
        self.register_buffer("mean", train.cls.mean(0), persistent=False)

    def logits(self, z):
        return super().logits(z - getattr(self, "mean", 0.0))


class Unseeded(Probe):
    def start(self, train):
        nn.init.normal_(self.head.bias, generator=torch.Generator().manual_seed(torch.seed() % 2**31))


class ChangesInputs(Probe):
    def start(self, train):
        train.cls.mul_(2)


class BatchBound(Probe):
    def scorer(self, candidates):
        inner = super().scorer(candidates)
        return lambda inputs: inner({"cls": inputs["cls"] - inputs["cls"].mean(0)})


class SortsCandidates(Probe):
    def scorer(self, candidates):
        return super().scorer(sorted(candidates))


class KeepsGradients(Probe):
    def scorer(self, candidates):
        return lambda inputs: self.logits(inputs["cls"])[:, torch.as_tensor(candidates)]


class NanLoss(Probe):
    def losses(self, batch, shared):
        return {"composition": self.logits(batch.cls).std(0).mean()}  # one image has no deviation


class ConstantLoss(Probe):
    def losses(self, batch, shared):
        return {"composition": batch.cls.sum()}


class VectorLoss(Probe):
    def losses(self, batch, shared):
        return {"composition": self.logits(batch.cls).sum(0)}


class UnknownNeed(Probe):
    @classmethod
    def needs(cls, options):
        return frozenset({"audio"})


class NarrowPrototypes(Probe):
    def inspectable(self):
        return Inspectable(features=lambda inputs: inputs["cls"], semantic=lambda pairs: torch.ones(len(pairs), 3))


class InfiniteLikelihood(Probe):
    def likelihood(self):
        return torch.full((12,), torch.inf)


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (PlainTensor, "mean is a plain tensor"),
        (RegisteredLate, "registered by start"),
        (NotSaved, "after saving and loading"),
        (Unseeded, "differs between two runs"),
        (ChangesInputs, "changes the cached input"),
        (BatchBound, "depend on the other images"),
        (SortsCandidates, "ignore the candidates' order"),
        (KeepsGradients, "keeps gradients"),
        (NanLoss, "loss 'composition' of a batch of one image is nan"),
        (ConstantLoss, "depend on no parameter"),
        (VectorLoss, "no single number"),
        (UnknownNeed, "audio"),
        (NarrowPrototypes, "semantic prototypes and features have different widths"),
        (InfiniteLikelihood, "not one finite number for each of the 12 compositions"),
    ],
)
def test_a_violation_is_reported_in_one_line(kind, message):
    with pytest.raises(MethodFault, match=message) as caught:
        check_method(kind)
    assert "\n" not in str(caught.value)
