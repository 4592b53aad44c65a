"""The tiny CLIP that ships with the package, through the same door as any other."""

import numpy as np
import pytest
import torch
from PIL import Image

from duplex.encoders import encoder_identity, load_encoder
from duplex.encoders.source import find_packaged
from duplex.errors import DuplexError

pytestmark = pytest.mark.skipif(not (find_packaged() / "weights.safetensors").exists(), reason="no packaged weights")


@pytest.fixture(scope="module")
def encoder():
    return load_encoder("tiny")


def test_it_sees_and_reads(encoder) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 50, 3), dtype=np.uint8))
    features = encoder.encode_images(encoder.image_transform(picture)[None])
    assert features.shape == (1, encoder.dim) and torch.isfinite(features).all()
    assert encoder.text.dim == encoder.dim and encoder.identity == encoder_identity("tiny")
    assert torch.isfinite(encoder.text.embedding(encoder.text.tokens("a photo of a red circle"))).all()


def test_a_word_it_never_saw_is_named(encoder) -> None:
    with pytest.raises(DuplexError, match="bureaucracy"):
        encoder.text.tokens("a red bureaucracy")


def test_its_patch_tokens_are_the_cells_of_its_last_feature_map(encoder) -> None:
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (3, 3, 48, 48), dtype=np.uint8))
    features, tokens = encoder.encode_patches(pixels)
    assert torch.equal(features, encoder.encode_images(pixels))
    assert tokens.shape == (3, *encoder.patches) and torch.isfinite(tokens).all()
    pooled = encoder.visual.head(tokens.mean(1))  # average pooling, then the projection
    torch.testing.assert_close(pooled, features, rtol=1e-4, atol=1e-5)
