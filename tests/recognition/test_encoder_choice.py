"""The encoder that `duplex fit` chooses, and encoders that it refuses before any work."""

import pytest
from safetensors.torch import save_file

from duplex.encoders.libraries import timm
from duplex.errors import UsageError
from duplex.recognition import fit
from duplex.recognition.fit import checked_encoder, choose_encoder
from duplex.recognition.labelled_folder import read_labelled_folder
from tests.recognition.drawn_folder import draw_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def offers(monkeypatch):
    def set_to(on_disk: set[str], reachable: bool) -> None:
        from duplex.encoders.base import MissingWeights

        def missing(name: str, _: str) -> MissingWeights | None:
            return None if name in on_disk else MissingWeights("https://example.org", 10**9)

        monkeypatch.setattr(fit, "missing_weights", missing)
        monkeypatch.setattr(fit, "is_reachable", lambda _: reachable)

    return set_to


@pytest.mark.parametrize(
    ("gpu", "images", "name"),
    [(True, 100_000, "ViT-L-14-quickgelu"), (False, 1_000, "ViT-L-14-quickgelu"),
     (False, 10_000, "ViT-B-16-quickgelu"), (False, 1_000_000, "ViT-B-32-quickgelu")],
)  # fmt: skip
def test_the_best_encoder_that_fits_the_device_and_the_images_is_chosen(offers, drawn, gpu, images, name):
    offers(set(fit.OFFERS), reachable=False)
    entry, reason = choose_encoder(read_labelled_folder(drawn).labels, images, gpu=gpu, cores=2)
    assert entry.name == name
    assert "weights on disk" in reason


def test_weights_on_disk_come_before_better_ones_within_reach(offers, drawn):
    offers({"ViT-B-32-quickgelu"}, reachable=True)
    assert choose_encoder(read_labelled_folder(drawn).labels, 10, gpu=True, cores=2)[0].name == "ViT-B-32-quickgelu"


def test_the_packaged_encoder_is_taken_where_it_knows_the_words(offers, drawn):
    offers(set(), reachable=True)
    assert choose_encoder(read_labelled_folder(drawn).labels, 10, gpu=False, cores=2)[0].name == "tiny"


def test_without_any_encoder_one_line_says_what_to_do(offers, tmp_path):
    draw_folder(tmp_path / "shop", images=4)
    (tmp_path / "shop" / "red").rename(tmp_path / "shop" / "rusty")
    offers(set(), reachable=False)
    with pytest.raises(UsageError, match="--encoder local-dir:FOLDER") as caught:
        fit.fit_folder(tmp_path / "shop", tmp_path / "model", say=lambda _: None)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]
    offers(set(), reachable=True)
    _, reason = choose_encoder(read_labelled_folder(tmp_path / "shop").labels, 10, gpu=False, cores=2)
    assert "1.0 GB to download" in reason


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
