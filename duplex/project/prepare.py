"""The pipeline's stage `prepare`: a data set's source -> manifest, labels, statistics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from duplex.data.download import BENCHMARKS
from duplex.data.images import ImageTree
from duplex.data.sources import draw_missing_images, load_source
from duplex.data.tables import count_dataset, write_manifest
from duplex.errors import UsageError
from duplex.features.imported import equal_feature_keys
from duplex.options import SplitOptions
from duplex.project.run import ProjectData
from duplex.system.files import write_json


def prepare(data: ProjectData) -> None:
    """Write manifest, labels and statistics; prints how many rows were left out, and why."""
    source = data.entry.source
    stamp = data.stamp("prepare")
    loaded = load_source(source, equal_feature_keys(data.entry.features, source))
    if not loaded.made_split and source.split != SplitOptions():
        raise UsageError(f"{source.table or source.root} has a split, so none is made; remove `split:` from `source:`")
    for note, count in loaded.notes.items():
        print(f"{data.dataset}: {note}: {count:,}", file=sys.stderr)
    draw_missing_images(source, loaded.manifest)
    write_manifest(loaded.manifest, data.paths.manifest(data.dataset))
    loaded.labels.save(data.paths.labels(data.dataset))
    write_json(data.paths.statistics(data.dataset), count_dataset(loaded.labels, loaded.manifest).to_dict())
    data.write_stamp("prepare", stamp)


def ensure_prepared(data: ProjectData) -> None:
    """Prepare a data set if its manifest is missing or outdated, with a note on stderr."""
    manifest = data.paths.manifest(data.dataset)
    found = data.outdated("prepare") if manifest.exists() else f"{manifest} does not exist"
    if not found:
        return
    source = data.entry.source
    if source.kind != "shapes" and not source.root.is_dir():
        require_images(data.dataset, source.root, [])
    print(f"preparing {data.dataset} first: {found}", file=sys.stderr)
    prepare(data)


def require_images(dataset: str, root: Path, images: Sequence[str]) -> None:
    """Raise `UsageError` if no image exists below `root`, `DuplexError` for a link out of it."""
    tree = ImageTree(root) if root.is_dir() else None
    present = [] if tree is None else [tree.has(image) for image in images]  # a missing image gets a status
    if not any(present):
        raise UsageError(f"{root} has no images of the data set {dataset!r}; {images_remedy(dataset, root)}")


def images_remedy(dataset: str, root: Path) -> str:
    """What to do if images are missing from the folder `root`, as the end of an error message."""
    benchmark = next((name for name in (dataset, root.name) if name in BENCHMARKS), None)
    download = "copy them there" if benchmark is None else f"run `duplex data download {benchmark}`"
    return f"{download}, or correct `root` of {dataset} in params.yaml or datasets/{dataset}.yaml"
