"""A cache with a depth: what enters the last blocks lies beside the features, in the same file, by the same rules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from duplex.encoders import PACKAGED, load_encoder
from duplex.encoders.image_blocks import cut
from duplex.errors import DuplexError, UsageError
from duplex.features import extraction as extraction_module
from duplex.features import store
from duplex.features.inspection import inspect, verify
from duplex.features.shards import join_shards
from duplex.features.store import open_features
from duplex.features.tokens import Streamed, read_tokens


def test_the_features_are_those_without_depth_and_the_tail_gives_them_again(run, encoder, tmp_path: Path) -> None:
    plain, deep = run(tmp_path / "plain.h5").path, run(tmp_path / "deep.h5", depth=1, tokens="patch").path
    assert np.array_equal(open_features(plain).cls, open_features(deep).cls)
    entered = torch.from_numpy(read_tokens(deep, "deep")).float()
    assert entered.shape == (40, 5, 32)
    with torch.no_grad():
        again = cut(encoder, 1)(entered)
    cosine = torch.cosine_similarity(again, torch.from_numpy(open_features(deep).cls))
    assert cosine.min() > 0.99999  # float16 in between
    assert inspect(deep)["deep"] == [5, 32] and inspect(plain)["deep"] is None


def test_feature_maps_of_a_convolutional_tower_are_kept_and_streamed(run, tmp_path: Path) -> None:
    encoder = load_encoder(PACKAGED, towers="image")
    path = run(depth=2, encoder=encoder).path
    held, streamed = read_tokens(path, "deep"), read_tokens(path, "deep", limit=0)
    assert held.shape == (40, 48, 6, 6) and isinstance(streamed, Streamed) and streamed.shape == held.shape
    rows = torch.tensor([39, 0, 7, 8])
    assert torch.equal(streamed.at(np.arange(40))[rows], torch.from_numpy(held)[rows])
    with torch.no_grad():
        again = cut(encoder, 2)(torch.from_numpy(held).float())
    assert torch.cosine_similarity(again, torch.from_numpy(open_features(path).cls)).min() > 0.99999


def test_an_interrupted_one_is_resumed_to_the_same_bytes(run, tmp_path: Path, monkeypatch) -> None:
    whole = run(tmp_path / "whole.h5", depth=1).path
    monkeypatch.setattr(extraction_module, "stop_requests", _third)
    with pytest.raises(DuplexError, match=r"stopped with 24 of 40 rows"):
        run(tmp_path / "broken.h5", depth=1)
    monkeypatch.undo()
    assert run(tmp_path / "broken.h5", depth=1).resumed == 24
    assert (tmp_path / "broken.h5").read_bytes() == whole.read_bytes()


class _third:
    """Asks to stop at the third block."""

    def __init__(self) -> None:
        self.asked = 0

    def __enter__(self) -> SimpleNamespace:
        return SimpleNamespace(is_set=self.is_set)

    def __exit__(self, *_: object) -> None:
        pass

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked >= 5  # asked twice a block


@pytest.mark.parametrize("copy", [False, True])
def test_shards_join(run, tmp_path: Path, copy: bool) -> None:
    whole = run(tmp_path / "whole.h5", depth=1).path
    for k in range(2):
        run(tmp_path / "parts.h5", shard=(k, 2), depth=1)
    join_shards(tmp_path / "parts.h5", copy=copy)
    joined, plain = (read_tokens(path, "deep") for path in (tmp_path / "parts.h5", whole))
    assert isinstance(joined, np.ndarray) and isinstance(plain, np.ndarray) and np.array_equal(joined, plain)
    assert not copy or (tmp_path / "parts.h5").read_bytes() == whole.read_bytes()
    run(tmp_path / "other.h5", shard=(0, 2), depth=1)
    run(tmp_path / "other.h5", shard=(1, 2), depth=2)
    with pytest.raises(DuplexError, match="another depth"):
        join_shards(tmp_path / "other.h5")


def test_another_depth_is_made_afresh_and_said(run, capsys) -> None:
    run(depth=1)
    assert run(depth=1).resumed == 40
    assert run(depth=2).resumed == 0
    assert "another depth; extracting afresh" in capsys.readouterr().err


def test_rows_that_are_not_what_entered_do_not_verify(run, encoder, images, tmp_path: Path) -> None:
    path = run(depth=1).path
    assert verify(path, encoder, images, tmp_path / "pictures", "m" * 64, sample=40)["worst_cosine"] > 0.9999
    with h5py.File(path, "r+") as file:
        file["deep"][7] = file["deep"][8]
    with pytest.raises(DuplexError, match=r"row 7 is not 00007\.jpg"):
        verify(path, encoder, images, tmp_path / "pictures", "m" * 64, sample=40)


def test_a_disk_without_room_is_told_before_anything_is_written(run, tmp_path: Path, monkeypatch) -> None:
    needed = 40 * (16 + 5 * 32) * 2 + 40 + (1 << 16)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(DuplexError, match=r"needs 0\.1 MB and .* has 0\.1 MB free"):
        run(depth=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures"]
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    assert run(depth=1).rows == 40


def test_a_depth_beyond_the_tower_is_one_sentence(run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 2 blocks, so depth 3 cannot be cut off"):
        run(depth=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures"]
