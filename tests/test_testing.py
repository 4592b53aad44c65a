"""`check_method` passes every built-in kind and finds what it promises to find."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Exhibits, Method
from duplex.methods.registry import find, sources
from duplex.options import Options
from duplex.testing import MethodFault, check_method


@pytest.mark.parametrize("kind", sorted(sources()))
def test_every_kind_keeps_the_protocol(kind):
    check_method(find(kind))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("prompts", {"context": "fixed", "vocabulary": "fixed", "paths": "c", "adapter": "none", "losses": [],
                     "inference": ["ct"]}),
        ("prompts", {"paths": "c", "losses": ["ct"], "inference": ["ct"]}),
        ("duplex", {"graph": False}),
        ("duplex", {"codebook": "trainable"}),
        ("duplex", {"fusion": "additive", "messages": ["counterfactual"]}),
        ("duplex", {"seen_rows": "random", "unseen_rows": "random", "momentum": 0.0}),
    ],
)  # fmt: skip
def test_rows_of_them_keep_it_too(kind, row):
    check_method(find(kind), row)


@dataclass(frozen=True)
class ProbeOptions(Options):
    scale: float = 10.0


class Probe(Method[ProbeOptions]):
    """A linear head over the compositions: what is wrong with its children is one line each."""

    Options = ProbeOptions

    def __init__(self, setting, options):
        super().__init__(setting, options)
        self.head = nn.Linear(setting.dim, setting.labels.size)

    def logits(self, z):
        return self.options.scale * self.head(z)

    def losses(self, batch, shared):
        return {"c": cross_entropy(self.logits(batch.z), batch.compositions)}

    @torch.no_grad()
    def scorer(self, columns):
        rows = torch.as_tensor(columns)

        @torch.no_grad()
        def scores(inputs):
            return self.logits(inputs["cls"])[:, rows].softmax(-1)

        return scores


def test_a_sound_method_passes():
    check_method(Probe)
    check_method(Probe, {"scale": 3.0})


class Unscored(Probe):
    scorer = Method.scorer


class NoLoss(Probe):
    losses = Method.losses


class Stray(Probe):
    def start(self, train):
        self.mean = train.z.mean(0)


class Late(Probe):
    def start(self, train):
        self.register_buffer("mean", train.z.mean(0))


class Forgetful(Probe):
    """What scores need is not in the state."""

    def start(self, train):
        self.register_buffer("mean", train.z.mean(0), persistent=False)

    def logits(self, z):
        return super().logits(z - getattr(self, "mean", 0.0))


class Unseeded(Probe):
    def start(self, train):
        nn.init.normal_(self.head.bias, generator=torch.Generator().manual_seed(torch.seed() % 2**31))


class Shuffled(Probe):
    def batches(self, train, size, order):
        return torch.randperm(len(train)).split(size)


class Meddling(Probe):
    def start(self, train):
        train.z.mul_(2)


class BatchBound(Probe):
    def scorer(self, columns):
        inner = super().scorer(columns)
        return lambda inputs: inner({"cls": inputs["cls"] - inputs["cls"].mean(0)})


class Fixed(Probe):
    """Scores of the first columns, whatever is asked."""

    def scorer(self, columns):
        return super().scorer(sorted(columns))


class Graded(Probe):
    def scorer(self, columns):
        return lambda inputs: self.logits(inputs["cls"])[:, torch.as_tensor(columns)]


class Undefined(Probe):
    def losses(self, batch, shared):
        return {"c": self.logits(batch.z).std(0).mean()}  # one image has no deviation


class Unreached(Probe):
    def losses(self, batch, shared):
        return {"c": batch.z.sum()}


class Many(Probe):
    def losses(self, batch, shared):
        return {"c": self.logits(batch.z).sum(0)}


class Odd(Probe):
    @classmethod
    def needs(cls, options):
        return frozenset({"audio"})


class Narrow(Probe):
    def exhibits(self):
        return Exhibits(features=lambda inputs: inputs["cls"], semantic=lambda pairs: torch.ones(len(pairs), 3))


class Undecided(Probe):
    def likelihood(self):
        return torch.full((12,), torch.inf)


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Stray, "mean is a plain tensor"),
        (Late, "registered by start"),
        (Forgetful, "after saving and loading"),
        (Unseeded, "differs between two runs"),
        (Shuffled, "another generator"),
        (Meddling, "changes the cached input"),
        (BatchBound, "depend on the other images"),
        (Fixed, "order of their columns"),
        (Graded, "keeps gradients"),
        (Undefined, "loss 'c' of a batch of one image is nan"),
        (Unreached, "reach nothing that is trained"),
        (Many, "no single number"),
        (Odd, "audio"),
        (Narrow, "semantic prototypes and the features beside them are not of one width"),
        (Undecided, "no finite number for each of the 12 compositions"),
    ],
)
def test_what_is_wrong_is_one_sentence(kind, said):
    with pytest.raises(MethodFault, match=said) as caught:
        check_method(kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [(Unscored, "scorer"), (NoLoss, "losses")])
def test_a_method_without_its_two_functions_says_so(kind, name):
    with pytest.raises(TypeError, match=f"defines no `{name}`"):
        check_method(kind)
