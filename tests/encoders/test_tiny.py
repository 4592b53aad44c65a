import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks.tiny_drawing import LOOKS, OUTLINES
from duplex.encoders import tiny
from duplex.encoders.base import load_encoder, unknown_words


def test_the_weights_are_small_and_in_half_precision():
    assert tiny.WEIGHTS.stat().st_size <= 8_000_000
    with safe_open(tiny.WEIGHTS, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    rows = tensors.pop("token_rows")
    assert rows.dtype == torch.int32
    assert torch.equal(rows, rows.unique())
    assert tensors[tiny.TOKENS].shape[0] == len(rows) < 1000
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16, torch.int64}


def test_every_label_and_the_usual_prompt_are_known_and_an_unknown_word_is_named():
    known = [*LOOKS, *OUTLINES, "a photo of the picture"]
    assert unknown_words("tiny", known) == []
    assert unknown_words("tiny", [*known, "a photo of a zebra", "zebra"]) == ["zebra"]


@pytest.fixture(scope="module")
def encoder():
    return load_encoder("tiny")


def test_its_patch_tokens_are_the_cells_of_its_last_feature_map(encoder) -> None:
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (3, 3, 64, 64), dtype=np.uint8))
    features, tokens = encoder.encode_patches(pixels)
    assert torch.equal(features, encoder.encode_images(pixels))
    assert tokens.shape == (3, *encoder.patch_shape) and torch.isfinite(tokens).all()
    pooled = encoder.visual.head(tokens.mean(1))  # average pooling, then the projection
    torch.testing.assert_close(pooled, features, rtol=1e-4, atol=1e-5)
