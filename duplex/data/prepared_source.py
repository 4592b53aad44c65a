"""Record what a data set's table of images was made from; if this source has changed, the table is refused.

The source is a table, a benchmark or a folder tree. A record has the source's options and a digest: of the table,
of the benchmark's lists, or of the names in the folder. For a folder it also has a digest of the files' sizes, by which
images that were swapped or edited are usually noticed. Images themselves are not read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from duplex.data.image_tree import ImageTree
from duplex.data.source_options import SourceOptions
from duplex.errors import DuplexError
from duplex.system.files import sha256, write_json

Record = dict[str, Any]
CONTENT = "content"  # key of the digest
SIZES = "sizes"  # key of the digest of a folder's files and their sizes in bytes; absent in older records


def source_record(source: SourceOptions, file: Path | None = None) -> Record:
    """The record of a data set's source: its options, and a digest of its table, lists or file names.

    Args:
        file: an earlier record of the source (`write_source`). Its digests are used if the source is not on this
            machine, for example if only its features were copied here.
    """
    record: Record = TypeAdapter(SourceOptions).dump_python(source, mode="json")
    digests = _content_digests(source)
    if not digests and file is not None and file.is_file():
        earlier = _read_record(file)
        digests = {key: earlier[key] for key in (CONTENT, SIZES) if key in earlier}
    return {**record, CONTENT: None, **digests}


def write_source(source: SourceOptions, file: Path) -> None:
    """Write a JSON record of a data set's source (options and content digest), by which later changes are noticed."""
    write_json(file, source_record(source))


def require_prepared(source: SourceOptions, file: Path) -> None:
    """Raise `DuplexError` if a data set's source has changed since `duplex prepare` wrote its record `file`.

    If there is no such file, nothing is checked: the table of images was not written by `duplex prepare`.
    """
    if not file.is_file():
        return
    name = file.parent.name
    expected, prepared = source_record(source, file), _read_record(file)
    keys = (prepared.keys() | expected.keys()) - ({SIZES} - prepared.keys())
    changed = sorted(key for key in keys if prepared.get(key) != expected.get(key))
    if not changed:
        return
    options = ", ".join(key for key in changed if key not in (CONTENT, SIZES))
    what = f"`source: {{{options}}}` in params.yaml" if options else f"{source.table or source.root}"
    raise DuplexError(
        f"{name}: {what} has changed since `duplex prepare` read it; `duplex prepare --dataset {name}` reads it again, "
        "and `dvc repro` runs everything that depends on it"
    )


def _read_record(file: Path) -> Record:
    try:
        record = json.loads(file.read_text("utf-8"))
        if isinstance(record, dict):
            return record
    except ValueError:
        pass
    raise DuplexError(f"{file} is damaged; `duplex prepare --dataset {file.parent.name}` writes it again")


def _content_digests(source: SourceOptions) -> Record:
    """A digest of the table, lists or file names that a data set is read from; for a folder, also of file sizes."""
    if source.table is not None:
        return {CONTENT: sha256(source.table)} if source.table.is_file() else {}
    if source.kind == "shapes" or not source.root.is_dir():
        return {}
    if source.kind == "standard":
        from duplex.data.czsl_layout import label_files

        return {CONTENT: _digest([sha256(path) for path in label_files(source.root) if path.is_file()])}
    names = list(ImageTree(source.root).images(refuse_links=False))
    return {CONTENT: _digest(names), SIZES: _digest([f"{name} {_size(source.root / name)}" for name in names])}


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
