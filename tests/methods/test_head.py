"""What a head leaves to its kinds is said, not met as a number out of nowhere."""

from __future__ import annotations

import pytest
import torch

from duplex.layers.word_feasibility import feasibility
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


def test_compositions_that_stand_aside_are_the_unseen_ones():
    """By ten times the scale: a cosine of -1 and one of 1 are two apart. Seen ones are not moved at all."""
    held = Bare(setting("open"), Bare.Options(), trained_words=False).held_back(3.0)
    seen = torch.as_tensor(LABELS.seen)
    assert (held[seen] == 0).all() and (held[~seen] == 30).all()


@pytest.mark.parametrize(("world", "size"), [("closed", 7), ("open", LABELS.size)])
def test_training_tells_seen_compositions_apart_or_all(world, size):
    head = Bare(setting(world), Bare.Options(), trained_words=False)
    assert head.columns.compositions.tolist() == (list(range(size)) if size == 12 else LABELS.pairs["train"].tolist())
    assert head.columns.states.tolist() == [c // 3 for c in head.columns.compositions.tolist()]
    assert not any(True for _ in head.words.parameters()) and head.margins is None
    assert len(list(Bare(setting(), Bare.Options(), trained_words=True).words.parameters())) == 2


def test_feasibility_is_that_of_the_vectors_given():
    head, words = Bare(setting(), Bare.Options(), trained_words=False), setting().words
    found = head.feasible(words.states, words.objects)
    assert found.dtype == torch.float32
    expected = feasibility(words.states.numpy(), words.objects.numpy(), LABELS)
    torch.testing.assert_close(found, torch.as_tensor(expected).float())
