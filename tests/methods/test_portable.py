"""Exported tensors and the score formula by themselves; the tests of methods compare them with scores."""

import pytest
import torch

from duplex.methods import portable
from tests.methods.loops import close
from tests.methods.world import small_labels

LABELS = small_labels()


def test_negative_scores_have_probability_zero():
    scores = torch.tensor([[1.0, 3.0, -torch.inf], [0.0, 0.0, 0.0], [-1.0, 0.5, 0.0]])
    close(portable.normalise_posterior_sums(scores), [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    close(portable.probabilities({}, scores), portable.normalise_posterior_sums(scores))
    close(portable.probabilities({"product": torch.ones(())}, scores), scores.softmax(-1))


@pytest.mark.parametrize("mixed", [False, True])
def test_further_pairs_are_composed_of_known_effects(mixed):
    """An unknown state or object (-1) adds nothing; interactions need both."""
    g = torch.Generator().manual_seed(2)
    shapes = {"effects.mean": (5,), "effects.states": (4, 5), "effects.objects": (3, 5)}
    if mixed:
        shapes |= {"interactions.states": (4, 2), "interactions.objects": (3, 2), "interactions.core": (2, 2, 5)}
    t = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    pairs = [(0, 0), (3, 2), (-1, 1), (2, -1), (-1, -1), (0, 2)]
    expected = []
    for m, n in pairs:
        row = torch.zeros(5)
        row += t["effects.states"][m] if m >= 0 else 0
        row += t["effects.objects"][n] if n >= 0 else 0
        if mixed and min(m, n) >= 0:
            for r, s in ((0, 0), (0, 1), (1, 0), (1, 1)):
                row += t["interactions.states"][m, r] * t["interactions.objects"][n, s] * t["interactions.core"][r, s]
        expected.append(row)
    torch.testing.assert_close(portable.composed_prototypes(t, *torch.tensor(pairs).T), torch.stack(expected))
