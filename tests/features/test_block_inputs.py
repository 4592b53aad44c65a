"""A cache with block inputs or pixels: stored beside the features, by the same rules."""

from pathlib import Path

import numpy as np
import pytest
import torch

from duplex.encoders.base import PACKAGED, load_encoder
from duplex.encoders.image_blocks import last_blocks
from duplex.features.file import read_features
from duplex.features.inspect import inspect
from duplex.features.tokens import DiskTokens, read_tokens
from duplex.recognition.recognizer import open_image


def test_the_last_block_returns_the_cached_features_from_its_cached_input(run, encoder, tmp_path: Path) -> None:
    plain, path = run(tmp_path / "plain.h5").path, run(tmp_path / "f.h5", block_inputs=1, tokens="patch").path
    assert np.array_equal(read_features(plain).cls, read_features(path).cls)
    entered = torch.from_numpy(read_tokens(path, "block_inputs")).float()
    assert entered.shape == (40, 5, 32)
    with torch.no_grad():
        again = last_blocks(encoder, 1)(entered)
    cosine = torch.cosine_similarity(again, torch.from_numpy(read_features(path).cls))
    assert cosine.min() > 0.99999  # float16 in between
    assert inspect(path)["block_inputs"] == [5, 32] and inspect(plain)["block_inputs"] is None
    assert inspect(path)["patch"] == list(encoder.patch_shape)


@pytest.mark.parametrize("tower", ["transformer", "convolutional"])
def test_rows_from_the_disk_equal_those_in_memory(run, tower: str) -> None:
    own = {"encoder": load_encoder(PACKAGED, towers="image")} if tower == "convolutional" else {}
    path = run(block_inputs=2, **own).path
    values, streamed = read_tokens(path, "block_inputs"), read_tokens(path, "block_inputs", limit=0)
    assert isinstance(streamed, DiskTokens) and isinstance(values, np.ndarray) and streamed.shape == values.shape
    assert values.shape == ((40, 112, 8, 8) if own else (40, 5, 32))
    rows = torch.tensor([39, 0, 7, 8])
    assert torch.equal(streamed[rows], torch.from_numpy(values)[rows])
    assert torch.equal(streamed.at(np.arange(5, 20))[2:9], torch.from_numpy(values)[7:14])


def test_pixels_are_what_enters_the_encoder(run, encoder, images, tmp_path: Path) -> None:
    plain, path = run(tmp_path / "plain.h5").path, run(tmp_path / "pixels.h5", pixels=True).path
    assert np.array_equal(read_features(plain).cls, read_features(path).cls)
    pixels, streamed = read_tokens(path, "pixels"), read_tokens(path, "pixels", limit=0)
    assert isinstance(pixels, np.ndarray) and isinstance(streamed, DiskTokens) and pixels.dtype == np.uint8
    wanted = [encoder.image_transform(open_image(tmp_path / "pictures" / image)) for image in images]
    assert np.array_equal(pixels, torch.stack(wanted).numpy())
    assert torch.equal(streamed[torch.tensor([39, 0])], torch.from_numpy(pixels[[39, 0]]))
    batches = [encoder.encode_images(part) for part in torch.from_numpy(pixels).split(8)]
    assert np.array_equal(torch.cat(batches).half().float().numpy(), read_features(path).cls)
    assert path.stat().st_size - plain.stat().st_size == pytest.approx(40 * pixels[0].nbytes, abs=4096)
    assert inspect(path)["pixels"] == list(pixels.shape[1:]) and inspect(plain)["pixels"] is None
