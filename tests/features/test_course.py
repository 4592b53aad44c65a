"""The course of an extraction: what it takes up again, when it commits and when it stops, and what it says."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from duplex.config.params import ExtractionParams
from duplex.errors import DuplexError
from duplex.features import extraction as extraction_module
from duplex.features.decoding import decoded_blocks
from duplex.features.extraction import BadImage, ExtractionReport
from duplex.features.layout import ENCODED, PENDING, Span, partial_path
from duplex.features.shards import join_shards
from duplex.features.store import PartialCache, open_features
from tests.features.test_store import opened_in


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever an extraction looks at its clock."""
    seconds = itertools.count(1)
    monkeypatch.setattr(extraction_module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


class Shown:
    """A bar that remembers."""

    last: Shown

    def __init__(self, name: str, total: int) -> None:
        Shown.last, self.total = self, total
        self.steps: list[tuple[int, float]] = []

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, done: int, numbers: dict[str, float]) -> None:
        self.steps.append((done, numbers["a second"]))


def test_progress_counts_what_is_left_to_encode(run, images, tmp_path: Path, clock, monkeypatch) -> None:
    monkeypatch.setattr(extraction_module, "Bar", Shown)
    run(tmp_path / "all.h5", progress=True)
    assert Shown.last.total == 40
    assert Shown.last.steps == [(8 * n, 8.0) for n in range(1, 6)]  # eight pictures a second of that clock
    kept = (tmp_path / "pictures" / images[38]).read_bytes()
    (tmp_path / "pictures" / images[38]).unlink()
    run(tmp_path / "some.h5", max_bad=1.0, progress=False)
    assert Shown.last.total == 0
    (tmp_path / "pictures" / images[38]).write_bytes(kept)
    run(tmp_path / "some.h5", progress=True, batch_size=7)
    assert Shown.last.total == 5 and [done for done, _ in Shown.last.steps] == [5]  # rows 35 to 39


def test_commits_come_as_seldom_as_they_may(run, tmp_path: Path, clock, monkeypatch) -> None:
    written: list[int] = []
    commit = PartialCache.commit
    monkeypatch.setattr(PartialCache, "commit", lambda self: (written.append(len(self._waiting)), commit(self))[1])
    for seconds, blocks in ((0.0, [1, 1, 1, 1, 1, 0, 0]), (2.0, [2, 2, 1, 0]), (100.0, [5, 0])):
        written.clear()
        run(tmp_path / f"{seconds}.h5", commit_seconds=seconds)
        assert written == blocks  # the last one is that of `finish`


def test_what_cannot_come_right_any_more_stops_at_once(run, images, tmp_path: Path) -> None:
    for image in images[:9]:
        (tmp_path / "pictures" / image).unlink()
    listed = "; ".join(f"{image} (missing)" for image in images[:5])
    with pytest.raises(DuplexError) as refused:
        run(max_bad=0.1, commit_seconds=0.0)
    assert f"8 of 40 pictures cannot be read, more than max_bad = 0.1 allows: {listed}; …; mend" in str(refused.value)
    cache = PartialCache(tmp_path / "features.h5")
    assert cache.done == 8  # of the first block
    cache.close()


def test_exactly_the_share_that_is_allowed_is_allowed_and_five_are_listed_whole(run, images, tmp_path: Path) -> None:
    for image in images[20:25]:
        (tmp_path / "pictures" / image).unlink()
    assert len(run(max_bad=0.125).bad) == 5
    with pytest.raises(DuplexError, match=rf"allows: .*{images[24]} \(missing\); mend them"):
        run(max_bad=0.124)


def test_bad_rows_of_a_shard_are_counted_among_all(run, images, tmp_path: Path) -> None:
    (tmp_path / "pictures" / images[30]).unlink()
    report = run(shard=(1, 2), max_bad=0.5)
    assert [(bad.row, bad.image, bad.reason) for bad in report.bad] == [(30, images[30], "missing")]
    assert [bad.row for bad in run(shard=(1, 2), max_bad=0.5).bad] == [30]


def test_a_picture_that_was_missing_is_taken_up_as_any_other(run, images, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.h5").path.read_bytes()
    kept = (tmp_path / "pictures" / images[0]).read_bytes()
    (tmp_path / "pictures" / images[0]).unlink()
    run(max_bad=1.0)
    (tmp_path / "pictures" / images[0]).write_bytes(kept)
    assert run().resumed == 39 and (tmp_path / "features.h5").read_bytes() == whole


def test_a_view_of_shards_is_left_to_its_shards(run, images, tmp_path: Path) -> None:
    kept = (tmp_path / "pictures" / images[0]).read_bytes()
    (tmp_path / "pictures" / images[0]).unlink()
    for k in range(2):
        run(shard=(k, 2), max_bad=1.0)
    join_shards(tmp_path / "features.h5")
    (tmp_path / "pictures" / images[0]).write_bytes(kept)
    report = run(max_bad=1.0)
    assert (report.resumed, report.seconds, len(report.bad)) == (40, 0.0, 1)
    with h5py.File(tmp_path / "features.h5") as file:
        assert file["mark"].is_virtual


def test_a_limit_is_that_many_rows_at_most(run, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.h5").path.read_bytes()
    assert run(tmp_path / "many.h5", limit=99).path.read_bytes() == whole
    assert run(tmp_path / "all.h5", limit=40).path.read_bytes() == whole
    few = open_features(run(tmp_path / "few.h5", limit=39).path)
    assert len(few.cls) == 39 and few.identity["limit"] == "39"


def test_afresh_is_from_the_beginning_whatever_lies_there(run, tmp_path: Path) -> None:
    PartialCache.create(tmp_path / "features.h5", *begun(run, tmp_path), 16).close()
    report = run(fresh=True)
    assert report.resumed == 0 and report.seconds > 0
    assert report.path.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def begun(run, tmp_path: Path, **changes: str) -> tuple[dict[str, str], Span]:
    return {**open_features(run(tmp_path / "whole.h5").path).identity, **changes}, Span(0, 40, 40)


def test_an_unfinished_file_of_something_else_is_begun_again_and_said(run, tmp_path: Path, capsys) -> None:
    for identity, span, says in (
        (*begun(run, tmp_path, manifest="other"), "another manifest"),
        (begun(run, tmp_path)[0], Span(0, 8, 40), "another set of rows"),
    ):
        cache = PartialCache.create(tmp_path / "features.h5", identity, span, 16)
        cache.write(0, np.full(8, ENCODED, np.uint8), cls=np.ones((8, 16), np.float16))
        cache.commit()
        cache.close()
        assert run().resumed == 0
        assert f"features.h5.partial was begun with {says}; extracting afresh" in capsys.readouterr().err
        assert (tmp_path / "features.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
        assert opened_in(tmp_path) == []
        (tmp_path / "features.h5").unlink()


def test_a_finished_file_is_looked_at_before_it_is_believed(run, tmp_path: Path, capsys) -> None:
    whole = run().path.read_bytes()
    for change, says in (
        (lambda file: file["cls"].write_direct(np.full((40, 16), np.nan, np.float16)), "is damaged: row 0 holds"),
        (lambda file: file["mark"].write_direct(np.full(40, PENDING, np.uint8)), "made with another set of rows"),
        (lambda file: file["mark"].write_direct(np.full(40, 200, np.uint8)), "is damaged: the mark 200 has no"),
    ):
        with h5py.File(tmp_path / "features.h5", "r+") as file:
            change(file)
        report = run()
        told = capsys.readouterr().err
        assert report.resumed == 0 and report.path.read_bytes() == whole
        assert says in told and "makes it again" not in told and told.endswith("; extracting afresh\n")


def test_nothing_stays_open_after_a_failure(run, images, tmp_path: Path) -> None:
    (tmp_path / "pictures" / images[0]).unlink()
    with pytest.raises(DuplexError) as refused:
        run(max_bad=0.0)
    assert opened_in(tmp_path) == [] and refused.traceback  # which holds on to what failed


def test_an_unfinished_file_that_cannot_be_opened_is_one_sentence(run, tmp_path: Path, monkeypatch) -> None:
    partial_path(tmp_path / "features.h5").write_bytes(b"\x89HDF")
    real = h5py.File

    def refuse(path: Path, *words: object, **options: object) -> object:
        if str(path).endswith(".partial"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *words, **options)

    monkeypatch.setattr("duplex.features.store.h5py.File", refuse)
    with pytest.raises(DuplexError, match=r"features\.h5\.partial cannot be opened: .*Permission denied"):
        run()


def test_a_report_says_what_happened() -> None:
    bad = BadImage(3, "a.jpg", "missing")
    report = ExtractionReport(Path("f.h5"), 40, 10, 1.50049, [bad])
    assert report.rate == pytest.approx(30 / 1.50049)
    assert report.lines() == [
        "f.h5: 40 rows, 10 of them before at 20.0 pictures a second, 1 bad",
        "  bad: row 3, a.jpg: missing",
    ]
    listed = [{"row": 3, "image": "a.jpg", "reason": "missing"}]
    assert report.to_dict() == {"rows": 40, "resumed": 10, "seconds": 1.5, "bad": listed}
    assert ExtractionReport(Path("f.h5"), 40, 40, 0.0).lines() == ["f.h5: 40 rows, 40 of them before, 0 bad"]
    assert ExtractionReport(Path("f.h5"), 40, 0, 0.5).lines() == ["f.h5: 40 rows at 80.0 pictures a second, 0 bad"]


def test_what_is_not_said_is_as_params_yaml_leaves_it() -> None:
    given = inspect.signature(extraction_module.extract).parameters
    for name, value in ExtractionParams().model_dump().items():
        assert name == "views" or given[name].default == value
    assert (given["fresh"].default, given["progress"].default) == (False, True)


@pytest.mark.parametrize("workers", [0, 2, 9])
def test_no_more_workers_than_blocks_and_pinned_memory_for_a_gpu_alone(run, monkeypatch, workers: int) -> None:
    asked: dict[str, object] = {}

    def noted(pictures, blocks, num_workers: int, *, pinned: bool):
        asked.update(blocks=list(blocks), workers=num_workers, pinned=pinned)
        return decoded_blocks(pictures, blocks, 0, pinned=pinned)

    monkeypatch.setattr(extraction_module, "decoded_blocks", noted)
    run(num_workers=workers, batch_size=16)
    assert asked == {"blocks": [(0, 16), (16, 32), (32, 40)], "workers": min(workers, 3), "pinned": False}


@pytest.mark.parametrize("name", ["features.h5", "features.h5.partial"])
def test_somebodys_file_is_not_written_over(run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a letter")
    for options in ({}, {"fresh": True}):
        with pytest.raises(DuplexError, match="is not a feature cache, so it is left alone"):
            run(**options)
    assert (tmp_path / name).read_text() == "a letter"
