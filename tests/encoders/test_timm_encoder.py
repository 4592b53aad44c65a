from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from duplex.encoders.base import encoder_identity, load_encoder
from duplex.encoders.image_blocks import last_blocks, patch_tokens
from duplex.encoders.libraries import timm
from duplex.errors import DuplexError, UsageError
from duplex.training.lineup import finetunable_blocks
from tests.encoders.small import noise_image

NAME = "timm:test_resnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A random model's weights with a classifier of ten, as published files have one."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", pretrained=False, num_classes=10)
    path = tmp_path_factory.mktemp("timm") / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    return path


@pytest.fixture(scope="module")
def encoder(weights):
    return load_encoder(NAME, str(weights), towers="image")


def test_features_equal_the_models_pooled_ones(encoder, weights):
    model = timm.create_model("test_resnet", pretrained=False, num_classes=10)
    model.load_state_dict(load_file(weights))
    model.reset_classifier(0)
    pixels = torch.stack([encoder.image_transform(noise_image(70, 90, seed)) for seed in (0, 1)])
    assert pixels.dtype == torch.uint8
    config = model.pretrained_cfg
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = model.eval()((pixels.float() / 255 - mean) / std)
    features, cells = encoder.encode_patches(pixels)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(encoder.encode_images(pixels), features)
    assert features.shape == (2, encoder.dim) and cells.shape == (2, *encoder.patch_shape)
    torch.testing.assert_close(cells.mean(1), features, rtol=1e-5, atol=1e-5)  # average pooling


def test_the_width_is_that_of_the_pooled_features():
    encoder = load_encoder("timm:mobilenetv3_small_050", "random:0", towers="image")  # its last cells have 288 channels
    assert encoder.dim == encoder.encode_images(torch.zeros(1, 3, 224, 224, dtype=torch.uint8)).shape[1] == 1024


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "test_vit", "test_efficientnet"])
def test_patch_tokens_are_those_of_the_patches_alone(name):
    torch.manual_seed(0)
    trunk = timm.create_model(name, pretrained=False, num_classes=0).eval()
    size = trunk.pretrained_cfg["input_size"]
    with torch.no_grad():
        cells = trunk.forward_features(torch.randn(2, *size))
        tokens = patch_tokens(trunk, cells)
        if name == "test_vit":  # begins with the class token
            assert torch.equal(tokens, cells[:, 1:]) and tokens.shape[1] == trunk.patch_embed.num_patches
        else:
            torch.testing.assert_close(tokens.mean(1), trunk.forward_head(cells), rtol=1e-5, atol=1e-5)


def test_timm_encoders_have_no_text_tower(weights):
    encoder = load_encoder(NAME, str(weights), towers="text")
    assert encoder.text is None
    assert encoder.identity == encoder_identity(NAME, str(weights))


@pytest.mark.parametrize(
    ("name", "given", "word"),
    [
        ("timm:no_such_net", "x", "unknown encoder 'timm:no_such_net'"),
        (NAME, None, "needs weights"),
        ("timm:resnet18", "no_such_tag", "a1_in1k"),
        ("timm:gcvit_base", None, r"\(none\)"),  # published elsewhere than on the hub
    ],
)
def test_unknown_names_and_weights_are_refused(name, given, word):
    with pytest.raises(UsageError, match=word):
        encoder_identity(name, given)


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        (lambda name: f"_{name}", r"holds the unknown tensor '_bn1.bias' and lacks .* such as 'conv1\.0\.weight', "),
        (lambda name: name.replace("layer1", "layer9"), r"unknown tensor 'layer9.* such as 'layer1\.0\.conv1\.weight'"),
    ],
)
def test_weights_of_another_layout_are_refused_with_the_expected_names(weights, tmp_path, rename, said):
    save_file({rename(name): tensor for name, tensor in load_file(weights).items()}, tmp_path / "moved.safetensors")
    with pytest.raises(DuplexError, match=said):
        load_encoder(NAME, str(tmp_path / "moved.safetensors"), towers="image")


def test_weights_of_a_wider_model_are_refused(weights, tmp_path):
    state = {name: tensor.repeat(2, *[1] * (tensor.ndim - 1)) if tensor.ndim else tensor
             for name, tensor in load_file(weights).items()}  # fmt: skip
    save_file(state, tmp_path / "wide.safetensors")
    with pytest.raises(DuplexError, match=r"it lacks \d+ of .* names and shapes, such as 'conv1\.0\.weight'"):
        load_encoder(NAME, str(tmp_path / "wide.safetensors"), towers="image")


def test_a_model_that_cannot_be_cut_is_refused_in_one_line(tmp_path):
    uncut = load_encoder("timm:test_nfnet", "random:0", towers="image")
    reason = "encoder 'timm:test_nfnet' has an image tower whose blocks duplex cannot find"
    with pytest.raises(UsageError, match=f"{reason}; set `block_inputs` to 0 and leave out `finetune`$"):
        last_blocks(uncut, 1)
    room = finetunable_blocks(uncut, 10, tmp_path)  # `duplex fit` goes on without blocks, and says why
    assert (room.depth, room.reason) == (0, reason)
