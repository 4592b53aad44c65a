"""Base classes of the methods of other papers."""

from __future__ import annotations

import pytest
import torch

from duplex.layers.word_feasibility import feasibility
from duplex.methods.head import EmbeddingHead
from tests.methods.field import LABELS, batch, task


class Identity(EmbeddingHead):
    def embed_images(self, z):
        return z

    def prepare(self, candidates):
        return torch.eye(LABELS.size, 8, dtype=torch.float64)[candidates.compositions]


@pytest.mark.parametrize("name", ["embed_images", "score"])
def test_a_missing_function_is_named(name):
    class Bare(EmbeddingHead):
        score = EmbeddingHead.__mro__[2].score

    head = Bare(task(), Bare.Options(), trained_words=False)
    with pytest.raises(NotImplementedError, match=rf"Bare must define {name}\(\)"):
        getattr(head, name)(*[None] * (3 if name == "score" else 1))


def test_margins_are_subtracted_in_training_only():
    head, images = Identity(task("open"), Identity.Options(), trained_words=False), batch(3)
    plain = head.losses(images, head.shared())["composition"]
    head.margins = torch.arange(LABELS.size, dtype=torch.float64)
    logits = head.logits(images.cls, head.shared()[0])
    expected = torch.nn.functional.cross_entropy(logits - head.margins, images.compositions)
    assert head.losses(images, head.shared())["composition"] == expected != plain
    assert torch.equal(head.scorer(torch.arange(LABELS.size).numpy())(images.inputs), logits)


def test_initial_margins_exceed_every_cosine_of_unseen_compositions():
    margins = Identity(task("open"), Identity.Options(), trained_words=False, scale=3.0).initial_margins()
    seen = torch.as_tensor(LABELS.seen)
    assert (margins[seen] == 0).all() and (margins[~seen] > 2 * 3.0).all()


@pytest.mark.parametrize("world", ["closed", "open"])
def test_training_compares_seen_compositions_or_all_in_the_open_world(world):
    head = Identity(task(world), Identity.Options(), trained_words=False)
    expected = LABELS.pairs["train"].tolist() if world == "closed" else list(range(LABELS.size))
    assert head.train_candidates.compositions.tolist() == expected


def test_feasibility_is_computed_from_the_given_vectors():
    head, words = Identity(task(), Identity.Options(), trained_words=False), task().words
    rho = head.feasibility(words.states, words.objects)
    expected = feasibility(words.states.numpy(), words.objects.numpy(), LABELS)
    torch.testing.assert_close(rho, torch.as_tensor(expected).float())
