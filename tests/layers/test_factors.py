"""Adapter, disentanglers and fusion by their formulas, one image at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from duplex.layers.factors import Adapter, Disentangler, Factors, Fusion, unit
from tests.methods.field import close, linear
from tests.methods.world import DIM, features


def stirred(module: Any) -> Any:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=parameter.dtype))
    return module.eval()


def test_an_adapter_starts_as_the_identity_and_adds_its_bottleneck() -> None:
    adapter, z = Adapter(DIM, 5, 0.5, 0.3).double(), features(4, 0)
    assert torch.equal(adapter(z), z)
    stirred(adapter)
    for moved, row in zip(adapter(z).detach(), z, strict=True):
        close(moved, row + 0.3 * linear(adapter.up, linear(adapter.down, row).relu()))


@pytest.mark.parametrize("residual", [False, True])
def test_a_disentangler_is_a_unit_vector(residual: bool) -> None:
    part, z = stirred(Disentangler(DIM, 6, residual)), features(4, 0)
    for found, row in zip(part(z).detach(), z, strict=True):
        out = linear(part.second, linear(part.first, row).relu()) + (row if residual else 0)
        close(found, out / out.norm())
    both = stirred(Factors(DIM, 6, residual))
    close(torch.stack(both(z)).detach(), torch.stack([both.state(z), both.object(z)]).detach())
    assert not torch.allclose(*both(z))


@pytest.mark.parametrize("rectified", [False, True])
def test_fusion_joins_two_projections(rectified: bool) -> None:
    fusion = stirred(Fusion(DIM, rectified=rectified))
    z_s, z_o = features(4, 0), features(4, 1)
    joined = z_s @ fusion.state.weight.T + z_o @ fusion.object.weight.T
    joined = joined.relu() if rectified else joined
    close(fusion(z_s, z_o).detach(), (joined / joined.norm(dim=1, keepdim=True)).detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unit_features_are_at_least_float32(dtype: torch.dtype) -> None:
    z = (100 * features(5, 3)).to(dtype)
    found = unit(z)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), z.double() / z.double().norm(dim=1, keepdim=True), rtol=0, atol=1e-6)
