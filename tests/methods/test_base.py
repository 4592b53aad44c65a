from typing import Any

import numpy as np
import pytest
import torch

from duplex.errors import DuplexError
from duplex.methods.base import Batch, Inspectable, Method
from duplex.training.loop import shuffled_rows
from tests.methods.field import batch, context


class DiskInputs:
    """Inputs that are read by rows on the CPU and choose their order."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.values[rows]

    def shuffled_rows(self, order: torch.Generator) -> torch.Tensor:
        return torch.arange(len(self.values)).flip(0)


class Plain(Method[Any]):
    pass


class Linear(Method[Any]):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.head, self.frozen = torch.nn.Linear(8, 3), torch.nn.Linear(8, 2).requires_grad_(False)


def test_terms_that_are_no_function_are_refused():
    class Returning(Plain):
        def score_terms(self, candidates: Any) -> Any:
            return {"state": torch.zeros(1)}

    with pytest.raises(DuplexError, match=r"score_terms\(\) returned a dict; return a function"):
        Returning(context(), Plain.Options()).scorer(np.arange(3))


def test_rows_of_a_batch_are_a_batch():
    whole, rows = batch(6), torch.tensor([4, 0, 4])
    part = whole[rows]
    assert len(part) == 3 and len(whole) == 6
    assert torch.equal(part.cls, whole.cls[rows]) and torch.equal(part.inputs["patch"], whole.inputs["patch"][rows])
    assert torch.equal(part.compositions, whole.compositions[rows])
    assert part.compositions_np.tolist() == whole.compositions[rows].tolist()
    assert part.rows.tolist() == [4, 0, 4] and part[torch.tensor([1])].rows.tolist() == [0]
    assert whole.rows_np.tolist() == list(range(6))
    known = Batch(whole.inputs, whole.compositions, np.arange(6) + 70)
    assert known.compositions_np[0] == 70 and known[rows].compositions_np.tolist() == [74, 70, 74]


def test_inputs_on_disk_are_indexed_and_choose_the_order():
    plain, rows = batch(6), torch.tensor([1, 5])
    on_disk = Batch({"cls": plain.cls, "patch": DiskInputs(plain.inputs["patch"])}, plain.compositions)  # type: ignore[dict-item]
    assert torch.equal(on_disk[rows].inputs["patch"], plain.inputs["patch"][rows])
    assert shuffled_rows(on_disk, torch.Generator()).tolist() == [5, 4, 3, 2, 1, 0]
    order = shuffled_rows(plain, torch.Generator().manual_seed(1))
    assert torch.equal(order, torch.randperm(6, generator=torch.Generator().manual_seed(1)))


def test_the_defaults_train_all_parameters_and_offer_nothing_else():
    plain, linear = (kind(context(), kind.Options()) for kind in (Plain, Linear))
    assert plain.groups() == [] and plain.summary() == {"parameters": 0}
    assert linear.groups() == [{"params": [linear.head.weight, linear.head.bias]}]
    assert linear.summary() == {"parameters": 27}
    assert plain.needs(plain.options) == {"cls"}
    assert plain.shared() == () and plain.inspectable() == Inspectable() and plain.inspectable().present_fields == ()
    for name, argument in (("score_terms", [0]), ("portable", [0])):
        assert getattr(plain, name)(argument) is None
    scores = torch.tensor([[1.0, 2.0, -torch.inf]])
    assert torch.equal(plain.probabilities(scores), scores.softmax(1))
