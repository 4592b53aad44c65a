from __future__ import annotations

import pytest
import torch

from duplex.encoders.clip_text import ClipTextTower
from duplex.encoders.openclip import open_clip
from duplex.encoders.text_parts import Vocabulary
from duplex.errors import DuplexError
from tests.encoders.towers import END, START, FakeTokenizer, small_model

CLIP_VOCABULARY = 49408


@pytest.fixture(scope="module")
def clip() -> Vocabulary:
    return Vocabulary(torch.zeros(CLIP_VOCABULARY, 2))


def test_clip_tokens_are_open_clips(clip: Vocabulary) -> None:
    for text in ("sliced apple", "faux fur", "a photo of a caramelized sweet-potato", "Sneakers & boots"):
        expected = open_clip.tokenize([text])[0]
        ids = [*clip.frame.opening, *clip.tokens(text), *clip.frame.closing]
        assert expected[: len(ids)].tolist() == ids
        assert (expected[len(ids) :] == clip.frame.padding).all()


def test_a_word_without_a_trained_token_is_named() -> None:
    table = torch.zeros(CLIP_VOCABULARY, 2)
    whole = Vocabulary(table)
    zebra = whole.tokens("zebra")
    table[zebra[0]] = float("nan")
    vocabulary = Vocabulary(table)
    assert vocabulary.tokens("striped heart") == whole.tokens("striped heart")
    with pytest.raises(DuplexError, match=r"without the word 'zebra'.*duplex encoders"):
        vocabulary.tokens("striped zebra")
    with pytest.raises(DuplexError, match="'zebra'"):
        vocabulary.embedding(zebra)


def test_embeddings_are_rows_of_the_table() -> None:
    model = small_model()
    tower = ClipTextTower(model, FakeTokenizer([START], [END], 0))
    assert torch.equal(tower.embedding([3, 5]), model.token_embedding.weight[[3, 5]])
    assert torch.equal(tower.embedding(torch.tensor([5])), model.token_embedding.weight[[5]])
    assert not tower.embedding([3]).requires_grad
    with pytest.raises(DuplexError, match="token 64 is not among"):
        tower.embedding([64])


def test_start_and_end_come_from_the_tokenizer() -> None:
    tower = ClipTextTower(small_model(), FakeTokenizer([START], [END], 0))
    assert (tower.start, tower.end) == (START, END)
    assert tower.tokens("7 8") == [7, 8]
    headless = ClipTextTower(small_model({"no_causal_mask": True, "pool_type": "last"}), FakeTokenizer([], [1], 1))
    assert headless.tokens("7 8") == [7, 8]
    with pytest.raises(DuplexError, match="no single start token"):
        _ = headless.start


def test_the_scale_and_sizes_are_the_models() -> None:
    """The scale is ln(1/τ), as open_clip stores it."""
    model = small_model()
    with torch.no_grad():
        model.logit_scale.fill_(4.6052)
    tower = ClipTextTower(model)
    assert tower.logit_scale == pytest.approx(4.6052)
    assert (tower.width, tower.dim, tower.context_length) == (16, 8, 12)
