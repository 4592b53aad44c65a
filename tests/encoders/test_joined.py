"""Joined encoders: features side by side, text features in the columns of their encoder, and who reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from duplex.encoders.base import (
    encoder_identity,
    family_modules,
    has_text,
    joined_name,
    joined_parts,
    load_encoder,
    part_widths,
    unknown_words,
)
from duplex.encoders.prompt_tree import PromptTree
from duplex.errors import DuplexError, UsageError
from duplex.features.encode import WantedOutputs, encode_outputs
from duplex.methods.layers import unit
from tests.encoders.small_timm import SMALL, write_weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with random weights of a small network without a text tower."""
    return write_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module", params=[False, True], ids=["text first", "text last"])
def parts(request, weights) -> list[tuple[str, str | None]]:
    listed = [("tiny", None), (SMALL, str(weights))]
    return listed[::-1] if request.param else listed


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (90, 120, 3), np.uint8))


def test_a_name_lists_encoders_and_weights(parts):
    name = joined_name(parts)
    assert joined_parts(name) == parts and name.startswith("joined:")
    assert joined_parts("tiny", "tag") == [("tiny", "tag")]
    assert has_text(name) and not has_text(SMALL)
    assert unknown_words(name, ["red circle"]) == [] and unknown_words(name, ["gryphon"]) == ["gryphon"]
    assert set(family_modules(name)) == {"duplex.encoders.joined", "duplex.encoders.tiny", "duplex.encoders.others"}


def test_features_are_those_of_each_encoder_side_by_side(parts):
    joined = load_encoder(joined_name(parts))
    each = [load_encoder(*part, towers="image") for part in parts]
    pictures = [picture(seed) for seed in range(3)]
    pixels = torch.stack([joined.image_transform(image) for image in pictures])
    features = joined.encode_images(pixels)
    expected = []
    for encoder in each:
        own = encoder.encode_images(torch.stack([encoder.image_transform(image) for image in pictures]))
        expected.append(unit(own.half()))
    torch.testing.assert_close(features, torch.cat(expected, 1), rtol=0, atol=1e-6)
    assert joined.dim == sum(encoder.dim for encoder in each) == features.shape[1]
    identity = joined.identity.to_dict()
    assert part_widths(identity) == tuple(encoder.dim for encoder in each)
    for key in ("weights", "architecture", "preprocessing", "encoder"):
        assert all(encoder.identity.to_dict()[key] in identity[key] for encoder in each)
    assert type(joined.identity).from_dict(identity) == joined.identity
    assert (
        encoder_identity(joined_name(parts), resize="squash") != joined.identity == encoder_identity(joined_name(parts))
    )


def test_prompts_have_the_probabilities_of_the_encoder_with_a_text_tower(parts):
    joined = load_encoder(joined_name(parts))
    alone = load_encoder("tiny")
    tower = joined.text
    ids = [tower.tokens(f"a photo of {words}") for words in ("red circle", "blue star", "green moon")]
    longest = max(map(len, ids)) + 2
    lexicon = torch.cat([tower.embedding([tower.start]), tower.embedding([tower.end]), *map(tower.embedding, ids)])
    rows, place = [], 2
    for tokens in ids:
        row = [0, *range(place, place + len(tokens)), 1]
        rows.append(row + [-1] * (longest - len(row)))
        place += len(tokens)
    sequences = np.array(rows)
    features = {
        "blocks": tower.encode_blocks(sequences, lexicon),
        "tree": tower.encode(PromptTree.of(sequences), lexicon),
        "plain": tower.encode_plain(sequences, lexicon),
    }
    image = picture(0)
    logits = {}
    z = unit(joined.encode_images(joined.image_transform(image)[None]))
    for name, t in features.items():
        logits[name] = np.exp(tower.logit_scale) * z @ unit(t).T
    z = unit(alone.encode_images(alone.image_transform(image)[None]).half())
    expected = np.exp(alone.text.logit_scale) * z @ unit(alone.text.encode_blocks(sequences, lexicon)).T
    for found in logits.values():
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_only_the_wanted_towers_are_loaded(parts):
    joined = load_encoder(joined_name(parts), towers="text")
    assert [part.name for part in joined.parts] == ["tiny"] and joined.text is not None
    assert load_encoder(joined_name(parts), towers="image").text is None


def test_what_one_encoder_alone_can_do_is_refused(parts):
    joined = load_encoder(joined_name(parts), towers="image")
    with pytest.raises(UsageError, match="whose blocks duplex cannot find"):
        WantedOutputs(block_inputs=1).row_shapes(joined)
    with pytest.raises(DuplexError, match="no patch tokens"):
        encode_outputs(joined, joined.image_transform(picture(0))[None], WantedOutputs(patches=True))
    with pytest.raises(DuplexError, match="no patch tokens"):
        _ = joined.patch_shape


@pytest.mark.parametrize("name", ["joined:tiny", "joined:tiny + tiny"])
def test_a_list_of_equal_encoders_is_refused(name):
    with pytest.raises(UsageError, match="no list of different encoders"):
        load_encoder(name)
