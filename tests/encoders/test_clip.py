import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from duplex.encoders.base import load_encoder
from duplex.encoders.libraries import open_clip
from duplex.encoders.open_clip import ClipFamily, ResizeAndCrop, build_model
from duplex.errors import DuplexError
from tests.encoders.small import noise_image, write_folder


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("encoder"))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(["shortest", "longest", "squash"]))
@example(1, 64, "longest")
def test_pixels_are_open_clips(width: int, height: int, mode: str) -> None:
    config = open_clip.transform.PreprocessCfg(size=32, resize_mode=mode, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    picture = noise_image(width, height)
    try:
        wanted = open_clip.transform.image_transform_v2(config, is_train=False)(picture)
    except ValueError:  # 1 x 64, whose longest side is to be 32: a side of no pixels, here of one
        assert ResizeAndCrop(vars(config))(picture).shape == (3, 32, 32)
        return
    ours = ResizeAndCrop(vars(config))(picture).float() / 255
    mean, std = torch.tensor(config.mean).view(3, 1, 1), torch.tensor(config.std).view(3, 1, 1)
    assert torch.equal((ours - mean) / std, wanted)


def test_a_very_long_picture_is_its_middle() -> None:
    transform = ResizeAndCrop(vars(open_clip.transform.PreprocessCfg(size=8)))
    strip = noise_image(2_000, 2)
    whole = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(size=8, mean=(0,) * 3, std=(1,) * 3), is_train=False
    )
    for picture in (strip, strip.rotate(90, expand=True)):
        assert (transform(picture).float() / 255 - whole(picture)).abs().max() < 0.02
    assert transform(noise_image(20_000, 1)).shape == (3, 8, 8)


def test_features_are_open_clips(name: str) -> None:
    encoder = load_encoder(name, towers="image")
    model = build_model(ClipFamily().find(name))
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    prepared = (pixels.float() / 255 - mean) / std
    assert torch.equal(encoder.encode_images(pixels), model.encode_image(prepared))
    features, patches = encoder.encode_patches(pixels)
    assert torch.allclose(features, model.encode_image(prepared), atol=1e-5)
    assert patches.shape[1:] == encoder.patch_shape == (4, 32)
    assert not encoder.visual.training and not any(p.requires_grad for p in encoder.visual.parameters())


def test_towers_load_separately(name: str) -> None:
    image, text, both = (load_encoder(name, towers=towers) for towers in ("image", "text", "both"))
    with pytest.raises(DuplexError, match="without its text tower"):
        _ = image.text
    with pytest.raises(DuplexError, match="without its image tower"):
        text.encode_images(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    assert text.text.tokens("red apple") == both.text.tokens("red apple")
    assert image.identity == text.identity == both.identity
    assert image.logit_scale == pytest.approx(np.log(1 / 0.07))


@pytest.mark.parametrize("architecture", ["RN50", "ViT-B-32", "ViT-B-16-SigLIP", "coca_ViT-B-32"])
@pytest.mark.slow
def test_real_architectures(architecture: str, tmp_path: Path) -> None:
    """A ResNet, a plain ViT, a timm tower and one that gives its tokens too, through a file of random weights."""
    config = open_clip.get_model_config(architecture)
    model = open_clip.create_model(architecture, pretrained_text=False)
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "open_clip_model.safetensors")
    encoder = load_encoder(f"local-dir:{tmp_path}", towers="image")
    pixels = encoder.image_transform(noise_image(50, 40))[None]
    assert encoder.encode_images(pixels).shape == (1, encoder.dim)
    if architecture == "coca_ViT-B-32":
        with pytest.raises(DuplexError, match="has no patch tokens"):
            encoder.encode_patches(pixels)
    if architecture == "ViT-B-16-SigLIP" and find_spec("transformers") is None:
        with pytest.raises(DuplexError, match="needs transformers; run pip install"):
            load_encoder(f"local-dir:{tmp_path}", towers="text")
