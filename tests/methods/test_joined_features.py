"""Methods on the features of two encoders: scaled by their own deviations, and who reads them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from duplex.errors import UsageError
from duplex.methods import portable
from duplex.methods.base import Batch
from duplex.methods.closed_form import ClosedFormMethod, ClosedFormOptions
from duplex.methods.gaussian import ClassStatistics, ClosedForm, FitSettings, LinearDiscriminant
from duplex.methods.layers import part_scales, unit
from duplex.methods.linear import Linear, LinearOptions
from duplex.methods.registry import make_method, parse_options
from duplex.testing import small_batch, small_context, small_labels

LABELS = small_labels()
OPEN = np.arange(LABELS.size)
WIDTH = small_context().dim
PARTS = (WIDTH, 5)
FACTOR = 0.05  # deviation of the second encoder's features from their mean, relative to those of the first


def joined(count: int, seed: int, split: str = "train") -> Batch:
    """Images with features of two encoders side by side; those of the second hardly deviate from their mean."""
    batch = small_batch(count, seed=seed, split=split)
    random = torch.Generator().manual_seed(7)
    mixed = unit(batch.cls) @ torch.randn(WIDTH, 5, generator=random)
    second = torch.ones(5) + FACTOR * mixed
    return Batch({"cls": torch.cat([unit(batch.cls), unit(second)], 1)}, batch.compositions)


TRAIN, TEST = joined(120, 0), joined(30, 5, "test").cls
CONTEXT = replace(small_context(), inputs={"cls": (sum(PARTS),)}, text=None, words=None, parts=PARTS)


def naive_scaled(z: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Divide each encoder's columns by the square root of their total variance in `of`."""
    first = of[:, :WIDTH].double()
    second = of[:, WIDTH:].double()
    deviations = [float((part - part.mean(0)).square().sum(1).mean().sqrt()) for part in (first, second)]
    return torch.cat([z[:, :WIDTH] / deviations[0], z[:, WIDTH:] / deviations[1]], 1)


def test_scales_give_each_part_the_variance_1():
    variances = torch.tensor([1.0, 3.0, 0.5, 0.25, 0.25])
    expected = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0])
    torch.testing.assert_close(part_scales(variances, (2, 3)), expected)
    assert torch.equal(part_scales(variances, ()), torch.ones(5))
    assert part_scales(torch.zeros(2), (1, 1)).isfinite().all()


def test_regressions_are_those_of_scaled_features():
    method = Linear(CONTEXT, LinearOptions(l2=1e-2))
    method.start(TRAIN)
    z = unit(TRAIN.cls)
    scaled = Batch({"cls": naive_scaled(z, z).float()}, TRAIN.compositions)
    naive = Linear(replace(CONTEXT, parts=()), LinearOptions(l2=1e-2))
    length = unit(scaled.cls) / scaled.cls  # `unit` divides by this again
    naive.start(scaled)
    assert length.std(0).max() < 1e-4, "features of two unit vectors have one length"
    # the naive fit sees unit features, so its regularisation differs by the square of their length
    ratio = float(length.mean())
    naive = Linear(replace(CONTEXT, parts=()), LinearOptions(l2=1e-2 * ratio**2))
    naive.start(scaled)
    expected = naive.scorer(OPEN)({"cls": naive_scaled(unit(TEST), z).float()}).softmax(-1)
    torch.testing.assert_close(method.scorer(OPEN)({"cls": TEST}).softmax(-1), expected, rtol=1e-2, atol=1e-3)
    plain = Linear(replace(CONTEXT, parts=()), LinearOptions(l2=1e-2))
    plain.start(TRAIN)
    assert (plain.scorer(OPEN)({"cls": TEST}).softmax(-1) - expected).abs().max() > 0.01


def test_the_closed_form_is_that_of_features_scaled_by_their_deviation_within_pairs():
    sizes = len(LABELS.states), len(LABELS.objects)
    z = unit(TRAIN.cls).double()
    own = ClassStatistics.of(z, TRAIN.compositions, *sizes)
    within = z - own.by_pair().means[torch.searchsorted(own.pairs, TRAIN.compositions)]
    scaled = ClassStatistics.of(naive_scaled(z, within), TRAIN.compositions, *sizes)
    candidates = torch.as_tensor(OPEN)
    x = unit(TEST).double()
    # deviations that only differ by the degrees of freedom, which scale both parts alike
    expected = ClosedForm.fit(scaled).scorer(candidates)(naive_scaled(x, within))
    found = ClosedForm.fit(own, FitSettings(parts=PARTS)).scorer(candidates)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (ClosedForm.fit(own).scorer(candidates)(x) - expected).abs().max() > 0.01
    assert LinearDiscriminant.fit(own.by_state(), PARTS)(x).isfinite().all()


def test_exported_tensors_read_unscaled_features():
    method = ClosedFormMethod(
        CONTEXT, ClosedFormOptions(losses=(), inference=("linear", "gaussian_factors", "gaussian"), l2=1e-2)
    )
    method.start(TRAIN)

    scores = method.scorer(OPEN)({"cls": TEST})
    exported = sum(term for _, term in portable.score_terms(method.portable(OPEN), TEST))
    torch.testing.assert_close(exported, scores, rtol=1e-4, atol=1e-4)
    assert method.fitted_statistics().settings.parts == PARTS


@pytest.mark.parametrize("kind", ["kg_sp", "scen"])
def test_a_method_of_one_encoder_says_which_read_both(kind):
    with pytest.raises(UsageError, match="closed_form or linear or product, such as") as caught:
        make_method(kind, parse_options(kind, {}), replace(CONTEXT, words=small_context().words))
    assert "\n" not in str(caught.value) and "reads the features of one encoder" in str(caught.value)
