"""`encoder.resize`: the whole image squashed or padded instead of cropped, from params.yaml to an exported model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import duplex
from duplex.config.params import EncoderParams
from duplex.encoders.base import PACKAGED, encoder_identity, load_encoder
from duplex.errors import DuplexError, UsageError
from duplex.features.file import read_features
from duplex.project.run import _encoder_settings
from tests.commands import Command, command, project
from tests.encoders.small import noise_image, write_folder
from tests.projects import draw_table

__all__ = ["command", "project"]
SIZE = load_encoder(PACKAGED, towers="image").image_transform(Image.new("RGB", (8, 8))).shape[-1]


def pixels(image: Image.Image, resize: str | None) -> torch.Tensor:
    return load_encoder(PACKAGED, towers="image", resize=resize).image_transform(image)


def halves(width: int, height: int) -> Image.Image:
    """A white image with a left end in grey."""
    array = np.full((height, width, 3), 255, dtype=np.uint8)
    array[:, : width // 5] = 128
    return Image.fromarray(array)


def test_crop_squash_and_pad_show_other_parts_of_a_wide_image() -> None:
    image = halves(2 * SIZE, SIZE)
    crop, squash, pad = (pixels(image, resize) for resize in ("crop", "squash", "pad"))
    fifth, quarter = SIZE // 5, SIZE // 4
    assert (crop == 255).all(), "the grey fifth is cut off"
    assert (squash[:, :, : fifth - 2] == 128).all() and (squash[:, :, fifth + 3 :] == 255).all()
    assert not pad[:, :quarter].any() and not pad[:, -quarter:].any()
    middle = pad[:, quarter + 2 : -quarter - 2]
    assert (middle[:, :, : fifth - 2] == 128).all() and (middle[:, :, fifth + 3 :] == 255).all()
    assert torch.equal(crop, pixels(image, None)), "the packaged encoder crops"


@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
@pytest.mark.parametrize(("width", "height"), [(3000, 1), (1, 3000), (7, 9)])
def test_a_strip_keeps_some_pixels(resize: str, width: int, height: int) -> None:
    found = pixels(Image.new("RGB", (width, height), (200, 200, 200)), resize)
    assert found.shape == (3, SIZE, SIZE) and (found == 200).any()


def test_the_identity_changes_only_with_the_way_images_are_resized(tmp_path: Path) -> None:
    own = encoder_identity(PACKAGED)
    assert encoder_identity(PACKAGED, resize="crop") == own
    identities = {encoder_identity(PACKAGED, resize=resize).preprocessing for resize in ("crop", "squash", "pad")}
    assert len(identities) == 3
    squashed = write_folder(tmp_path, resize_mode="squash")
    assert encoder_identity(squashed, resize="squash") == encoder_identity(squashed)
    with pytest.raises(UsageError, match="unknown resize 'stretch'"):
        load_encoder(PACKAGED, resize="stretch")
    assert "resize" not in _encoder_settings(EncoderParams(name=PACKAGED))["encoder"], "so that old stamps stay valid"
    assert _encoder_settings(EncoderParams(name=PACKAGED, resize="pad"))["encoder"]["resize"] == "pad"


def test_models_prepare_images_as_their_training_did(tmp_path: Path) -> None:
    place = {**draw_table(tmp_path, 0.03), "encoder": PACKAGED}
    default = duplex.load_dataset(**place)
    data = duplex.load_dataset(**place, resize="squash")
    caches = [read_features(path).identity for path in sorted((tmp_path / "cache").glob("*/*.h5"))]
    assert len({cache["preprocessing"] for cache in caches}) == 2
    run = duplex.fit(data, "closed_form")
    with pytest.raises(DuplexError, match="preprocessing"):
        duplex.evaluate(run, default)
    recognizer = duplex.Recognizer.load(run.save(tmp_path / "model"))
    assert torch.equal(recognizer.encoder.image_transform(halves(96, 48)), pixels(halves(96, 48), "squash"))
    assert recognizer(noise_image(90, 40))[0].best.state in data.labels.states


def test_data_add_writes_the_way_and_refuses_others(tmp_path: Path, project: Path, command: Command) -> None:
    table = draw_table(tmp_path, 0.03)
    source, images = table["source"], table["images"]
    said = command(
        "data", "add", "wide", source, "--images", images, "--encoder", "tiny", "--resize", "pad", "--no-run"
    )
    assert said.code == 0, said.err
    assert "resize: pad" in (project / "datasets" / "wide.yaml").read_text()
    wrong = ("data", "add", "wide", source, "--images", images, "--resize", "fit", "--no-run")
    assert command(*wrong).refused("unknown resize 'fit'")
