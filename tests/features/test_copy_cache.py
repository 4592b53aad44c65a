"""Copying a cache of the same images; anything else is neither read nor overwritten."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.features.copy_cache import copy_matching_cache
from duplex.features.layout import PENDING, partial_path
from duplex.features.store import open_features


@pytest.mark.parametrize("tokens", ["none", "patch"])
def test_a_copy_equals_an_extraction_byte_for_byte(run, tmp_path: Path, images, tokens: str) -> None:
    (tmp_path / "pictures" / images[3]).write_bytes(b"no image")
    base = run(tmp_path / "base.h5", tokens=tokens, max_bad=0.1).path
    expected = open_features(base).identity
    identity = {**expected, "manifest": "n" * 64}
    assert copy_matching_cache(base, expected, tmp_path / "copy.h5", identity)
    whole = run(tmp_path / "whole.h5", tokens=tokens, max_bad=0.1, manifest_sha256="n" * 64).path
    assert (tmp_path / "copy.h5").read_bytes() == whole.read_bytes()
    assert np.flatnonzero(open_features(tmp_path / "copy.h5").bad).tolist() == [3]


def test_a_cache_of_another_identity_is_not_copied(run, tmp_path: Path) -> None:
    base = run(tmp_path / "base.h5").path
    identity = open_features(base).identity
    for key in ("manifest", "weights", "preprocessing", "torch"):
        assert not copy_matching_cache(base, {**identity, key: "other"}, tmp_path / "copy.h5", identity)
    assert not (tmp_path / "copy.h5").exists()


def test_an_existing_file_is_not_overwritten(run, tmp_path: Path) -> None:
    base, out = run(tmp_path / "base.h5").path, tmp_path / "copy.h5"
    identity = open_features(base).identity
    for place in (partial_path(out), out):
        place.write_text("foreign")
        assert not copy_matching_cache(base, identity, out, identity)
        assert place.read_text() == "foreign"
        place.unlink()


def test_a_shard_or_a_damaged_file_is_not_copied(run, tmp_path: Path) -> None:
    shard = run(tmp_path / "features.h5", shard=(0, 2)).path
    identity = open_features(run(tmp_path / "features.h5").path).identity
    assert not copy_matching_cache(shard, identity, tmp_path / "copy.h5", identity)
    (tmp_path / "broken.h5").write_bytes((tmp_path / "features.h5").read_bytes()[:3000])
    assert not copy_matching_cache(tmp_path / "broken.h5", identity, tmp_path / "copy.h5", identity)
    assert not copy_matching_cache(tmp_path / "absent.h5", identity, tmp_path / "copy.h5", identity)
    assert not (tmp_path / "copy.h5").exists()


def test_a_cache_with_a_pending_row_is_not_copied(run, tmp_path: Path) -> None:
    base = run(tmp_path / "base.h5").path
    identity = open_features(base).identity
    with h5py.File(base, "r+") as file:
        file["status"][7] = PENDING
    assert not copy_matching_cache(base, identity, tmp_path / "copy.h5", identity)
    assert not (tmp_path / "copy.h5").exists()


def test_a_broken_link_is_not_overwritten(run, tmp_path: Path) -> None:
    base = run(tmp_path / "base.h5").path
    identity = open_features(base).identity
    (tmp_path / "copy.h5").symlink_to("nowhere")
    with pytest.raises(DuplexError, match="is not a feature cache, so it is not overwritten"):
        copy_matching_cache(base, identity, tmp_path / "copy.h5", identity)
