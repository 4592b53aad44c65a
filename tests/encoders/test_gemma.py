"""SigLIP 2's tokenizer, and prompts without a start token, against open_clip's `encode_text`."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from duplex.encoders import base
from duplex.encoders.base import load_encoder, missing_weights
from duplex.encoders.gemma import GemmaTokenizer, read_gemma_tokenizer
from duplex.encoders.libraries import open_clip
from duplex.encoders.text import ClipTextTower
from duplex.errors import DuplexError
from duplex.labels import LabelSpace
from duplex.methods.prompts import Prompts, following_tokens, name_tokens
from duplex.recognition.added import encode_prompts
from duplex.training.inputs import long_prompts
from tests.encoders.small import write_gemma_tokenizer
from tests.encoders.towers import small_model

LENGTH = 16


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_tokenizer(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> GemmaTokenizer:
    found = read_gemma_tokenizer(file, LENGTH)
    assert found is not None
    return found


def merged_in_order(text: str, model: dict[str, Any]) -> list[int]:
    """The naive twin: each merge in turn, wherever it applies, from left to right."""
    tokens: list[str] = []
    for character in text.replace(" ", "▁"):
        tokens += [character] if character in model["vocab"] else [f"<0x{byte:02X}>" for byte in character.encode()]
    for left, right in model["merges"]:
        places = [place for place, pair in enumerate(pairwise(tokens)) if pair == (left, right)]
        used = -2
        for place in places:
            if place > used + 1:  # of "aaa", the first two merge
                tokens[place : place + 2] = [left + right, ""]
                used = place
        tokens = [token for token in tokens if token]
    return [model["vocab"][token] for token in tokens]


words = st.text(alphabet="slicedpotar oé", max_size=30)


@given(words)
@settings(max_examples=200, deadline=None)
def test_the_pair_with_the_lowest_rank_merges_first(file: Path, tokenizer: GemmaTokenizer, text: str) -> None:
    clean = open_clip.tokenizer.canonicalize_text(text)
    assert tokenizer.encode(text) == merged_in_order(clean, json.loads(file.read_text())["model"])
    assert "é" in clean or tokenizer.decode(tokenizer.encode(text)) == clean


def test_texts_end_with_the_end_token_and_fill_the_context(tokenizer: GemmaTokenizer) -> None:
    ids = tokenizer.encode("A photo of: sliced apple!")
    assert ids == tokenizer.encode("a photo of sliced apple")
    rows = tokenizer(["a photo of sliced apple", "sliced " * 20], 12)
    assert rows[0].tolist() == [*ids, 1, *[0] * (11 - len(ids))]
    assert rows.shape == (2, 12) and rows[1, -1] == 1


def test_a_word_after_others_differs_from_the_word_alone(file: Path, tokenizer: GemmaTokenizer) -> None:
    tower: Any = SimpleNamespace(tokens=tokenizer.encode)
    assert name_tokens(tower, "sliced") != tokenizer.encode("sliced")
    whole = [*tokenizer.encode("a photo of"), *name_tokens(tower, "sliced"), *name_tokens(tower, "apple")]
    assert whole == tokenizer.encode("a photo of sliced apple")
    assert following_tokens(tower, "") == []
    with pytest.raises(DuplexError, match=r"finds no word in the name '\+\+'"):
        name_tokens(tower, "++")


def test_other_kinds_of_tokenizers_are_left_to_transformers(file: Path, tmp_path: Path) -> None:
    config = json.loads(file.read_text())
    for part in ({"model": {**config["model"], "type": "Unigram"}}, {"normalizer": {"type": "NFC"}}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(config | part))
        assert read_gemma_tokenizer(tmp_path / "tokenizer.json", LENGTH) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({**config, "model": {**config["model"], "merges": [["a"]]}}))
    with pytest.raises(DuplexError, match=r"holds no complete tokenizer.*download the file again"):
        read_gemma_tokenizer(tmp_path / "tokenizer.json", LENGTH)


def test_prompts_without_a_start_token_equal_encode_text(file: Path, tokenizer: GemmaTokenizer) -> None:
    """With the options of SigLIP 2's text tower, for all three kinds of prompts and for added words."""
    text = open_clip.get_model_config("ViT-B-32-SigLIP2-256")["text_cfg"]
    kept = ("no_causal_mask", "proj_bias", "pool_type", "norm_kwargs", "act_kwargs")
    size = len(json.loads(file.read_text())["model"]["vocab"])
    options = {name: text[name] for name in kept} | {"vocab_size": size, "context_length": LENGTH}
    model = small_model(options, custom=True)
    tower = ClipTextTower(model, tokenizer)
    assert (tower.start, tower.end) == (None, 1)
    labels = LabelSpace(("sliced", "diced"), ("apple", "potato"), {"train": np.array([0, 3])})
    prompts = Prompts(labels, tower)
    found = prompts.encode(labels.candidates("closed", "train"))
    texts = ["sliced apple", "diced potato", "sliced", "diced", "apple", "potato"]
    expected = model.encode_text(tokenizer([f"a photo of {text}" for text in texts]), normalize=True)
    assert (torch.cat(list(found)) - expected).abs().max() <= 1e-12
    context = {"context.composition": prompts.lexicon()[prompts.context_rows["composition"]]}
    added = encode_prompts(context, labels, tower, "composition", [("sliced", "potato")])
    expected = model.encode_text(tokenizer(["a photo of sliced potato"]), normalize=True)
    assert (added - expected).abs().max() <= 1e-12


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(base, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("duplex.encoders.open_clip.find_spec", lambda _: None)


@pytest.mark.usefixtures("offline")
def test_the_tokenizer_lies_beside_the_weights_or_on_the_hub(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "small-siglip2"
    small = {"image_size": 32, "layers": 1, "width": 16, "patch_size": 16, "head_width": 16}
    text: dict[str, Any] = {"context_length": LENGTH, "width": 16, "heads": 2, "layers": 1, "no_causal_mask": True}
    text |= {"vocab_size": 600, "pool_type": "last", "hf_tokenizer_name": "owner/small"}
    config = {"embed_dim": 16, "custom_text": True, "vision_cfg": small, "text_cfg": text}
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", {name: config})
    published = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "hf_hub": "owner/small/"}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"webli": published})
    model = open_clip.CustomTextCLIP(**{key: value for key, value in config.items() if key != "custom_text"})
    weights = tmp_path / "model.safetensors"
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, weights)
    assert load_encoder(name, str(weights), towers="image").dim == 16
    with pytest.raises(DuplexError, match=r"tokenizer .*'small-siglip2' is not on disk.* put tokenizer\.json from .*"):
        load_encoder(name, str(weights), towers="text")
    monkeypatch.setattr(base, "try_to_load_from_cache", lambda _, part: str(weights) if "model" in part else None)
    missing = missing_weights(name, "webli")
    assert missing is not None and missing.address.endswith("owner/small/resolve/main/tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    assert missing_weights(name, "webli") is None
    assert load_encoder(name, str(weights), towers="text").text.start is None
    labels = LabelSpace(("sliced", "s" * 40), ("apple",), {"train": np.array([0, 1])})
    assert long_prompts(name, str(weights), labels) == [f"{'s' * 40} apple"]
