"""Batches and the protocol's defaults: what a method that says nothing else does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods.base import Batch, Exhibits, Method, columns_of, summed
from tests.methods.field import LABELS, batch, setting


class Kept:
    """Inputs on a disk: rows are asked for on the host, in an order of their own."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.asked: list[torch.Tensor] = []

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        self.asked.append(rows)
        return self.values[rows]

    def shuffled(self, order: torch.Generator) -> torch.Tensor:
        return torch.arange(len(self.values)).flip(0)


class Plain(Method[Any]):
    pass


class Linear(Method[Any]):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.head, self.still = torch.nn.Linear(8, 3), torch.nn.Linear(8, 2).requires_grad_(False)


def test_some_rows_of_a_batch_are_a_batch():
    whole, rows = batch(6), torch.tensor([4, 0, 4])
    some = whole[rows]
    assert len(some) == 3 and len(whole) == 6
    assert torch.equal(some.z, whole.z[rows]) and torch.equal(some.inputs["patch"], whole.inputs["patch"][rows])
    assert torch.equal(some.compositions, whole.compositions[rows]) and some.host is None
    assert some.labels.tolist() == whole.compositions[rows].tolist()
    known = Batch(whole.inputs, whole.compositions, np.arange(6) + 70)
    assert known.labels.tolist() == [70, 71, 72, 73, 74, 75] and known[rows].labels.tolist() == [74, 70, 74]


def test_inputs_on_a_disk_are_asked_by_rows_of_the_host_and_say_their_order():
    plain = batch(6)
    kept = Kept(plain.inputs["patch"])
    both = Batch({"cls": plain.z, "patch": kept}, plain.compositions)  # type: ignore[dict-item]
    rows = torch.tensor([1, 5])
    assert torch.equal(both[rows].inputs["patch"], plain.inputs["patch"][rows]) and kept.asked[0] is rows
    assert both.shuffled(torch.Generator()).tolist() == [5, 4, 3, 2, 1, 0]


def test_an_epoch_shows_every_image_once_in_an_order_of_the_generators():
    method, images = Plain(setting(), Plain.Options()), batch(7)
    steps = list(method.batches(images, 3, torch.Generator().manual_seed(1)))
    assert [len(rows) for rows in steps] == [3, 3, 1]
    assert torch.equal(torch.cat(steps), torch.randperm(7, generator=torch.Generator().manual_seed(1)))
    assert sorted(torch.cat(steps).tolist()) == list(range(7))


def test_a_method_that_says_nothing_trains_what_can_be_and_offers_nothing():
    plain, linear = (kind(setting(), kind.Options()) for kind in (Plain, Linear))
    assert plain.groups() == [] and plain.summary() == {"parameters": 0}
    assert linear.groups() == [{"params": [linear.head.weight, linear.head.bias]}]
    assert linear.summary() == {"parameters": 27}
    assert plain.needs(plain.options) == {"cls"} and plain.checkpointing is False
    assert plain.shared() == () and plain.exhibits() == Exhibits() and plain.exhibits().names == ()
    for name, given in (("sweep", 2), ("evidence", [0]), ("portable", [0])):
        assert getattr(plain, name)(given) is None
    assert plain.likelihood() is None
    scores = torch.tensor([[1.0, 2.0, -torch.inf]])
    assert torch.equal(plain.probabilities(scores), scores.softmax(1))
    for name, arguments in (("losses", (batch(2), ())), ("scorer", ([0],))):
        with pytest.raises(TypeError, match=f"test_base.Plain defines no `{name}`"):
            getattr(plain, name)(*arguments)


def test_a_setting_knows_its_width_and_its_tower():
    there = setting()
    assert there.dim == 8 and there.tower is there.text


def test_columns_are_states_and_objects():
    states, objects = columns_of(LABELS, np.array([11, 0, 4]), torch.device("cpu"))
    assert states.tolist() == [3, 0, 1] and objects.tolist() == [2, 0, 1]


def test_a_sum_of_terms_is_a_score():
    def terms(inputs: Any) -> Any:
        yield "a", inputs["cls"][:, :2].clone().requires_grad_()
        yield "b", 10 * inputs["cls"][:, 1:3]

    z = batch(3).z
    found = summed(terms, 2, torch.device("cpu"))({"cls": z})
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, (z[:, :2] + 10 * z[:, 1:3]).float())
    assert summed(terms, 2, torch.device("cpu"))({"cls": z[:0]}).shape == (0, 2)
