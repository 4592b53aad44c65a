"""Where a data set comes from, and the one door through which it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, Protocol

import pandas as pd

from duplex.data.czsl_layout import load_standard
from duplex.data.dataset import Dataset, from_rows, labels_of
from duplex.data.folder import read_folder
from duplex.data.pair_lists import has_pair_lists
from duplex.data.progress import tracked
from duplex.data.resplit import resplit
from duplex.data.split_options import SplitOptions
from duplex.data.table import is_table, read_table
from duplex.data.tree import PictureTree
from duplex.errors import UsageError

Kind = Literal["shapes", "standard", "table", "folder"]


class Split(Protocol):
    """The options of a split to be made, as params.yaml or `SplitOptions` hold them."""

    @property
    def seed(self) -> int: ...
    @property
    def val_unseen(self) -> float: ...
    @property
    def test_unseen(self) -> float: ...
    @property
    def val_images(self) -> float: ...
    @property
    def test_images(self) -> float: ...


class Source(Protocol):
    """What `load_source` needs to know; params.yaml's `source:` has this form, and `DataSource` is one made by hand."""

    @property
    def kind(self) -> Kind: ...
    @property
    def root(self) -> Path: ...
    @property
    def table(self) -> Path | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def split(self) -> Split: ...
    @property
    def resplit(self) -> int | None: ...


@dataclass(frozen=True)
class DataSource:
    kind: Kind
    root: Path
    table: Path | None = None
    seed: int = 7  # of the rendered pictures
    split: SplitOptions = field(default_factory=SplitOptions)
    resplit: int | None = None  # which of the splits drawn anew; None: the one that the data come with


def are_there(source: Source) -> bool:
    """Whether a data set's folder is there, and its table where it has one."""
    return all(path is None or path.exists() for path in (source.root, source.table))


def load_source(source: Source) -> Dataset:
    """The manifest and labels of a data set; pictures are not opened."""
    data = _as_it_comes(source)
    return data if source.resplit is None else resplit(data, source.resplit)


def _as_it_comes(source: Source) -> Dataset:
    if source.kind == "shapes":
        from duplex.data.shapes import shapes_manifest

        manifest = shapes_manifest(source.seed)
        return Dataset(manifest, labels_of(manifest))
    if not source.root.is_dir():
        raise UsageError(
            f"the data root {source.root} is not a folder; correct `source: {{root: ...}}` in params.yaml, "
            "or fetch a benchmark with `duplex data download`"
        )
    if source.kind == "standard":
        return load_standard(source.root)
    options = SplitOptions(**{entry.name: getattr(source.split, entry.name) for entry in fields(SplitOptions)})
    if source.kind == "folder":
        return from_rows(read_folder(source.root), options, source.root)
    if source.table is None:
        raise UsageError("a source of kind table needs `table`, the path of its CSV or Parquet file")
    frame, tree = read_table(source.table), PictureTree(source.root)
    for image in frame["image"]:
        tree.has(image)  # refuses a link that leaves the root; a missing picture is for `data check` to report
    return from_rows(frame, options, source.table)


def ensure_pictures(source: Source, manifest: pd.DataFrame) -> None:
    """Render the pictures of a source that draws its own; other sources have theirs on disk."""
    if source.kind == "shapes":
        from duplex.data.shapes import render_pictures

        render_pictures(
            manifest,
            source.root,
            source.seed,
            progress=lambda names: tracked(names, "drawing pictures", len(names)),
        )


def detect_source(path: Path, split: SplitOptions | None = None, root: Path | None = None) -> DataSource:
    """The kind of source that lies at a path: a table, the standard layout, or a folder tree."""
    split = split or SplitOptions()
    if path.is_file() and is_table(path):
        return DataSource("table", root or path.parent, path, split=split)
    if not path.is_dir():
        raise UsageError(f"{path} is neither a folder nor a table (.csv, .tsv, .parquet)")
    return DataSource("standard" if has_pair_lists(path) else "folder", path, split=split)
