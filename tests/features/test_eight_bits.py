"""What enters the last blocks in eight bits: the naive loops, and everything that a cache in float16 does too."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from duplex.encoders import PACKAGED, load_encoder
from duplex.errors import DuplexError, UsageError
from duplex.features.eight_bits import coded, restored
from duplex.features.inspection import inspect, verify
from duplex.features.shards import join_shards
from duplex.features.store import open_features
from duplex.features.tokens import Streamed, read_tokens

NUMBERS = st.floats(-1000, 1000, width=16) | st.floats(-(2.0**-20), 2.0**-20, width=16)  # with steps of zero
TOKENS = arrays.arrays(np.float16, st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), elements=NUMBERS)


def naive(token: np.ndarray) -> tuple[list[int], float]:
    """One token [w]: codes and step, number by number."""
    step = float(np.float16(np.float32(max(abs(float(value)) for value in token)) / np.float32(127)))
    if step == 0:
        return [0] * len(token), step
    codes = [int(np.round(np.float32(value) / np.float32(step))) for value in token]
    return [min(127, max(-127, code)) for code in codes], step


@settings(max_examples=200, deadline=None)
@given(TOKENS)
def test_codes_are_the_naive_ones_and_nothing_is_off_by_more_than_half_a_step(y: np.ndarray) -> None:
    codes, steps = (part.numpy() for part in coded(torch.from_numpy(y)))
    assert codes.dtype == np.int8 and steps.dtype == np.float16 and steps.shape == y.shape[:2]
    again = restored(codes, steps)
    assert again.dtype == np.float16 and again.shape == y.shape
    for place in np.ndindex(*y.shape[:2]):
        expected, step = naive(y[place])
        assert codes[place].tolist() == expected and float(steps[place]) == step
        for value, held in zip(y[place].tolist(), again[place].tolist(), strict=True):
            rounding = abs(value) * 2**-10 + 64 * 2.0**-24  # what float16 does to the step and to the product
            assert abs(value - held) <= step / 2 + rounding


@settings(max_examples=50, deadline=None)
@given(TOKENS)
def test_a_map_is_its_places_tokens(y: np.ndarray) -> None:
    """[B, C, H, 1] of what is [B, H, C] as tokens."""
    codes, steps = coded(torch.from_numpy(y))
    maps = torch.from_numpy(y).permute(0, 2, 1)[..., None]
    of_map, steps_of_map = coded(maps)
    assert torch.equal(of_map[..., 0].permute(0, 2, 1), codes) and torch.equal(steps_of_map[..., 0], steps)
    np.testing.assert_array_equal(
        restored(of_map.numpy(), steps_of_map.numpy())[..., 0].transpose(0, 2, 1),
        restored(codes.numpy(), steps.numpy()),
    )


def test_a_cache_holds_half_the_bytes_and_the_same_features(run, tmp_path: Path) -> None:
    plain, small = run(tmp_path / "plain.h5", depth=1).path, run(tmp_path / "small.h5", depth=1, bits=8).path
    assert np.array_equal(open_features(plain).cls, open_features(small).cls)
    held, true = read_tokens(small, "deep"), read_tokens(plain, "deep")
    assert isinstance(true, np.ndarray) and isinstance(held, np.ndarray)
    np.testing.assert_array_equal(held, restored(*(part.numpy() for part in coded(torch.from_numpy(true)))))
    assert 0 < np.linalg.norm((held - true).astype(np.float32)) < 0.02 * np.linalg.norm(true.astype(np.float32))
    assert plain.stat().st_size - small.stat().st_size == pytest.approx(40 * (5 * 32 - 5 * 2), abs=4096)
    assert inspect(small)["deep"] == inspect(plain)["deep"] == [5, 32] and inspect(small)["identity"]["bits"] == "8"
    assert "bits" not in inspect(plain)["identity"], "as caches were before there was a choice"


def test_rows_from_the_disk_are_those_in_memory_of_a_map_too(run, tmp_path: Path) -> None:
    for name, encoder in (("tokens", {}), ("maps", {"encoder": load_encoder(PACKAGED, towers="image")})):
        path = run(tmp_path / f"{name}.h5", depth=2, bits=8, **encoder).path
        held, streamed = read_tokens(path, "deep"), read_tokens(path, "deep", limit=0)
        assert isinstance(streamed, Streamed) and isinstance(held, np.ndarray) and streamed.shape == held.shape
        rows = torch.tensor([39, 0, 7, 8])
        assert torch.equal(streamed[rows], torch.from_numpy(held)[rows])
        assert torch.equal(streamed.at(np.arange(5, 20))[2:9], torch.from_numpy(held)[7:14])


@pytest.mark.parametrize("copy", [False, True])
def test_shards_join_to_the_same(run, tmp_path: Path, copy: bool) -> None:
    whole = run(tmp_path / "whole.h5", depth=1, bits=8).path
    for k in range(2):
        run(tmp_path / "parts.h5", shard=(k, 2), depth=1, bits=8)
    join_shards(tmp_path / "parts.h5", copy=copy)
    rows = torch.tensor([3, 39, 20])
    expected = torch.from_numpy(read_tokens(whole, "deep"))[rows]
    assert torch.equal(read_tokens(tmp_path / "parts.h5", "deep", limit=0)[rows], expected)
    assert not copy or (tmp_path / "parts.h5").read_bytes() == whole.read_bytes()


def test_another_number_of_bits_is_made_afresh_and_without_a_depth_it_says_nothing(run, tmp_path, capsys) -> None:
    run(depth=1, bits=8)
    assert run(depth=1, bits=8).resumed == 40
    assert run(depth=1).resumed == 0
    assert "another number of bits; extracting afresh" in capsys.readouterr().err
    flat = run(tmp_path / "flat.h5").path.read_bytes()
    assert run(tmp_path / "other.h5", bits=8).path.read_bytes() == flat
    with pytest.raises(UsageError, match="unknown bits '4'; known: 8, 16"):
        run(depth=1, bits=4)


def test_the_error_is_measured_and_rows_of_another_picture_are_seen(run, encoder, images, tmp_path: Path) -> None:
    asked = encoder, images, tmp_path / "pictures", "m" * 64
    half, eight = (verify(run(tmp_path / f"{bits}.h5", depth=1, bits=bits).path, *asked) for bits in (16, 8))
    assert half["deep_error"] < 0.001 < eight["deep_error"] < 0.02
    with h5py.File(tmp_path / "8.h5", "r+") as file:
        file["deep_codes"][7] = file["deep_codes"][8]
    with pytest.raises(DuplexError, match=r"row 7 is not 00007\.jpg"):
        verify(tmp_path / "8.h5", *asked, sample=40)


def shrunk(file: h5py.File) -> None:
    values = file["deep_steps"][:, :4]
    del file["deep_steps"]
    file["deep_steps"] = values


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.pop("deep_steps"), "it holds some of 'deep', 'deep_codes' and 'deep_steps'"),
        (lambda file: file.copy("patch", "deep"), "it holds some of 'deep', 'deep_codes' and 'deep_steps'"),
        (shrunk, r"'deep_steps' is \(40, 4\), which does not fit 'deep_codes'"),
    ],
)
def test_halves_that_do_not_belong_together_are_told_of(run, damage, says: str) -> None:
    path = run(depth=1, bits=8, tokens="patch").path
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises(DuplexError, match=says):
        read_tokens(path, "deep")
