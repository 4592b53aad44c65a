"""A cache with block inputs, in float16 and in eight bits: stored beside the features, by the same rules."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from duplex.encoders.base import PACKAGED, load_encoder
from duplex.encoders.image_blocks import last_blocks
from duplex.errors import DuplexError
from duplex.features.file import read_features
from duplex.features.inspect import inspect, verify
from duplex.features.tokens import DiskTokens, dequantize, quantize, read_tokens
from duplex.recognition.recognizer import open_image
from tests.features.conftest import update_checksums

NUMBERS = st.floats(-1000, 1000, width=16) | st.floats(-(2.0**-20), 2.0**-20, width=16)  # with scales of zero
TOKENS = arrays.arrays(np.float16, st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), elements=NUMBERS)
both_bits = pytest.mark.parametrize("bits", [16, 8])


def naive(token: np.ndarray) -> tuple[list[int], float]:
    """Codes and scale of one token [w], number by number."""
    scale = float(np.float16(np.float32(max(abs(float(value)) for value in token)) / np.float32(127)))
    if scale == 0:
        return [0] * len(token), scale
    codes = [int(np.round(np.float32(value) / np.float32(scale))) for value in token]
    return [min(127, max(-127, code)) for code in codes], scale


@settings(max_examples=200, deadline=None)
@given(TOKENS)
def test_codes_equal_the_naive_ones_and_err_by_at_most_half_a_step(y: np.ndarray) -> None:
    codes, scales = (part.numpy() for part in quantize(torch.from_numpy(y)))
    assert codes.dtype == np.int8 and scales.dtype == np.float16 and scales.shape == y.shape[:2]
    again = dequantize(codes, scales)
    assert again.dtype == np.float16 and again.shape == y.shape
    for place in np.ndindex(*y.shape[:2]):
        expected, scale = naive(y[place])
        assert codes[place].tolist() == expected and float(scales[place]) == scale
        for value, restored in zip(y[place].tolist(), again[place].tolist(), strict=True):
            rounding = abs(value) * 2**-10 + 64 * 2.0**-24  # of the scale and of the product, in float16
            assert abs(value - restored) <= scale / 2 + rounding


@settings(max_examples=50, deadline=None)
@given(TOKENS)
def test_a_feature_map_is_quantized_place_by_place(y: np.ndarray) -> None:
    """Tokens [B, H, C] have the codes of the map [B, C, H, 1]."""
    codes, scales = quantize(torch.from_numpy(y))
    map_codes, map_scales = quantize(torch.from_numpy(y).permute(0, 2, 1)[..., None])
    assert torch.equal(map_codes[..., 0].permute(0, 2, 1), codes) and torch.equal(map_scales[..., 0], scales)
    np.testing.assert_array_equal(
        dequantize(map_codes.numpy(), map_scales.numpy())[..., 0].transpose(0, 2, 1),
        dequantize(codes.numpy(), scales.numpy()),
    )


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
    assert inspect(path)["patch"] == list(encoder.patch_shape) and "bits" not in inspect(path)["identity"]


def test_a_cache_in_eight_bits_has_half_the_bytes_and_the_same_features(run, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain.h5", block_inputs=1).path
    small = run(tmp_path / "small.h5", block_inputs=1, bits=8).path
    assert np.array_equal(read_features(plain).cls, read_features(small).cls)
    values, true = read_tokens(small, "block_inputs"), read_tokens(plain, "block_inputs")
    assert isinstance(true, np.ndarray) and isinstance(values, np.ndarray)
    np.testing.assert_array_equal(values, dequantize(*(part.numpy() for part in quantize(torch.from_numpy(true)))))
    assert 0 < np.linalg.norm((values - true).astype(np.float32)) < 0.02 * np.linalg.norm(true.astype(np.float32))
    assert plain.stat().st_size - small.stat().st_size == pytest.approx(40 * (5 * 32 - 5 * 2), abs=4096)
    assert inspect(small)["block_inputs"] == [5, 32] and inspect(small)["identity"]["bits"] == "8"


@both_bits
@pytest.mark.parametrize("tower", ["transformer", "convolutional"])
def test_rows_from_the_disk_equal_those_in_memory(run, bits: int, tower: str) -> None:
    own = {"encoder": load_encoder(PACKAGED, towers="image")} if tower == "convolutional" else {}
    path = run(block_inputs=2, bits=bits, **own).path
    values, streamed = read_tokens(path, "block_inputs"), read_tokens(path, "block_inputs", limit=0)
    assert isinstance(streamed, DiskTokens) and isinstance(values, np.ndarray) and streamed.shape == values.shape
    assert values.shape == ((40, 48, 6, 6) if own else (40, 5, 32))
    rows = torch.tensor([39, 0, 7, 8])
    assert torch.equal(streamed[rows], torch.from_numpy(values)[rows])
    assert torch.equal(streamed.at(np.arange(5, 20))[2:9], torch.from_numpy(values)[7:14])


def test_verify_measures_the_error_and_detects_rows_of_another_image(run, encoder, images, tmp_path: Path) -> None:
    options = encoder, images, tmp_path / "pictures", "m" * 64
    errors = {}
    for bits, name in ((16, "block_inputs"), (8, "block_inputs_int8")):
        path = run(tmp_path / f"{bits}.h5", block_inputs=1, bits=bits).path
        report = verify(path, *options, sample=40)
        errors[bits] = report["block_inputs_error"]
        assert report["worst_cosine"] > 0.999
        with h5py.File(path, "r+") as file:
            file[name][7] = file[name][8]
            update_checksums(file)
        with pytest.raises(DuplexError, match=r"row 7 is not the feature of 00007\.jpg"):
            verify(path, *options, sample=40)
    assert 0 < errors[16] < 0.001 < errors[8] < 0.02


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


def test_verify_detects_pixels_of_another_image(run, encoder, images, tmp_path: Path) -> None:
    path, options = run(pixels=True).path, (encoder, images, tmp_path / "pictures", "m" * 64)
    report = verify(path, *options, sample=40)
    assert report["worst_cosine"] > 0.999 and "block_inputs_error" not in report
    with h5py.File(path, "r+") as file:
        file["pixels"][7] = 255 - file["pixels"][7]
        update_checksums(file)
    with pytest.raises(DuplexError, match=r"row 7 is not the feature of 00007\.jpg"):
        verify(path, *options, sample=40)
