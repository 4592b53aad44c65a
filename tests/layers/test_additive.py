"""The variance of interactions: how far the search goes, and moments where the normal equations are too large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duplex.layers import additive
from duplex.layers.additive import Observations


@pytest.mark.parametrize(("peak", "found"), [(-2.6, -2.625), (0.3, 0.25), (-9.0, -4.875), (5.0, 1.875)])
def test_the_variance_of_interactions_stays_within_a_decade_of_its_grid(
    peak: float, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole decades from 1e-4 to 10, and no further from their ends than half, a quarter and an eighth of one."""
    monkeypatch.setattr(additive, "log_likelihood", lambda seen, v, ridge: -abs(np.log10(v) - peak))
    seen = Observations(*(torch.ones(1),) * 4, (1, 1))
    assert np.log10(additive.interaction_variance(seen, 0.1, direct=2)) == pytest.approx(found)
    monkeypatch.setattr(additive, "_by_moments", lambda *given: given)
    assert additive.interaction_variance(seen, 0.1, direct=1) == (seen, 0.1, 1)


@pytest.mark.parametrize(("objects", "free"), [((0, 1, 0), 1), ((0, 0, 0), 1), ((0, 1, 1, 0, 0, 1), 2)])
def test_moments_count_residuals_by_degrees_of_freedom(objects: tuple[int, ...], free: int) -> None:
    """One at least, however few pairs there are; noise of the means is taken off."""
    states = [0, 1, 2, 0, 1, 2][: len(objects)]
    tensors: Any = [torch.tensor(x) for x in (states, objects)]
    x = 50 * torch.randn(len(objects), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = Observations(*tensors, torch.full((len(objects),), 4.0).double(), x, (3, 2))
    found = additive.fit(seen, 1.0, 0.1, 0)
    apart = sum(float(((x[k] - found.at(*(t[k : k + 1] for t in tensors))[0]) ** 2).mean()) for k in range(len(x)))
    assert additive.interaction_variance(seen, 0.1, direct=0) == pytest.approx(apart / free - 0.25)
