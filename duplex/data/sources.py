"""Load data sets from their sources: drawn images, a published benchmark, a table, or a folder tree.

MIT-States, UT-Zappos and C-GQA have the folders `images` and `compositional-split-natural`, and
metadata with an entry per image in `metadata_compositional-split-natural.t7`.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import TypeAdapter

from duplex.data.contents import content_keys, file_digests, join_keys, remembered_digests
from duplex.data.images import LINE_END, ImageTree, describe_skipped, read_bytes, read_text
from duplex.data.tables import (
    COLUMNS,
    LabelledImages,
    check_labels,
    checked_image_path,
    from_rows,
    is_table,
    labels_of,
    read_table,
    resplit,
)
from duplex.errors import DuplexError, UsageError
from duplex.labels import SPLITS, LabelSpace
from duplex.options import SourceOptions, SplitOptions
from duplex.system.files import sha256_once

METADATA = "metadata_compositional-split-natural.t7"
ARCHIVE_FOLDERS = ("_images", "images", "ut-zap50k-images")  # of an unpacked archive's own tree
FOLDER = "compositional-split-natural"  # of the pair lists
ABSENT = "NA"
Pair = tuple[str, str]
Keys = Callable[[Sequence[str]], list[str]]  # images -> one key per image, equal for equal images


def is_on_disk(source: SourceOptions) -> bool:
    """Whether a data set's folder exists and, if it has a table, the table's file."""
    return all(path is None or path.exists() for path in (source.root, source.table))


def load_source(source: SourceOptions, feature_keys: Keys | None = None) -> LabelledImages:
    """Load the manifest and labels of a data set; if it has no split, a random one is made.

    `feature_keys` returns a key per image; those with equal keys are kept together, like copies.
    """

    def keys(images: Sequence[str]) -> list[str]:
        found = content_keys(source.root, images)
        return found if feature_keys is None else join_keys(found, feature_keys(images))

    if source.resplit is not None:
        return resplit(_load_unchanged(original(source), keys), source.resplit, source.split)
    return _load_unchanged(source, keys)


def original(source: SourceOptions) -> SourceOptions:
    """A re-split's source without the re-split, and without words kept out of training."""
    split = replace(source.split, unseen_states=0.0, unseen_objects=0.0, images_per_pair=None)
    return replace(source, resplit=None, split=split)


def _load_unchanged(source: SourceOptions, contents: Keys) -> LabelledImages:
    if source.kind == "shapes":
        from duplex.data.shapes import shapes_manifest

        manifest = shapes_manifest(source.seed)
        return LabelledImages(manifest, labels_of(manifest))
    if not source.root.is_dir():
        raise UsageError(
            f"there is no folder {source.root}; correct `source: {{root: ...}}` in params.yaml or datasets/NAME.yaml "
            "or, for a published benchmark, run `duplex data download NAME` (mit-states, ut-zappos or cgqa)"
        )
    if source.kind == "standard":
        return load_czsl(source.root)
    if source.kind == "folder":
        frame, notes = read_folder(source.root)
        data = from_rows(frame, source.split, source.root, contents)
        return replace(data, notes={**notes, **data.notes})
    if source.table is None:
        raise UsageError(f"source {source.root} has `kind: table` but no `table`; add `table: FILE.csv` (or .parquet)")
    frame = read_table(source.table)
    tree = ImageTree(source.root)
    for image in frame["image"]:
        tree.has(image)  # raises for a link that leaves the root
    return from_rows(frame, source.split, source.table, contents)


def draw_missing_images(source: SourceOptions, manifest: pd.DataFrame) -> None:
    """Draw the missing images of the built-in data set `shapes`; do nothing for other data sets."""
    if source.kind == "shapes":
        from duplex.data.shapes import render_images

        render_images(manifest, source.root, source.seed)


def detect_source(path: Path, split: SplitOptions | None = None, root: Path | None = None) -> SourceOptions:
    """Source options for `path`: a table (with images in `root` or beside it), a published data set or a folder."""
    split = split or SplitOptions()
    if path.is_file() and is_table(path):
        return SourceOptions("table", root or path.parent, path, split=split)
    if not path.is_dir():
        problem = "is neither a folder nor a table" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; give a folder of images or a table (.csv, .tsv, .parquet, .json)")
    if root is not None:
        raise UsageError(f"--images is for tables, and {path} is not a table; leave --images out")
    return SourceOptions("standard" if has_pair_lists(path) else "folder", path, split=split)


def load_czsl(root: Path) -> LabelledImages:
    """Load the manifest and labels of a published data set below `root`; missing images are kept in the manifest."""
    pairs, repeats = read_pair_lists(root)
    records = read_metadata(root / METADATA)
    listed = {split: set(each) for split, each in pairs.items()}
    all_listed = set(chain.from_iterable(listed.values()))
    tree = ImageTree(root)
    rows = []
    absent = unlisted = elsewhere = 0
    for number, record in enumerate(records, 1):
        place = f"{root / METADATA}, row {number}"
        state = _text(record, "attr", place)
        thing = _text(record, "obj", place)
        split = _text(record, "set", place)
        if ABSENT in (state, thing, split):
            absent += 1
        elif split not in SPLITS:
            raise DuplexError(f"{place}: the field 'set' is {split!r}; expected {', '.join(SPLITS)} or {ABSENT}")
        elif (state, thing) not in all_listed:
            unlisted += 1
        elif (state, thing) not in listed[split]:
            elsewhere += 1
        else:
            paths = list(_candidates(record, place))
            rows.append((next(filter(tree.has, paths), paths[0]), state, thing, split))
    if not rows:
        raise DuplexError(
            f"{root / METADATA}: none of its pairs is listed in {_folder(root)}; both must be of one data set"
        )
    notes = {
        "rows left out because their state, object or split is NA": absent,
        "rows left out because their pair is in no list": unlisted,
        "rows left out because their pair is only in another split's list": elsewhere,
        "lines of the pair lists left out because they repeat a pair": repeats,
    }
    notes = {text: count for text, count in notes.items() if count}
    return LabelledImages(pd.DataFrame(rows, columns=COLUMNS, dtype=str), LabelSpace.from_pairs(pairs), notes)


def read_metadata(path: Path) -> list[dict[str, Any]]:
    """Read a published data set's metadata, a dict per image; a pickle that would run code is refused."""
    import torch

    data = read_bytes(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that torch did not save raise almost anything
        raise DuplexError(
            f"{path} cannot be read by `torch.load(weights_only=True)`: it is damaged, is another kind of file, or "
            "would run code; download the published file again"
        ) from error
    if not (isinstance(records, list) and all(isinstance(record, dict) for record in records)):
        raise DuplexError(f"{path} is not a list of records with 'image', 'attr', 'obj', 'set'; get the published file")
    return records


def _text(record: dict[str, Any], key: str, place: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise DuplexError(f"{place}: {key} is {value!r:.80}; it must be text")
    return value


def _candidates(record: dict[str, Any], place: str) -> Iterator[str]:
    image = checked_image_path(_text(record, "image", place), place)
    yield f"images/{image}"
    folder, slash, name = image.rpartition("/")
    for form in (folder.replace("_", " "), folder.replace(" ", "_")):
        yield f"images/{form}{slash}{name}"
    if "_image" in record:
        original = checked_image_path(_text(record, "_image", place), place)
        for top in ARCHIVE_FOLDERS:
            yield f"{top}/{original}"


def has_pair_lists(root: Path) -> bool:
    return (_folder(root) / "train_pairs.txt").is_file()


def read_pair_lists(root: Path) -> tuple[dict[str, list[Pair]], int]:
    """Each split's pairs in `root` or its folder `FOLDER`, and how many lines repeat an earlier one."""
    lists = {split: read_pair_list(_folder(root) / f"{split}_pairs.txt") for split in SPLITS}
    pairs = {split: list(dict.fromkeys(listed)) for split, listed in lists.items()}
    return pairs, sum(len(lists[split]) - len(pairs[split]) for split in SPLITS)


def read_pair_list(path: Path) -> list[Pair]:
    """The (state, object) pair in each non-blank line; DuplexError for a line that is not two words."""
    pairs: list[Pair] = []
    for number, line in enumerate(LINE_END.split(read_text(path)), 1):
        joined = line.count("+") == 1  # as in VAW-CZSL, whose words may have spaces
        words = re.split(r"[ \t]*\+[ \t]*" if joined else r"[ \t]+", line.strip(" \t"))
        if words == [""]:
            continue
        if len(words) != 2:
            raise DuplexError(
                f"{path}, line {number}: {line[:80]!r} is not `state object`, two words separated by a space"
            )
        pairs.append((words[0], words[1]))
    if not pairs:
        raise DuplexError(f"{path} lists no pairs; write a state and an object per line, or download it again")
    check_labels((state for state, _ in pairs), "state", path)
    check_labels((thing for _, thing in pairs), "object", path)
    return pairs


def _folder(root: Path) -> Path:
    return root / FOLDER if (root / FOLDER).is_dir() else root


FORMS = "`state/object/image.jpg` or `state object/image.jpg`"
SPLIT_FOLDER = re.compile(
    r"(train|training|val|valid|validation|dev|test|testing)([ _-]?(set|splits?|images?|data))?|fold[ _-]?\d+",
    re.IGNORECASE,
)


def read_folder(root: Path) -> tuple[pd.DataFrame, dict[str, int]]:
    """A table of image, state and object, from folder names; counts of skipped files, by note."""
    rows = []
    tree = ImageTree(root)
    for path in tree.images():
        parts = checked_image_path(path, root).split("/")
        if len(parts) not in (2, 3):
            raise DuplexError(f"{root / path} does not have the form {FORMS}; move it, or list all images in a table")
        state, thing = parts[:2] if len(parts) == 3 else _pair(parts[0], root)
        rows.append((len(parts), path, state, thing))
    counts = {kind: len(names) for kind, names in tree.skipped.items()}
    skipped = describe_skipped(counts)
    if not rows:
        raise DuplexError(f"{root} holds no images{f' (skipped: {skipped})' if skipped else ''}; add some as {FORMS}")
    frame = pd.DataFrame(rows, columns=["depth", "image", "state", "object"])
    if frame["depth"].nunique() > 1:
        deep = frame.loc[frame["depth"] == 3, "image"].iloc[0]
        flat = frame.loc[frame["depth"] == 2, "image"].iloc[0]
        raise DuplexError(f"{root} mixes {deep!r} and {flat!r}; use either {FORMS} for all images")
    for kind in ("state", "object"):
        check_labels(frame[kind], kind, root)
        names = sorted(frame[kind].unique())
        if len(names) > 1 and all(map(SPLIT_FOLDER.fullmatch, names)):
            raise DuplexError(
                f"{root}: its folders {', '.join(names)} are named after splits, not {kind}s; list the images in a "
                "table with the columns image, state, object and split"
            )
    notes = {f"files skipped ({skipped})": sum(counts.values())} if skipped else {}
    return frame[["image", "state", "object"]].astype(str), notes


def _pair(folder: str, root: Path) -> list[str]:
    words = folder.split() if " " in folder else folder.split("_")
    if len(words) != 2 or not all(words):
        raise DuplexError(
            f"{root / folder} holds images, but its name is not a state and an object; rename it, as in `red_apple`, "
            "or use `state/object/` folders"
        )
    return words


Record = dict[str, Any]
CONTENT = "content"  # key of the digest of a table, a benchmark's lists, or a folder's file names
IMAGES = "images"  # key of the digest of the names and contents of image files


def source_record(source: SourceOptions, earlier: Record | None = None, memory: Path | None = None) -> Record:
    """What a data set was read from: source options, digests of its table or lists and its images.

    earlier: a record whose digests are used for what is not on this machine.
    memory: a file that remembers digests, so that unchanged images are not read again.
    """
    record: Record = TypeAdapter(SourceOptions).dump_python(source, mode="json")
    images = _images_on_disk(source)
    record[CONTENT] = _content_digest(source, images)
    record[IMAGES] = _images_digest(source.root, images, memory)
    for key in (CONTENT, IMAGES):
        if record[key] is None:
            record[key] = (earlier or {}).get(key)
    return record


def _content_digest(source: SourceOptions, images: list[str]) -> str | None:
    if source.table is not None:
        return sha256_once(source.table) if source.table.is_file() else None
    if source.kind == "shapes" or not source.root.is_dir():
        return None
    if source.kind == "standard":
        lists = [_folder(source.root) / f"{split}_pairs.txt" for split in SPLITS]
        files = [source.root / METADATA, *lists]
        return _digest([sha256_once(path) for path in files if path.is_file()])
    return _digest(images)


def _images_on_disk(source: SourceOptions) -> list[str]:
    # of a table the images that it lists, otherwise all in the folder; none of `shapes`, which are drawn when needed
    if source.kind == "shapes" or not is_on_disk(source):
        return []
    if source.table is None:
        return list(ImageTree(source.root).images(refuse_links=False))
    with suppress(DuplexError):  # what is wrong with the table is reported where it is loaded
        return list(_listed_images(source.table, sha256_once(source.table)))
    return []


@lru_cache(maxsize=8)
def _listed_images(table: Path, content: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(read_table(table)["image"]))


def _images_digest(root: Path, images: list[str], memory: Path | None) -> str | None:
    read = file_digests if memory is None else partial(remembered_digests, memory=memory)
    digests = read(root, images)
    if not any(digests):
        return None
    return _digest([f"{image} {digest}" for image, digest in zip(images, digests, strict=True)])


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
