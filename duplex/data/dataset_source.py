"""The sources of data sets: drawn images, a benchmark's layout, a table, or a folder tree."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from duplex.data.czsl_layout import load_czsl
from duplex.data.dataset import LabelledImages, from_rows, labels_of
from duplex.data.folder import read_folder
from duplex.data.image_tree import ImageTree
from duplex.data.pair_lists import has_pair_lists
from duplex.data.resplit import resplit
from duplex.data.source_options import SourceOptions, SplitOptions
from duplex.data.table import is_table, read_table
from duplex.errors import UsageError


def is_on_disk(source: SourceOptions) -> bool:
    """Whether a data set's folder exists, and its table where it has one."""
    return all(path is None or path.exists() for path in (source.root, source.table))


def load_source(source: SourceOptions) -> Dataset:
    """Load the manifest and labels of a dLabelledImages without opening its images.

    Raise UsageError for a wrong option, DuplexError for data that cannot be used.
    """
    data = _load_unchanged(source)
    return data if source.resplit is None else resplit(data, source.resplit)


def _load_unchanged(source: SourceOptions) -> Dataset:
    """Load a data set with the split that it LabelledImagesith."""
    if source.kind == "shapes":
        from duplex.data.shapes import shapes_manifest

        manifest = shapes_manifest(source.seed)
        return Dataset(manifest, labels_of(manifest))
    if not sourLabelledImages.is_dir():
        raise UsageError(
            f"the data root {source.root} is not a folder; correct `source: {{root: ...}}` in params.yaml, "
            "or fetch a benchmark with `duplex data download`"
        )
    if source.kind == "standard":
        return load_czsl(source.root)
    if source.kind == "folder":
        return from_rows(read_folder(source.root), source.split, source.root)
    if source.table is None:
        raise UsageError("a source of kind table needs `table`, the path of its CSV or Parquet file")
    frame, tree = read_table(source.table), ImageTree(source.root)
    for image in frame["image"]:
        tree.has(image)  # raises for a link that leaves the root; `data check` reports missing images
    return from_rows(frame, source.split, source.table)


def ensure_images(source: SourceOptions, manifest: pd.DataFrame) -> None:
    """Draw the missing images of kind "shapes"; other kinds have their images on disk."""
    if source.kind == "shapes":
        from duplex.data.shapes import render_images

        render_images(manifest, source.root, source.seed)


def detect_source(path: Path, split: SplitOptions | None = None, root: Path | None = None) -> SourceOptions:
    """Return the source at a path: a table, a benchmark's layout ("standard"), or a folder tree.

    root: folder of a table's images, by default the table's own folder.
    """
    split = split or SplitOptions()
    if path.is_file() and is_table(path):
        return SourceOptions("table", root or path.parent, path, split=split)
    if not path.is_dir():
        raise UsageError(f"{path} is neither a folder nor a table (.csv, .tsv, .parquet)")
    return SourceOptions("standard" if has_pair_lists(path) else "folder", path, split=split)
