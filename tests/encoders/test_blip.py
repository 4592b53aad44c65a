"""A small random BLIP through the encoders' door: its own model's features, prompts of embeddings, gradients."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from duplex.encoders.base import encoder_identity, load_encoder
from duplex.errors import DuplexError
from duplex.methods.base import Batch, MethodContext
from duplex.methods.prompt_method import PromptMethod, PromptOptions
from duplex.methods.prompts import Prompts
from duplex.testing import small_labels
from tests.encoders.small import noise_image

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS += ["a", "photo", "of", "red", "blue", "striped", "hollow", "circle", "star", "heart"]
TEXT = {"vocab_size": len(WORDS), "hidden_size": 16, "encoder_hidden_size": 16}
TEXT |= {"intermediate_size": 24, "projection_dim": 8}
TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 12}
TEXT |= {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 32, "patch_size": 16, "projection_dim": 8}


@pytest.fixture(scope="module")
def model():
    config = transformers.BlipConfig(text_config=TEXT, vision_config=VISION, image_text_hidden_size=8, projection_dim=8)
    torch.manual_seed(0)
    return transformers.BlipForImageTextRetrieval(config).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("blip")
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}, place / "model.safetensors"
    )
    (place / "config.json").write_text(json.dumps(model.config.to_dict()))
    (place / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    (place / "vocab.txt").write_text("\n".join(WORDS))
    (place / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    )
    return place


@pytest.fixture(scope="module")
def encoder(folder):
    return load_encoder(f"blip:{folder}")


def test_features_are_projected_class_tokens(encoder, model):
    pixels = torch.stack([encoder.image_transform(noise_image(70, 50, seed)) for seed in range(2)])
    assert pixels.shape == (2, 3, 32, 32)
    with torch.no_grad():
        tokens = model.vision_model(pixel_values=(pixels.float() / 255 - 0.5) / 0.25).last_hidden_state
        expected = model.vision_proj(tokens[:, 0])
    features, patches = encoder.encode_patches(pixels)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(patches, tokens[:, 1:], rtol=1e-5, atol=1e-6)
    assert patches.shape == (2, *encoder.patch_shape)
    assert torch.equal(encoder.encode_images(pixels), features)


def test_prompts_equal_the_models_own_texts(encoder, model):
    """Prompts of different lengths, padded inside, against one text at a time by ids."""
    labels = small_labels()
    prompts = Prompts(labels, encoder.text)
    columns = labels.candidates("open", "test")
    found = prompts.encode(columns)
    for k, c in enumerate(columns.tolist()):
        ids = [2, *encoder.text.tokens(f"a photo of {labels.name(c)}"), 3]
        with torch.no_grad():
            states = model.text_encoder(input_ids=torch.tensor([ids])).last_hidden_state
            expected = torch.nn.functional.normalize(model.text_proj(states[:, 0]), dim=-1)[0]
        torch.testing.assert_close(found.compositions[k], expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        states = model.text_encoder(input_ids=torch.tensor([[2, 4, 5, 6, WORDS.index(labels.states[0]), 3]]))
    expected = torch.nn.functional.normalize(model.text_proj(states.last_hidden_state[:, 0]), dim=-1)[0]
    torch.testing.assert_close(found.states[0], expected, rtol=1e-4, atol=1e-5)


def test_a_method_trains_over_it(encoder):
    """Gradients reach learned prompts through the frozen text model, whose own weights stay."""
    labels = small_labels()
    method = PromptMethod(MethodContext(labels, {"cls": (encoder.dim,)}, encoder.text), PromptOptions(width=6))
    own = torch.as_tensor(labels.pairs["train"])
    for recomputed in (False, True):
        method.checkpointing = recomputed
        method.zero_grad(set_to_none=True)
        losses = method.losses(Batch({"cls": torch.randn(len(own), 8)}, own), method.shared())
        torch.stack(list(losses.values())).sum().backward()
        assert method.paths.prompts.learned_rows.grad.abs().sum() > 0
    assert all(not p.requires_grad for p in encoder.text._model.parameters())


def test_towers_load_separately_and_a_moved_folder_keeps_the_identity(folder, tmp_path):
    identity = encoder_identity(f"blip:{folder}")
    assert load_encoder(f"blip:{folder}", towers="text").identity == identity
    assert encoder_identity(f"blip:{shutil.copytree(folder, tmp_path / 'moved')}") == identity


def test_a_folder_of_another_model_is_refused(folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((moved / "config.json").read_text())
    del config["image_text_hidden_size"]
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(DuplexError, match="lacks 'image_text_hidden_size', so it is not a BLIP retrieval model"):
        encoder_identity(f"blip:{moved}", None)
