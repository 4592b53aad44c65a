"""Linear layers computed with oneDNN equal torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")


@pytest.fixture
def onednn(monkeypatch):
    monkeypatch.setattr(functional, "linear", functional.linear)  # put back afterwards
    monkeypatch.setattr(products, "LARGE", 0)
    product, made = products.product, []
    monkeypatch.setattr(products, "product", lambda *given: made.append(given) or product(*given))
    products.by_onednn()
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 12), (3, 4, 12), (2, 3, 4, 12), (12,)])
def test_values_and_gradients_are_those_of_torch(onednn, shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(12, 5, bias=bias)
    x, twin = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 5)
    rows = layer(x)
    (rows * twin).sum().backward()
    found = [rows.detach(), x.grad, *(p.grad for p in layer.parameters())]
    assert len(onednn) == 3

    exact = nn.Linear(12, 5, bias=bias).double()
    exact.load_state_dict(layer.double().state_dict())
    y = x.detach().double().requires_grad_()
    rows = y @ exact.weight.T + (exact.bias if bias else 0)
    (rows * twin).sum().backward()
    for one, other in zip(found, [rows.detach(), y.grad, *(p.grad for p in exact.parameters())], strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def test_other_number_types_are_computed_by_torch(onednn):
    layer, x = nn.Linear(12, 5), torch.randn(4, 12)
    assert layer.double()(x.double()).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.float()(x).dtype == torch.bfloat16
    assert not onednn


def test_frozen_inputs_and_weights_get_no_gradient(onednn):
    layer, x = nn.Linear(12, 5), torch.randn(4, 12)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert len(onednn) == 1 and layer.weight.grad is None and x.grad is None
    assert layer.bias.grad is not None and layer.bias.grad.tolist() == [4.0] * 5
