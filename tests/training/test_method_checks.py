"""Checks of method code: checksums notice writes that PyTorch does not count; probabilities are refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duplex.errors import DuplexError
from duplex.training import method_checks
from duplex.training.method_checks import InputChecksums, checked_probabilities

WRITES: dict[str, Any] = {
    "numpy": lambda x: x.numpy().__imul__(2),
    "data": lambda x: x.data.mul_(2),
    "one number": lambda x: x.data[-1, -1:].add_(1),
    "another order of the images": lambda x: x.data.copy_(x.flip(0).clone()),
    "another order of an image's numbers": lambda x: x.data.copy_(x.flip(1).clone()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("write", WRITES)
def test_checksums_notice_every_write(write, dtype):
    inputs = {"patch": torch.zeros(6, 2, 3), "cls": torch.rand(6, 8).to(dtype)}
    if write == "numpy" and dtype == torch.bfloat16:
        return  # NumPy has no such type
    checksums = InputChecksums.of({"cls": torch.ones(3, 2)}, inputs)
    checksums.require_unchanged("Knn")
    WRITES[write](inputs["cls"])
    with pytest.raises(DuplexError, match="Knn writes into its input 'cls', which other runs read too; clone it first"):
        checksums.require_unchanged("Knn")


def test_inputs_of_any_layout_have_checksums_except_large_ones_and_those_on_the_disk(monkeypatch):
    strided, empty = torch.rand(8, 6).T, torch.zeros(0, 4, 5)
    on_disk: Any = SimpleNamespace(shape=(6, 2, 3))
    checksums = InputChecksums.of({"a": strided, "b": empty, "c": torch.rand(2, 2, requires_grad=True), "d": on_disk})
    assert [name for name, *_ in checksums.entries] == ["a", "b", "c"]
    checksums.require_unchanged("Knn")
    monkeypatch.setattr(method_checks, "LARGEST_COMPARED", 100)
    assert [name for name, *_ in InputChecksums.of({"a": strided, "b": empty}).entries] == ["b"]


def method_with(result: Any) -> Any:
    return SimpleNamespace(class_name="Knn", probabilities=lambda scores: result)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned None; expected a floating tensor [2, 4]"),
        (torch.full((2, 4), 0.25).numpy(), "returned a ndarray; expected a floating tensor"),
        (torch.full((2, 3), 1 / 3), "returned a tensor [2, 3] of float32; expected a floating tensor [2, 4]"),
        (torch.ones(2, 4, dtype=torch.int64), "of int64; expected a floating tensor"),
        (torch.tensor([[0.5, 0.5, 0.5, -0.5]] * 2), "returned -0.5; expected probabilities of at least 0"),
        (torch.tensor([[0.25] * 4, [0.5] * 4]), "whose sum over an image's candidates is 2; expected 1"),
    ],
)
def test_other_values_than_probabilities_are_refused_by_name(result, message):
    with pytest.raises(DuplexError, match=re.escape("Knn.probabilities() ") + ".*" + re.escape(message)) as error:
        checked_probabilities(method_with(result), torch.zeros(2, 4))
    assert "\n" not in str(error.value)


def test_probabilities_are_returned_as_they_are():
    p = torch.rand(5, 4).double().softmax(1)
    assert checked_probabilities(method_with(p), torch.zeros(5, 4)) is p
    nan = torch.full((2, 4), torch.nan)
    assert checked_probabilities(method_with(nan), torch.zeros(2, 4)) is nan
