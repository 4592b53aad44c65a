"""Visual prototypes of Duplex: initial values, refinement, write-back."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.methods.codebook import Codebook
from duplex.methods.duplex import DuplexOptions as Options
from duplex.methods.prompts import Prototypes
from tests.methods import twin
from tests.methods.test_duplex import twin_features, twin_refined
from tests.methods.world import DIM, every_row, features, random_labels, small_labels, small_method, step_of

SEEN = small_labels().pairs["train"].tolist()


@pytest.mark.parametrize(
    "compositions",
    [[SEEN[0]], [SEEN[0]] * 4, [SEEN[0], SEEN[1]], SEEN],
    ids=["one image", "duplicates", "one state", "all seen"],
)
def test_written_prototypes_equal_the_twin(compositions):
    method = small_method(Options(width=5, adapter="none", refine_over="closed"))
    z, t = features(len(compositions), 3), method.shared()
    before = every_row(method)
    with torch.no_grad():
        refined = twin_refined(method, compositions, *twin_features(method, z, t))
    step_of(method, z, compositions, t)
    method.after_batch()
    after = every_row(method)
    for c in range(len(before)):
        if c in refined:
            torch.testing.assert_close(after[c], refined[c], rtol=1e-10, atol=1e-10)
        else:
            assert torch.equal(after[c], before[c])


def test_gradients_of_unseen_candidates_reach_disentanglers_and_projections():
    method = small_method(Options(width=5, adapter="none", losses=("visual",)))
    step = step_of(method, features(3, 5), torch.tensor([0, 3, 5]))
    rows = step.refinement.rows
    unseen = ~torch.isin(torch.as_tensor(step.refinement.compositions), torch.tensor(SEEN))
    assert unseen.any(), "the batch has an unseen candidate"
    (gradient,) = torch.autograd.grad(step.losses["visual"], rows, retain_graph=True)
    assert (gradient[unseen].abs().sum(1) > 0).all()
    parts = [f"{kind}.{layer}" for kind in ("state", "object") for layer in ("first", "second")]
    names = [*(f"paths.factors.{part}.weight" for part in parts), "fusion.state.weight", "fusion.object.weight"]
    weights = [method.get_parameter(name) for name in names]
    for name, found in zip(names, torch.autograd.grad(rows[unseen], weights, gradient[unseen]), strict=True):
        assert found.abs().sum() > 0, name


def test_momentum_one_freezes_the_codebook_and_zero_replaces_candidates():
    batch = torch.tensor(SEEN[:4])
    frozen = small_method(Options(width=5, momentum=1.0))
    before = every_row(frozen)
    step_of(frozen, features(4, 1), batch)
    frozen.after_batch()
    assert torch.equal(every_row(frozen), before)

    replaced = small_method(Options(width=5, momentum=0.0, adapter="none"))
    other = small_method(Options(width=5, momentum=0.0, adapter="none"))
    drawn = torch.randn(12, DIM, dtype=torch.float64)  # the earlier prototypes do not matter
    other.codebook.write_back(np.arange(12), drawn)
    steps = [step_of(method, features(4, 1), batch) for method in (replaced, other)]
    torch.testing.assert_close(steps[0].refinement.rows, steps[1].refinement.rows, rtol=0, atol=0)


def test_underflowing_posteriors_give_finite_gradients():
    for scale in (10.0, 100.0, 400.0):
        options = {"adapter": "none", "fusion": "additive", "messages": ("counterfactual",), "momentum": 0.0}
        method = small_method(Options.from_dict({"width": 5, **options}))
        method.paths.scale = scale
        method.float()
        z, batch = features(4, 1).float(), torch.tensor(SEEN[:4])
        prototypes = Prototypes(*(-t.detach().float() for t in method.shared()))
        step = step_of(method, z, batch, prototypes)
        step.total.backward()
        norms = step.refinement.rows.norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-5, atol=1e-5)
        for name, parameter in method.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


@settings(max_examples=30, deadline=None)
@given(st.tuples(st.integers(1, 4), st.integers(1, 4)), st.sampled_from(["compose", "random"]), st.integers(0, 10**6))
def test_initial_prototypes_equal_loops(sizes, unseen, seed):
    """Seen pairs start at the mean of their images; others at a composition of state, object and overall means."""
    random = np.random.default_rng(seed)
    labels = random_labels(*sizes, random)
    compositions = random.choice(labels.pairs["train"], 9)
    z = twin.unit(features(9, seed))
    book = Codebook(labels, DIM, unseen=unseen, random_seen=False).double()
    book.start(z, torch.as_tensor(compositions), seen=True)
    rows = book.prototypes(np.arange(labels.size)).detach()
    n, everything = len(labels.objects), sum(z) / len(z)

    def mean_where(chosen: list[bool]) -> Any:
        kept = [row for row, keep in zip(z, chosen, strict=True) if keep]
        return torch.stack(kept).mean(0) if kept else everything

    for c in range(labels.size):
        own = [int(x) == c for x in compositions]
        if any(own):
            expected = twin.unit(mean_where(own))
        elif unseen == "compose":
            state, other = ([int(x) // n == c // n for x in compositions], [int(x) % n == c % n for x in compositions])
            expected = twin.unit(mean_where(state) + mean_where(other) - everything)
        else:
            assert float(rows[c].norm()) == pytest.approx(1.0)
            continue
        torch.testing.assert_close(rows[c], expected, rtol=1e-10, atol=1e-10)


def test_a_write_back_stores_no_gradient():
    method = small_method(Options(width=5))
    step_of(method, features(3, 1), torch.tensor(SEEN[:3])).total.backward()
    method.after_batch()
    assert not every_row(method).requires_grad
    step_of(method, features(3, 2), torch.tensor(SEEN[:3])).total.backward()  # not through the step before
