"""Rows of the codebook that follow features which move."""

from __future__ import annotations

import pytest
import torch

from duplex.errors import UsageError
from duplex.methods.duplex import Duplex
from duplex.methods.duplex import DuplexOptions as Options
from tests.methods import twin
from tests.methods.world import batch_of, features, small_labels, small_method, step_of

SEEN = small_labels().pairs["train"].tolist()


def own_means(method: Duplex, z: torch.Tensor, own: torch.Tensor) -> dict[int, torch.Tensor]:
    """Mean z^c of each composition's images."""
    found = method.paths.features(z).detach()
    return {c: found[own == c].mean(0) for c in own.unique().tolist()}


def test_rows_drawn_to_a_batch_move_and_no_others():
    method = small_method(Options(width=5, graph=False, rows="ema", momentum=0.7)).eval()
    before, z, own = method.codebook.rows.clone(), features(6, 1), torch.tensor([*SEEN[:3], *SEEN[:3]])
    step_of(method, z, own)
    assert torch.equal(method.codebook.rows, before)
    method.after_batch()
    for c, mean in own_means(method, z, own).items():
        torch.testing.assert_close(method.codebook.rows[c], twin.unit(0.7 * before[c] + 0.3 * mean))
    others = [c for c in range(len(before)) if c not in SEEN[:3]]
    assert torch.equal(method.codebook.rows[others], before[others])


def test_unseen_rows_are_composed_of_rows_as_they_are():
    method = small_method(Options(width=5, graph=False, rows="ema")).eval()
    own = torch.tensor([*SEEN, *SEEN[:3]])
    with torch.no_grad():
        method.codebook.rows.copy_(twin.unit(torch.randn_like(method.codebook.rows)))
    before = method.codebook.rows.clone()
    method.follow(batch_of(features(len(own), 2), own))
    assert torch.equal(method.codebook.rows[SEEN], before[SEEN])
    unseen = next(
        c
        for c in range(len(before))
        if c not in SEEN and {c // 3, c % 3} <= {*(own // 3).tolist(), *(own % 3).tolist()}
    )
    state, object = before[own[own // 3 == unseen // 3]].mean(0), before[own[own % 3 == unseen % 3]].mean(0)
    torch.testing.assert_close(method.codebook.rows[unseen], twin.unit(state + object - before[own].mean(0)))


def test_recomputed_rows_are_the_means_of_features_as_they_are():
    method = small_method(Options(width=5, graph=False, rows="recomputed")).eval()
    z, own = features(20, 3), torch.tensor((SEEN * 3)[:20])
    before = method.codebook.rows.clone()
    method.follow(batch_of(z, own))
    for c, mean in own_means(method, z, own).items():
        torch.testing.assert_close(method.codebook.rows[c], twin.unit(mean))
        assert not torch.allclose(before[c], method.codebook.rows[c], atol=1e-3)
    fixed = small_method(Options(width=5, graph=False)).eval()
    before = fixed.codebook.rows.clone()
    fixed.follow(batch_of(z, own))
    assert torch.equal(fixed.codebook.rows, before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": "ema"}, "rows: ema undoes what graph: true refines"),
        ({"rows": "recomputed", "graph": False, "codebook": "trainable"}, "rows: recomputed needs codebook: buffer"),
        ({"rows": "ema", "graph": False, "unseen_rows": "random"}, "rows: ema needs codebook: buffer"),
        ({"rows": "ema", "graph": False, "losses": ("s", "o"), "inference": ("so",)}, "moves what neither"),
    ],
)
def test_rows_that_follow_ask_for_what_they_stand_on(options, said):
    with pytest.raises(UsageError, match=said):
        Options(**options)
