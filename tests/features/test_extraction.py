"""Extraction: the features of a plain loop, bad images, resuming, shares of bad images, and what is reported."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from duplex.data.images import read_image
from duplex.errors import DuplexError, UsageError
from duplex.features import extract as extraction_module
from duplex.features.extract import BadImage, ExtractionSettings, extract
from duplex.features.file import ENCODED, PENDING, PartialCache, Span, partial_path, read_features
from tests.features.conftest import Wrapped, update_checksums
from tests.features.test_store import opened_in


def naive(images, root: Path, encoder) -> np.ndarray:
    """One image at a time, in order."""
    pixels = [encoder.image_transform(read_image(root / image))[None] for image in images]
    return torch.cat([encoder.encode_images(one) for one in pixels]).half().float().numpy()


def test_features_are_those_of_a_plain_loop(run, images, encoder, tmp_path: Path) -> None:
    report = run()
    features = read_features(report.path, {**encoder.identity.to_dict(), "manifest": "m" * 64})
    assert np.allclose(features.cls, naive(images, tmp_path / "pictures", encoder), atol=2e-3)
    assert (report.rows, report.resumed, report.bad) == (40, 0, [])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(run, tmp_path: Path, workers: int) -> None:
    assert run(tmp_path / "other.h5", num_workers=workers).path.read_bytes() == run().path.read_bytes()


def test_a_finished_cache_is_left_alone_unless_fresh(run, tmp_path: Path) -> None:
    run()
    before = (tmp_path / "features.h5").stat().st_mtime_ns
    assert run().resumed == 40 and (tmp_path / "features.h5").stat().st_mtime_ns == before
    assert run(fresh=True).resumed == 0


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ({}, {"tokens": "patch"}, "setting of `tokens`"),
        ({"block_inputs": 1}, {"block_inputs": 2}, "number of block inputs"),
        ({}, {"pixels": True}, "setting of `pixels`"),
    ],
)
def test_a_cache_of_another_identity_is_extracted_again(run, capsys, first, second, difference: str) -> None:
    report = run(**first)
    assert run(**first).resumed == report.rows
    assert run(**second).resumed == 0
    assert f"another {difference}; extracting again" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"block_inputs": 1}, {"pixels": True}])
def test_an_interrupted_extraction_resumes_to_the_same_bytes(run, tmp_path: Path, stop_at_third_batch, options) -> None:
    whole = run(tmp_path / "whole.h5", **options)
    with stop_at_third_batch(), pytest.raises(KeyboardInterrupt):
        run(**options)
    report = run(**options)
    assert report.resumed == 24 and report.path.read_bytes() == whole.path.read_bytes()


def test_bad_images_keep_their_rows(run, images, tmp_path: Path) -> None:
    good = read_features(run().path).cls
    (tmp_path / "pictures" / images[3]).unlink()
    (tmp_path / "pictures" / images[30]).write_bytes(b"")
    report = run(fresh=True, max_bad=0.05)
    features = read_features(report.path)
    assert [(bad.row, bad.reason) for bad in report.bad] == [(3, "missing"), (30, "empty")]
    assert np.flatnonzero(features.bad).tolist() == [3, 30]
    assert not features.cls[features.bad].any()
    assert np.array_equal(features.cls[~features.bad], good[~features.bad])


def test_bad_rows_of_a_shard_are_numbered_in_the_data_set(run, images, tmp_path: Path) -> None:
    (tmp_path / "pictures" / images[30]).unlink()
    report = run(shard=(1, 2), max_bad=0.5)
    assert report.bad == run(shard=(1, 2), max_bad=0.5).bad == [BadImage(30, images[30], "missing")]


def test_too_many_bad_images_fail_and_repairing_them_resumes(run, images, tmp_path: Path) -> None:
    good = run(tmp_path / "good.h5").path.read_bytes()
    content = (tmp_path / "pictures" / images[35]).read_bytes()
    (tmp_path / "pictures" / images[35]).write_bytes(b"")
    with pytest.raises(DuplexError, match=rf"1 of 40 images .* max_bad = 0.01: .*{images[35]} \(empty\)"):
        run()
    assert partial_path(tmp_path / "features.h5").exists() and not (tmp_path / "features.h5").exists()
    (tmp_path / "pictures" / images[35]).write_bytes(content)
    report = run()
    assert report.resumed == 39 and report.path.read_bytes() == good


@pytest.mark.parametrize("number", [0, 35])
def test_a_finished_cache_is_resumed_for_repaired_images_and_its_bad_ones_counted_again(run, images, tmp_path, number):
    good = run(tmp_path / "good.h5").path.read_bytes()
    content = (tmp_path / "pictures" / images[number]).read_bytes()
    (tmp_path / "pictures" / images[number]).write_bytes(b"")
    for _ in range(2):
        assert len(run(max_bad=0.1).bad) == 1
    with pytest.raises(DuplexError, match="1 of 40 images cannot be read"):
        run(max_bad=0.0)
    (tmp_path / "pictures" / images[number]).write_bytes(content)
    report = run(max_bad=0.0)
    assert report.resumed == 39 and report.path.read_bytes() == good


def test_too_many_bad_images_stop_the_run_at_the_next_commit(run, images, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(extraction_module, "COMMIT_SECONDS", 0.0)
    for image in images[:9]:
        (tmp_path / "pictures" / image).unlink()
    listed = ", ".join(f"{image} (missing)" for image in images[:5])
    with pytest.raises(DuplexError) as refused:
        run(max_bad=0.1)
    assert f"8 of 40 images cannot be read, a larger share than max_bad = 0.1: {listed}, …;" in str(refused.value)
    cache = PartialCache(tmp_path / "features.h5")
    assert cache.done == 8  # of the first batch
    cache.close()


def test_exactly_the_allowed_share_of_bad_images_passes_and_five_are_listed(run, images, tmp_path: Path) -> None:
    for image in images[20:25]:
        (tmp_path / "pictures" / image).unlink()
    assert len(run(max_bad=0.125).bad) == 5
    with pytest.raises(DuplexError, match=rf"max_bad = 0.124: .*{images[24]} \(missing\); repair or") as refused:
        run(max_bad=0.124)
    assert opened_in(tmp_path) == [] and refused.traceback  # which keeps the failed frames alive


def test_features_that_are_zero_or_not_finite_are_bad_and_not_encoded_again(run, encoder) -> None:
    calls = []

    def overflow(pixels):
        calls.append(len(pixels))
        features = encoder.encode_images(pixels).clone()
        features[2, 0] = 1e6
        features[3] = 0
        return features

    report = run(encoder=Wrapped(encoder, overflow), max_bad=1.0)
    reasons = {2: "features not finite", 3: "features all zero"}
    assert [(bad.row, bad.reason) for bad in report.bad] == [
        (row, reasons[row % 8]) for row in range(40) if row % 8 in reasons
    ]
    content, count = report.path.read_bytes(), len(calls)
    again = run(encoder=Wrapped(encoder, overflow), max_bad=1.0)
    assert len(calls) == count and again.resumed == 40 and again.path.read_bytes() == content


def test_only_batches_with_a_pending_row_are_encoded(run, images, encoder, tmp_path: Path) -> None:
    content = (tmp_path / "pictures" / images[38]).read_bytes()
    (tmp_path / "pictures" / images[38]).unlink()
    run(max_bad=1.0)
    (tmp_path / "pictures" / images[38]).write_bytes(content)
    sizes = []
    wrapped = Wrapped(encoder, lambda pixels: (sizes.append(len(pixels)), encoder.encode_images(pixels))[1])
    assert run(encoder=wrapped, batch_size=7).resumed == 39
    assert sizes == [5]  # rows 35 to 39


@pytest.mark.parametrize(
    ("changes", "span", "options", "message"),
    [
        ({}, Span(0, 40, 40), {"fresh": True}, ""),
        ({"manifest": "other"}, Span(0, 40, 40), {}, "was begun with another manifest; extracting again"),
        ({"root": "mypics"}, Span(0, 40, 40), {"recorded_root": "pics_v2"}, "of images (mypics → pics_v2); extracting"),
        ({}, Span(0, 8, 40), {}, "was begun with another set of rows; extracting again"),
        ({}, None, {}, "cannot be continued (Unable to"),
    ],
)
def test_an_unfinished_file_of_another_kind_or_a_damaged_one_is_begun_again(
    run, tmp_path: Path, capsys, changes, span: Span | None, options, message: str
) -> None:
    whole, out = run(tmp_path / "whole.h5", **options).path, tmp_path / "features.h5"
    if span is None:
        partial_path(out).write_bytes(b"\x89HDF not really")
    else:
        cache = PartialCache.create(out, {**read_features(whole).identity, **changes}, span, 16)
        cache.write(0, np.full(8, ENCODED, np.uint8), cls=np.ones((8, 16), np.float16))
        cache.commit()
        cache.close()
    report = run(**options)
    assert report.resumed == 0 and report.seconds > 0 and report.path.read_bytes() == whole.read_bytes()
    assert message in capsys.readouterr().err and opened_in(tmp_path) == []


def test_a_finished_file_with_pending_rows_is_extracted_again(run, tmp_path, capsys) -> None:
    whole = run().path.read_bytes()
    with h5py.File(tmp_path / "features.h5", "r+") as file:
        file["status"][...] = PENDING
        update_checksums(file)
    report = run()
    err = capsys.readouterr().err
    assert report.resumed == 0 and report.path.read_bytes() == whole
    assert "made with another set of rows" in err and err.endswith("; extracting again\n")


@pytest.mark.parametrize(
    ("options", "message"), [({"tokens": "all"}, "known: none, patch"), ({"block_inputs": 3}, "has 2 blocks")]
)
def test_invalid_options_are_refused(run, tmp_path: Path, options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(**options)
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


def test_a_missing_or_misplaced_folder_is_reported_at_once(run, encoder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; correct `root`"):
        extract(["a.jpg"], tmp_path / "f.h5", encoder, ExtractionSettings(tmp_path / "absent", "m"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder is a folder; give --out the path of a file"):
        run(tmp_path / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(DuplexError, match=r"cannot be written: .*; fix the cause, or choose another place"):
        run(tmp_path / "file" / "features.h5")


def test_a_killed_worker_is_reported_in_one_line(run, encoder) -> None:
    """torch reports it from a signal handler, here in the middle of an encoding."""

    def kill_workers(pixels):
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
            time.sleep(0.5)
        return encoder.encode_images(pixels)

    with pytest.raises(DuplexError, match=r"a decoding worker died, .*run the same command again"):
        run(encoder=Wrapped(encoder, kill_workers), num_workers=2, batch_size=2)
    assert run(num_workers=2, batch_size=2).rows == 40
