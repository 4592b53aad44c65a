"""The encoder that `duplex fit` chooses, and encoders that it refuses before any work."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import block_count
from duplex.encoders.libraries import open_clip, timm
from duplex.encoders.open_clip import offline_model_arguments
from duplex.errors import UsageError
from duplex.recognition import fit, offers
from duplex.recognition.fit import checked_encoder
from duplex.recognition.labelled_folder import read_labelled_folder
from duplex.recognition.offers import RESTRICTED, choose_encoder, find_published, licence_words, other_offers
from tests.encoders.small import noise_image
from tests.recognition.drawn_folder import draw_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def weights(monkeypatch):
    def set_to(on_disk: set[str], reachable: bool) -> None:
        from duplex.encoders.base import MissingWeights

        def missing(name: str, _: str) -> MissingWeights | None:
            return None if name in on_disk else MissingWeights("https://example.org", 10**9)

        monkeypatch.setattr(offers, "missing_weights", missing)
        monkeypatch.setattr(offers, "is_reachable", lambda _: reachable)

    return set_to


@pytest.mark.parametrize(
    ("gpu", "images", "name"),
    [(True, 100_000, "PE-Core-L-14-336"), (False, 1_000, "PE-Core-L-14-336"), (False, 2_000, "ViT-L-16-SigLIP2-256"),
     (False, 10_000, "ViT-B-16-SigLIP2"), (False, 15_000, "MobileCLIP2-S2"), (False, 30_000, "ViT-B-32-SigLIP2-256"),
     (False, 1_000_000, "ViT-B-32-SigLIP2-256")],
)  # fmt: skip
def test_the_best_encoder_that_fits_the_device_and_the_images_is_chosen(weights, drawn, gpu, images, name):
    weights(set(offers.OFFERS), reachable=False)
    entry, reason = choose_encoder(read_labelled_folder(drawn).labels, images, gpu=gpu, cores=2)
    assert entry.name == name
    assert "weights on disk, licence" in reason
    assert ("commercial use is not allowed" in reason) == (name == "MobileCLIP2-S2")


def test_weights_on_disk_come_before_better_ones_within_reach(weights, drawn):
    weights({"ViT-B-32-quickgelu"}, reachable=True)
    assert choose_encoder(read_labelled_folder(drawn).labels, 10, gpu=True, cores=2)[0].name == "ViT-B-32-quickgelu"


@pytest.mark.parametrize("images", [10, 15_000, 1_000_000])
def test_weights_that_may_not_be_sold_are_named_but_never_downloaded(weights, tmp_path, images):
    draw_folder(tmp_path / "shop", images=4)
    (tmp_path / "shop" / "red").rename(tmp_path / "shop" / "rusty")
    weights(set(), reachable=True)
    entry, _ = choose_encoder(read_labelled_folder(tmp_path / "shop").labels, images, gpu=False, cores=2)
    assert find_published(entry.name, entry.weights).licence not in RESTRICTED
    line = other_offers(entry, images, gpu=False, cores=2)
    assert line.count("--encoder ") <= 3
    if images > 10:  # of 10, others with text come first
        assert "MobileCLIP2-S0 --weights dfndr2b (0.3 GB, licence apple-amlr: for research only, commercial use" in line
    assert "--encoder timm:" in line and "dinov3-license: read its terms before commercial use" in line
    assert f"--encoder {entry.name} " not in line


def test_a_licence_that_is_not_known_is_not_guessed():
    assert licence_words("") == "licence: see its model card"
    assert find_published("ViT-B-32", "laion2b_s34b_b79k").describe() == "0.6 GB, licence: see its model card"


@pytest.mark.parametrize("name", [*offers.OFFERS, *offers.BESIDE])
def test_size_and_licence_of_all_offers_are_known(name):
    known = find_published(name, (offers.OFFERS | offers.BESIDE)[name][0])
    assert known.licence and known.megabytes and known.blocks and known.text == (name in offers.OFFERS)


def test_the_packaged_encoder_is_taken_where_it_knows_the_words(weights, drawn):
    weights(set(), reachable=True)
    assert choose_encoder(read_labelled_folder(drawn).labels, 10, gpu=False, cores=2)[0].name == "tiny"


def test_without_any_encoder_one_line_says_what_to_do(weights, tmp_path):
    draw_folder(tmp_path / "shop", images=4)
    (tmp_path / "shop" / "red").rename(tmp_path / "shop" / "rusty")
    weights(set(), reachable=False)
    with pytest.raises(UsageError, match="--encoder local-dir:FOLDER") as caught:
        fit.fit_folder(tmp_path / "shop", tmp_path / "model", say=lambda _: None)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]
    weights(set(), reachable=True)
    _, reason = choose_encoder(read_labelled_folder(tmp_path / "shop").labels, 10, gpu=False, cores=2)
    assert "1.0 GB to download, licence Apache 2.0" in reason


@pytest.mark.parametrize("name", ["MobileCLIP2-S0", "timm:vit_small_patch16_dinov3", "timm:convnext_tiny", "tiny"])
def test_the_table_of_encoders_holds_for_built_ones(name):
    row = next(row for row in offers.published_encoders() if row.encoder == name)
    encoder = load_encoder(name, None if name == "tiny" else "random")
    assert encoder.dim == row.width
    assert (encoder.text is not None) == row.text
    assert (block_count(encoder) > 0) == row.blocks
    assert encoder.encode_images(encoder.image_transform(noise_image(30, 40))[None]).shape == (1, row.width)
    if name == "tiny":
        return  # its file has fewer rows of embeddings than its tower
    text = encoder.text
    modules = [encoder.visual] if text is None else [encoder.visual, text.blocks, text.norm]
    parameters = sum(parameter.numel() for module in modules for parameter in module.parameters())
    if text is not None:
        parameters += text.vocabulary.table.numel() + text.positions.numel() + text.projection.numel()
    assert 4e-6 * parameters == pytest.approx(row.megabytes, abs=1, rel=0.001)


@pytest.mark.parametrize("name", ["swin_base_patch4_window7_224"])
def test_the_table_says_which_towers_cannot_be_cut(name):
    architecture = open_clip.get_model_config(name)
    with torch.device("meta"):
        visual = open_clip.CLIP(**offline_model_arguments(architecture)).visual
    with pytest.raises(UsageError, match="whose blocks duplex cannot find"):
        block_count(SimpleNamespace(visual=visual, name=name))
    assert not find_published(name, None).blocks


def test_paths_of_weights_are_absolute_because_models_are_used_elsewhere(tmp_path, drawn, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(timm.create_model("test_efficientnet", num_classes=0).state_dict(), "w.safetensors")
    entry, _ = checked_encoder("timm:test_efficientnet", "w.safetensors", read_labelled_folder(drawn).labels)
    assert entry.weights == str(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("encoder", "weights", "message"),
    [(None, "openai", "--weights 'openai' is given without --encoder; add --encoder"),
     ("ViT-B-32", "random:1", "the weights random:1 are random, and no model can be fitted")],
)  # fmt: skip
def test_weights_that_make_no_model_are_refused_before_any_work(tmp_path, drawn, encoder, weights, message):
    with pytest.raises(UsageError, match=message):
        fit.fit_folder(drawn, tmp_path / "out", encoder=encoder, weights=weights, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []
