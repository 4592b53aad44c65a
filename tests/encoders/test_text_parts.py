"""Tokens and embeddings of a text tower; every text architecture of open_clip, small, against its `encode_text`."""

import json
from typing import Any

import pytest
import torch

from duplex.encoders.libraries import open_clip
from duplex.encoders.prompt_tree import PromptTree
from duplex.encoders.text import ClipTextTower, Vocabulary
from duplex.errors import DuplexError
from tests.encoders.towers import END, START, FakeTokenizer, small_model, text_ids

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


def test_start_and_end_come_from_the_tokenizer() -> None:
    tower = ClipTextTower(small_model(), FakeTokenizer([START], [END], 0))
    assert (tower.start, tower.end) == (START, END)
    assert tower.tokens("7 8") == [7, 8]
    headless = ClipTextTower(small_model({"no_causal_mask": True, "pool_type": "last"}), FakeTokenizer([], [1], 1))
    assert headless.tokens("7 8") == [7, 8]


SIZES = {"context_length", "vocab_size", "width", "heads", "layers"}
ELSEWHERE = {"hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode"}


def kinds() -> list[tuple[str, dict[str, Any]]]:
    """What text architectures differ in beside size, each with the first name that has it."""
    found: dict[str, str] = {}
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)
        if "hf_model_name" in config["text_cfg"]:
            continue
        text = {key: value for key, value in config["text_cfg"].items() if key not in SIZES | ELSEWHERE}
        coca = "multimodal_cfg" in config
        kind = {"quick_gelu": config.get("quick_gelu", False), "custom": config.get("custom_text", False), "coca": coca}
        found.setdefault(json.dumps({"text": text} | kind, sort_keys=True), name)
    return [(name, json.loads(kind)) for kind, name in found.items()]


KINDS = kinds()


def prompts_for(text: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Prompts that end where this architecture looks for the end, and that end token."""
    end = text["eos_id"] if text.get("pool_type") == "eos" else END
    return [[START, 3, 9, s, *[8] * (s % 3), o, end] for s in (10, 11, 12) for o in range(20, 25)], end


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=[name for name, _ in KINDS])
def test_equals_encode_text(name: str, kind: dict[str, Any]) -> None:
    sequences, end = prompts_for(kind["text"])
    model = small_model(**kind)
    tower = ClipTextTower(model, FakeTokenizer([START], [end], 0))
    read_at_end = kind["text"].get("pool_type", "argmax") in ("argmax", "eos") and not kind["coca"]
    assert tower.shares_prefixes == (read_at_end and not kind["text"].get("no_causal_mask", False))
    expected = model.encode_text(text_ids(sequences), normalize=False)
    lexicon = tower.vocabulary.table
    for features in (tower.encode(PromptTree.of(sequences), lexicon), tower.encode_plain(sequences, lexicon)):
        assert features.shape == (len(sequences), tower.dim)
        assert (features - expected).abs().max() <= 1e-12


OPTIONS = [
    ({"ls_init_value": 0.1}, True), ({"proj_bias": True}, True), ({"proj_type": "none"}, True),
    ({"norm_kwargs": {"eps": 1e-3}}, True), ({"act_kwargs": {"approximate": "tanh"}}, True), ({"mlp_ratio": 2.5}, True),
    ({"pool_type": "last"}, False), ({"pool_type": "first"}, False), ({"no_causal_mask": True}, False),
    ({"no_causal_mask": True, "pool_type": "first"}, False), ({"qk_norm": True}, False),
    ({"scale_attn": True, "scale_fc": True}, False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "shares_prefixes"), OPTIONS, ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_options_that_no_published_architecture_uses_are_exact(
    text: dict[str, Any], shares_prefixes: bool, padding: int
) -> None:
    """Without shared prefixes the place of the end token, the padding and the whole context count."""
    sequences, _ = prompts_for(text)
    model = small_model(text, custom=True)
    tower = ClipTextTower(model, FakeTokenizer([START], [END], padding))
    assert tower.shares_prefixes == shares_prefixes
    lexicon = tower.vocabulary.table.clone().requires_grad_()
    features = tower.encode(PromptTree.of(sequences), lexicon)
    assert (features - model.encode_text(text_ids(sequences, padding))).abs().max() <= 1e-12
    (gradient,) = torch.autograd.grad(features.square().sum(), lexicon)
    assert gradient.abs().sum() > 0


def test_masked_padding_stays_masked() -> None:
    model = small_model({"no_causal_mask": True}, custom=True)
    model.text.use_pad_mask = True
    sequences, _ = prompts_for({})
    tower = ClipTextTower(model, FakeTokenizer([START], [END], 0))
    features = tower.encode(PromptTree.of(sequences), tower.vocabulary.table)
    assert (features - model.encode_text(text_ids(sequences))).abs().max() <= 1e-12


def test_a_text_tower_of_another_library_is_refused() -> None:
    class HFTextEncoder(torch.nn.Module):
        transformer = torch.nn.Identity()

    model = torch.nn.Module()
    model.text = HFTextEncoder()
    with pytest.raises(DuplexError, match=r"takes token embeddings, and HFTextEncoder does not.*ViT-B-32"):
        ClipTextTower(model)
