"""What a head leaves to its kinds is said, not met as a number out of nowhere."""

from __future__ import annotations

import pytest
import torch

from duplex.methods.head import PairHead
from tests.methods.field import LABELS, batch, setting


class Bare(PairHead):
    pass


@pytest.mark.parametrize("name", ["image", "pairs"])
def test_a_head_without_an_embedding_says_which(name):
    head = Bare(setting(), Bare.Options(), trained_words=False)
    with pytest.raises(TypeError, match=f"test_head.Bare defines no `{name}`"):
        getattr(head, name)(batch(2).z)


def test_margins_come_off_the_logits_of_training_alone():
    class Dot(Bare):
        def image(self, z):
            return z

        def pairs(self, columns):
            return torch.eye(LABELS.size, 8, dtype=torch.float64)[columns.compositions]

    head, images = Dot(setting("open"), Bare.Options(), trained_words=False), batch(3)
    plain = head.losses(images, head.shared())["c"]
    head.margins = torch.arange(LABELS.size, dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(
        head.logits(images.z, head.shared().rows) - head.margins, images.compositions
    )
    assert head.losses(images, head.shared())["c"] == expected != plain
    every = torch.arange(LABELS.size).numpy()
    assert torch.equal(head.scorer(every)(images.inputs), head.logits(images.z, head.shared().rows))
