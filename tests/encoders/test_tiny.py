import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from duplex.data.shapes import OBJECTS, STATES
from duplex.encoders import encoder_identity, load_encoder, unknown_words
from duplex.encoders.encoder_source import read_config
from duplex.encoders.openclip import CLIP, SimpleTokenizer
from duplex.encoders.tiny import family as tiny
from duplex.errors import DuplexError
from duplex.synthetic import LOOKS, MILD, OUTLINES, draw_image, random_stream


@pytest.fixture(scope="module")
def loaded():
    config = read_config(tiny.CONFIG)
    state, rows = tiny.load_state()
    model = CLIP(**config["architecture"])
    model.load_state_dict(state)
    return config, model.eval(), rows


# -- the weights --------------------------------------------------------------------------------------------------


def test_the_weights_are_small_and_in_half_precision():
    assert tiny.WEIGHTS.stat().st_size <= 3_000_000
    with safe_open(tiny.WEIGHTS, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    rows = tensors.pop("token_rows")
    assert rows.dtype == torch.int32
    assert torch.equal(rows, rows.unique())
    assert tensors[tiny.TOKENS].shape[0] == len(rows) < 1000
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16, torch.int64}


def test_only_rows_in_use_have_values(loaded):
    _, model, rows = loaded
    finite = model.token_embedding.weight.isfinite().all(dim=1)
    assert torch.equal(finite.nonzero().flatten(), rows)
    others = {name: value for name, value in model.state_dict().items() if name != tiny.TOKENS}
    assert all(value.isfinite().all() for value in others.values())


def test_every_label_and_the_usual_prompt_are_known_and_an_unknown_word_is_named():
    known = [*STATES, *OBJECTS, *LOOKS, *OUTLINES, "a photo of the picture"]
    assert unknown_words("tiny", known) == []
    assert unknown_words("tiny", [*known, "a photo of a zebra", "zebra"]) == ["zebra"]


def test_padding_does_not_reach_the_text_feature(loaded):
    """The tower is causal: what stands after the end token changes nothing."""
    config, model, rows = loaded
    length = config["architecture"]["text_cfg"]["context_length"]
    ids = [49406, *SimpleTokenizer().encode("a photo of red star"), 49407]
    texts = torch.zeros(2, length, dtype=torch.long)
    texts[:, : len(ids)] = torch.tensor(ids)
    texts[1, len(ids) :] = int(rows[5])
    with torch.no_grad():
        one, other = model.encode_text(texts)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_tiny_clip_recognises_images_of_its_own_style(loaded):
    """On images of its own style that it was not trained on it must be far better than chance (1 in 22)."""
    config, model, _ = loaded
    side, context = config["preprocess"]["image_size"], config["architecture"]["text_cfg"]["context_length"]
    kinds = list(OUTLINES)
    images = [
        np.asarray(draw_image(kind, LOOKS["plain"], MILD, random_stream(1, f"{kind} {k}")).resize((side, side)))
        for kind in kinds
        for k in range(4)
    ]
    texts = torch.zeros(len(kinds), context, dtype=torch.long)
    for row, kind in enumerate(kinds):
        ids = [49406, *SimpleTokenizer().encode(f"a photo of {kind}"), 49407]
        texts[row, : len(ids)] = torch.tensor(ids)
    pixels = (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    with torch.no_grad():
        images, words = model.encode_image(pixels), model.encode_text(texts)
    best = (torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(words).T).argmax(dim=1)
    assert (best == torch.arange(len(kinds)).repeat_interleave(4)).float().mean() > 0.5


# -- as an encoder ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder():
    return load_encoder("tiny")


def test_the_packaged_encoder_encodes_images_and_text(encoder) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 50, 3), dtype=np.uint8))
    features = encoder.encode_images(encoder.image_transform(image)[None])
    assert features.shape == (1, encoder.dim) and torch.isfinite(features).all()
    assert encoder.text.dim == encoder.dim and encoder.identity == encoder_identity("tiny")
    assert torch.isfinite(encoder.text.embedding(encoder.text.tokens("a photo of a red circle"))).all()


def test_a_word_without_embedding_is_named(encoder) -> None:
    with pytest.raises(DuplexError, match="bureaucracy"):
        encoder.text.tokens("a red bureaucracy")


def test_its_patch_tokens_are_the_cells_of_its_last_feature_map(encoder) -> None:
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (3, 3, 48, 48), dtype=np.uint8))
    features, tokens = encoder.encode_patches(pixels)
    assert torch.equal(features, encoder.encode_images(pixels))
    assert tokens.shape == (3, *encoder.patches) and torch.isfinite(tokens).all()
    pooled = encoder.visual.head(tokens.mean(1))  # average pooling, then the projection
    torch.testing.assert_close(pooled, features, rtol=1e-4, atol=1e-5)
