import multiprocessing
import os
import signal
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from duplex.errors import DuplexError, UsageError
from duplex.features.decoding import decoding_workers
from duplex.features.image_files import read_picture
from duplex.features.layout import partial_path
from duplex.features.store import PartialCache, open_features


def naive(images, root: Path, encoder) -> np.ndarray:
    """One picture at a time, in order."""
    pixels = [encoder.image_transform(read_picture(root / image))[None] for image in images]
    return torch.cat([encoder.encode_images(one) for one in pixels]).half().float().numpy()


def test_features_are_those_of_a_plain_loop(run, images, encoder, tmp_path: Path) -> None:
    report = run()
    features = open_features(report.path, {**encoder.identity, "manifest": "m" * 64})
    assert np.allclose(features.cls, naive(images, tmp_path / "pictures", encoder), atol=2e-3)
    assert (report.rows, report.resumed, report.bad) == (40, 0, [])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(run, tmp_path: Path, workers: int) -> None:
    run()
    run(tmp_path / "other.h5", num_workers=workers)
    assert (tmp_path / "other.h5").read_bytes() == (tmp_path / "features.h5").read_bytes()


def test_a_finished_cache_is_left_alone(run, tmp_path: Path) -> None:
    run()
    before = (tmp_path / "features.h5").stat().st_mtime_ns
    report = run()
    assert report.resumed == 40 and (tmp_path / "features.h5").stat().st_mtime_ns == before
    assert run(fresh=True).resumed == 0


@pytest.mark.parametrize("change", [{"manifest_sha256": "n" * 64}, {"limit": 9}, {"tokens": "patch"}])
def test_a_cache_of_something_else_is_made_afresh(run, change, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    assert run(**change).resumed == 0
    assert "extracting afresh" in capsys.readouterr().err


def test_patch_tokens_lie_beside(run, encoder) -> None:
    import h5py

    path = run(tokens="patch").path
    with h5py.File(path) as file:
        assert file["patch"].shape == (40, *encoder.patches) and file["patch"].dtype == np.float16
        assert np.abs(file["patch"][39]).sum() > 0
    assert open_features(path).cls.shape == (40, 16)


def test_bad_pictures_keep_their_rows(run, images, tmp_path: Path) -> None:
    good = open_features(run().path).cls
    (tmp_path / "pictures" / images[3]).unlink()
    (tmp_path / "pictures" / images[30]).write_bytes(b"")
    report = run(fresh=True, max_bad=0.05)
    features = open_features(report.path)
    assert [(bad.row, bad.reason) for bad in report.bad] == [(3, "missing"), (30, "empty")]
    assert features.reasons == ["missing", "empty"] and np.flatnonzero(features.bad).tolist() == [3, 30]
    assert not features.cls[features.bad].any()
    assert np.array_equal(features.cls[~features.bad], good[~features.bad])


def test_too_many_bad_pictures_fail_and_mending_them_resumes(run, images, tmp_path: Path) -> None:
    good = run(tmp_path / "good.h5").path.read_bytes()
    kept = (tmp_path / "pictures" / images[35]).read_bytes()
    (tmp_path / "pictures" / images[35]).write_bytes(b"")
    with pytest.raises(DuplexError, match=rf"1 of 40 pictures .* max_bad = 0.01 .*{images[35]} \(empty\)"):
        run()
    assert partial_path(tmp_path / "features.h5").exists() and not (tmp_path / "features.h5").exists()
    (tmp_path / "pictures" / images[35]).write_bytes(kept)
    report = run()
    assert report.resumed == 39 and report.path.read_bytes() == good


def test_features_that_are_not_finite_are_bad(run, encoder) -> None:
    class Broken:
        def __getattr__(self, name: str):
            return getattr(encoder, name)

        def encode_images(self, pixels):
            features = encoder.encode_images(pixels).clone()
            features[2, 0] = 1e6
            return features

    report = run(encoder=Broken(), max_bad=1.0)
    assert [bad.row for bad in report.bad] == [2, 10, 18, 26, 34]
    assert {bad.reason for bad in report.bad} == {"features not finite"}


def test_a_damaged_partial_file_is_begun_again(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial_path(tmp_path / "features.h5").write_bytes(b"\x89HDF not really")
    assert run().rows == 40
    assert "is damaged; extracting afresh" in capsys.readouterr().err


def test_a_resumed_run_with_other_batches_keeps_what_is_there(run, tmp_path: Path, monkeypatch) -> None:
    calls = iter(range(100))

    def stop_after_two(self, row, marks, **values):
        original(self, row, marks, **values)
        self.commit()
        if next(calls) == 1:
            raise KeyboardInterrupt

    original = PartialCache.write
    monkeypatch.setattr(PartialCache, "write", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(PartialCache, "write", original)
    assert run(batch_size=5).resumed == 16


def test_requests_that_make_no_sense(run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shard 4/4 does not exist"):
        run(shard=(4, 4))
    with pytest.raises(UsageError, match="too few for 9 shards"):
        run(shard=(0, 9))
    with pytest.raises(UsageError, match="no picture"):
        run(images=[])
    with pytest.raises(UsageError, match="known: none, patch"):
        run(tokens="all")


def test_a_missing_folder_is_said_at_once(encoder, tmp_path: Path) -> None:
    from duplex.features.extraction import extract

    with pytest.raises(UsageError, match="does not exist; set the data set's root"):
        extract(["a.jpg"], tmp_path / "absent", tmp_path / "f.h5", encoder, manifest_sha256="m")


def test_a_finished_cache_is_taken_up_again_for_mended_pictures_and_judged_again(run, images, tmp_path: Path) -> None:
    good = run(tmp_path / "good.h5").path.read_bytes()
    kept = (tmp_path / "pictures" / images[35]).read_bytes()
    (tmp_path / "pictures" / images[35]).write_bytes(b"")
    assert len(run(max_bad=0.1).bad) == 1
    assert len(run(max_bad=0.1).bad) == 1
    with pytest.raises(DuplexError, match="1 of 40 pictures cannot be read"):
        run(max_bad=0.0)
    (tmp_path / "pictures" / images[35]).write_bytes(kept)
    report = run(max_bad=0.0)
    assert report.resumed == 39 and report.path.read_bytes() == good


def test_a_worker_that_is_killed_is_one_sentence(run, encoder) -> None:
    """torch says so from a signal handler, here in the middle of an encoding."""

    class Patient:
        def __getattr__(self, name: str):
            return getattr(encoder, name)

        def encode_images(self, pixels):
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)
            time.sleep(1)
            return encoder.encode_images(pixels)

    with pytest.raises(DuplexError, match=r"a decoding worker died, .*run the same command again"):
        run(encoder=Patient(), num_workers=2, batch_size=2)
    assert run(num_workers=2, batch_size=2).rows == 40


def test_a_folder_or_a_file_in_the_way_is_said_at_once(run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder is a folder; --out names"):
        run(tmp_path / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(DuplexError, match=r"file is a file, not a folder; mend that, or choose another place"):
        run(tmp_path / "file" / "features.h5")


def test_auto_is_a_worker_for_each_other_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 0), (2, 1), (16, 15)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert decoding_workers("auto") == expected
    assert decoding_workers(3) == 3


def test_patch_tokens_that_are_not_finite_are_bad_as_well(run, encoder) -> None:
    class Broken:
        def __getattr__(self, name: str):
            return getattr(encoder, name)

        def encode_patches(self, pixels):
            features, patches = (part.clone() for part in encoder.encode_patches(pixels))
            patches[1, 0, 0] = float("inf")
            return features, patches

    report = run(encoder=Broken(), max_bad=1.0, tokens="patch")
    assert [bad.row for bad in report.bad] == [1, 9, 17, 25, 33]
    with h5py.File(report.path) as file:
        assert np.isfinite(file["patch"][...]).all() and not file["cls"][1].any() and not file["patch"][1].any()
        assert file["cls"][0].any() and file["patch"][0].any()


def test_rows_that_are_not_finite_are_not_encoded_for_ever(run, encoder, tmp_path: Path) -> None:
    calls = []

    class Broken:
        def __getattr__(self, name: str):
            return getattr(encoder, name)

        def encode_images(self, pixels):
            calls.append(len(pixels))
            features = encoder.encode_images(pixels).clone()
            features[2, 0] = 1e6
            return features

    first = run(encoder=Broken(), max_bad=1.0)
    before, met = first.path.read_bytes(), len(calls)
    again = run(encoder=Broken(), max_bad=1.0)
    assert len(calls) == met and again.resumed == 40 and again.path.read_bytes() == before
