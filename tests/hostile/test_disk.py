"""Full disks and system errors: one line of error, and no incomplete files."""

from pathlib import Path

import pytest

from tests.hostile.conftest import Command, files, full_disk


@pytest.fixture
def table(pics: Path) -> Path:
    lines = [f"{i:05d}.jpg,{('red', 'blue')[i % 2]},{('star', 'moon')[i // 2 % 2]}" for i in range(12)]
    splits = ["train"] * 4 + ["val"] * 4 + ["test"] * 4
    (pics / "table.csv").write_text(
        "image,state,object,split\n" + "".join(f"{a},{b}\n" for a, b in zip(lines, splits, strict=True))
    )
    return pics


@pytest.mark.parametrize("limit", [0, 20, 300])
def test_a_full_disk_leaves_existing_files_unchanged(table: Path, command: Command, limit: int) -> None:
    """manifest.csv, labels.json, statistics.json and source.json have about 388, 132, 287 and 350 bytes."""
    before = files(table)
    with full_disk(limit):
        done = command("prepare", "-d", "pics")
    assert done.refused("cannot be written: File too large; make room") and files(table) == before
    assert not list(table.rglob("*.partial"))
