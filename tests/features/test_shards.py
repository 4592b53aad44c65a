import math
from pathlib import Path

import h5py
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError, UsageError
from duplex.features.shards import join_shards, plan_shard, shard_path


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.integers(1, 40), st.data())
def test_shards_cover_every_row_once_and_start_at_batches(total: int, batch: int, data) -> None:
    n = data.draw(st.integers(1, math.ceil(total / batch)))
    spans = [plan_shard(total, batch, (k, n), Path("f.h5"))[0] for k in range(n)]
    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(total))
    assert all(span.start % batch == 0 and span.rows > 0 for span in spans)


@pytest.mark.parametrize(
    "options",
    [{}, {"tokens": "patch"}, {"block_inputs": 1}, {"block_inputs": 1, "tokens": "patch"},
     {"pixels": True, "block_inputs": 1}],
)  # fmt: skip
def test_joined_shards_are_the_cache_in_one_piece(run, tmp_path: Path, monkeypatch, options) -> None:
    whole = run(tmp_path / "whole" / "features.h5", **options)
    out = tmp_path / "parts" / "features.h5"
    for k in (2, 0, 1):
        run(out, shard=(k, 3), **options)
    assert run(out, shard=(1, 3), **options).resumed > 0
    for chunk in (1, 2**26):
        monkeypatch.setattr("duplex.features.shards.BLOCK", chunk)
        assert join_shards(out) == whole.rows
        assert out.read_bytes() == whole.path.read_bytes()


def test_shards_that_do_not_fit_each_other_are_not_joined(run, tmp_path: Path) -> None:
    out = tmp_path / "features.h5"
    with pytest.raises(DuplexError, match="has no shards; run `duplex extract"):
        join_shards(out)
    run(out, shard=(0, 2))
    with pytest.raises(DuplexError, match=r"shard 1/2 of .* is not finished; `duplex extract .* --shard 1/2`"):
        join_shards(out)
    run(out, shard=(1, 2), manifest_sha256="n" * 64)
    with pytest.raises(DuplexError, match=r"differ in their manifest; run `.* --shard k/2` for each k from 0 to 1"):
        join_shards(out)
    run(out, shard=(1, 2), batch_size=12)
    with pytest.raises(DuplexError, match="starts at row 24, but the shard before it ends at row 16"):
        join_shards(out)
    run(out, shard=(0, 3))
    with pytest.raises(DuplexError, match=r"has sets of 2 and 3 shards; delete all but one"):
        join_shards(out)


def test_there_are_at_most_as_many_shards_as_batches() -> None:
    for k, n in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(UsageError, match=f"shard {k}/{n} does not exist"):
            plan_shard(10, 4, (k, n), Path("f.h5"))
    assert plan_shard(10, 4, (2, 3), Path("f.h5"))[0].rows == 2
    with pytest.raises(UsageError, match="10 images make 3 batches, too few for 4 shards; use at most 3"):
        plan_shard(10, 4, (0, 4), Path("f.h5"))
    with pytest.raises(UsageError, match="lists no images, so there are none to encode"):
        plan_shard(0, 4, None, Path("f.h5"))
    span, path = plan_shard(10, 4, None, Path("f.h5"))
    assert (span.start, span.stop, span.total, path) == (0, 10, 10, Path("f.h5"))


def test_shards_that_end_early_or_lack_a_row_are_not_joined(run, tmp_path: Path) -> None:
    out = tmp_path / "features.h5"
    for k in range(2):
        run(out, shard=(k, 3)).path.rename(tmp_path / f"short.shard-{k}-of-2.h5")
    with pytest.raises(DuplexError, match=r"short\.shard-1-of-2\.h5 ends at row .* is not the last shard; run `"):
        join_shards(tmp_path / "short.h5")
    for k in range(2):
        run(out, shard=(k, 2))
    with h5py.File(shard_path(out, 0, 2), "r+") as file:
        file["status"][3] = 0
    with pytest.raises(DuplexError, match=r"features\.shard-0-of-2\.h5 has rows that were never encoded"):
        join_shards(out)
