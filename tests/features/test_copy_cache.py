"""Rows of the same pictures are copied into another cache; whatever is not just that is left alone."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.features.copy_cache import reuse
from duplex.features.layout import PENDING, partial_path
from duplex.features.store import open_features


@pytest.mark.parametrize("tokens", ["none", "patch"])
def test_a_copy_is_byte_for_byte_the_extraction(run, tmp_path: Path, images, tokens: str) -> None:
    (tmp_path / "pictures" / images[3]).write_bytes(b"no picture")
    base = run(tmp_path / "base.h5", tokens=tokens, max_bad=0.1).path
    expected = open_features(base).identity
    identity = {**expected, "manifest": "n" * 64}
    assert reuse(base, expected, tmp_path / "copy.h5", identity)
    whole = run(tmp_path / "whole.h5", tokens=tokens, max_bad=0.1, manifest_sha256="n" * 64).path
    assert (tmp_path / "copy.h5").read_bytes() == whole.read_bytes()
    assert np.flatnonzero(open_features(tmp_path / "copy.h5").bad).tolist() == [3]


def test_another_identity_is_not_taken_for_this_one(run, tmp_path: Path) -> None:
    base = run(tmp_path / "base.h5").path
    identity = open_features(base).identity
    for key in ("manifest", "weights", "preprocessing", "torch"):
        assert not reuse(base, {**identity, key: "other"}, tmp_path / "copy.h5", identity)
    assert not (tmp_path / "copy.h5").exists()


def test_what_is_there_is_not_written_over(run, tmp_path: Path) -> None:
    base, out = run(tmp_path / "base.h5").path, tmp_path / "copy.h5"
    identity = open_features(base).identity
    for place in (partial_path(out), out):
        place.write_text("somebody's")
        assert not reuse(base, identity, out, identity)
        assert place.read_text() == "somebody's"
        place.unlink()


def test_a_part_or_a_damaged_file_is_no_source(run, tmp_path: Path) -> None:
    shard = run(tmp_path / "features.h5", shard=(0, 2)).path
    identity = open_features(run(tmp_path / "features.h5").path).identity
    assert not reuse(shard, identity, tmp_path / "copy.h5", identity)
    (tmp_path / "broken.h5").write_bytes((tmp_path / "features.h5").read_bytes()[:3000])
    assert not reuse(tmp_path / "broken.h5", identity, tmp_path / "copy.h5", identity)
    assert not reuse(tmp_path / "absent.h5", identity, tmp_path / "copy.h5", identity)
    assert not (tmp_path / "copy.h5").exists()


def test_a_source_that_lacks_a_row_is_none(run, tmp_path: Path) -> None:
    base = run(tmp_path / "base.h5").path
    identity = open_features(base).identity
    with h5py.File(base, "r+") as file:
        file["mark"][7] = PENDING
    assert not reuse(base, identity, tmp_path / "copy.h5", identity)
    assert not (tmp_path / "copy.h5").exists()


def test_a_link_to_nowhere_is_somebodys(run, tmp_path: Path) -> None:
    base = run(tmp_path / "base.h5").path
    identity = open_features(base).identity
    (tmp_path / "copy.h5").symlink_to("nowhere")
    with pytest.raises(DuplexError, match="is not a feature cache, so it is left alone"):
        reuse(base, identity, tmp_path / "copy.h5", identity)
