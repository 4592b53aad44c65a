"""The one door to every kind of source."""

from __future__ import annotations

from pathlib import Path

import pytest

from duplex.data.dataset_source import ensure_images, load_source
from duplex.data.manifest import read_manifest, write_manifest
from duplex.data.shapes import shapes_manifest
from duplex.data.source_options import Kind, SourceOptions
from duplex.data.stats import statistics
from duplex.errors import UsageError


def test_shapes_load_without_images_and_are_drawn_on_demand(tmp_path: Path) -> None:
    source = SourceOptions("shapes", tmp_path / "shapes", seed=3)
    dataset = load_source(source)
    assert dataset.manifest.equals(shapes_manifest(3)) and not (tmp_path / "shapes").exists()
    assert statistics(dataset.labels, dataset.manifest).splits["train"].seen == len(dataset.labels.pairs["train"])
    ensure_images(source, dataset.manifest.head(3))
    assert len(list((tmp_path / "shapes").rglob("*.png"))) == 3


@pytest.mark.parametrize("kind", ["standard", "table", "folder"])
def test_a_missing_root_is_a_usage_error(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        load_source(SourceOptions(kind, tmp_path / "none"))


def test_a_table_source_needs_its_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs `table`"):
        load_source(SourceOptions("table", tmp_path))


def test_labels_with_commas_and_quotes_survive_the_manifest(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [
        (split, state, thing)
        for split in ("train", "val", "test")
        for state, thing in (('""a"", b', "c;d"), ("NA", "1"))
    ]
    lines = [f'"{split} {i}.jpg","{state}","{thing}",{split}' for i, (split, state, thing) in enumerate(rows)]
    table.write_text("image,state,object,split\n" + "\n".join(lines))
    dataset = load_source(SourceOptions("table", tmp_path, table))
    assert dataset.labels.states == ('"a", b', "NA") and dataset.labels.objects == ("1", "c;d")
    write_manifest(dataset.manifest, tmp_path / "manifest.csv")
    assert read_manifest(tmp_path / "manifest.csv").equals(dataset.manifest)
