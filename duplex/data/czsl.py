"""Load MIT-States, UT-Zappos and C-GQA from the folder layout that their CZSL releases share.

It is `ROOT/images/...`, `ROOT/metadata_compositional-split-natural.t7` and
`ROOT/compositional-split-natural/*_pairs.txt`. The metadata has a record per image; its field `set` is the split. Image
folders may be named with spaces or underscores (MIT-States) or as in the archive of UT-Zappos (the record's `_image`).
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from duplex.data.images import ImageTree, read_bytes, read_lines
from duplex.data.tables import COLUMNS, LabelledImages, check_labels, relative_path
from duplex.errors import DuplexError
from duplex.labels import SPLITS, LabelSpace

METADATA = "metadata_compositional-split-natural.t7"
ARCHIVE_FOLDERS = ("_images", "images", "ut-zap50k-images")  # folders that may hold an unpacked archive's own tree
FOLDER = "compositional-split-natural"  # of the pair lists
ABSENT = "NA"
Pair = tuple[str, str]


def load_czsl(root: Path) -> LabelledImages:
    """The manifest and the labels of a benchmark below `root`; missing images stay, with the metadata's path."""
    lists = read_pair_lists(root)
    records = read_metadata(root / METADATA)
    listed = {split: set(pairs) for split, pairs in lists.pairs.items()}
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
            raise DuplexError(f"{place}: the set {split!r} is not one of {', '.join(SPLITS)}, {ABSENT}")
        elif (state, thing) not in all_listed:
            unlisted += 1
        elif (state, thing) not in listed[split]:
            elsewhere += 1
        else:
            paths = list(_candidates(record, place))
            rows.append((next(filter(tree.has, paths), paths[0]), state, thing, split))
    if not rows:
        raise DuplexError(f"{root / METADATA}: no row has a pair of the pair lists; take both from one data set")
    notes = {
        "rows left out because their state, object or split is NA": absent,
        "rows left out because their pair is in no list": unlisted,
        "rows left out because their pair is only in another split's list": elsewhere,
        "lines of the pair lists left out because they repeat a pair": lists.repeats,
    }
    manifest = pd.DataFrame(rows, columns=COLUMNS, dtype=str)
    return LabelledImages(manifest, lists.labels(), {text: count for text, count in notes.items() if count})


def read_metadata(path: Path) -> list[dict[str, Any]]:
    """The records of a benchmark's metadata, saved by torch; a pickle that would run code is refused."""
    import torch

    data = read_bytes(path)
    if not data:
        raise DuplexError(f"{path} is empty; get it again with `duplex data download`")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that torch did not save raise almost anything
        reason = str(error).strip().split("\n", maxsplit=1)[0][:120] or type(error).__name__
        raise DuplexError(
            f"{path} does not hold plain data that `torch.load(weights_only=True)` reads ({reason}); "
            "a file that needs more could run code and is never opened: get the published one again"
        ) from error
    if not (isinstance(records, list) and all(isinstance(record, dict) for record in records)):
        raise DuplexError(f"{path} holds no list of records with image, attr, obj and set")
    return records


def _text(record: dict[str, Any], key: str, place: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise DuplexError(f"{place}: {key} is {value!r:.80}; it must be text")
    return value


def _candidates(record: dict[str, Any], place: str) -> Iterator[str]:
    image = relative_path(_text(record, "image", place), place)
    yield f"images/{image}"
    folder, slash, name = image.rpartition("/")
    for form in (folder.replace("_", " "), folder.replace(" ", "_")):
        yield f"images/{form}{slash}{name}"
    if "_image" in record:
        original = relative_path(_text(record, "_image", place), place)
        for top in ARCHIVE_FOLDERS:
            yield f"{top}/{original}"


@dataclass(frozen=True)
class PairLists:
    """The pairs that a benchmark lists per split."""

    pairs: dict[str, list[Pair]]  # split -> its pairs without repeats
    repeats: int  # lines that repeat a pair of their own list

    def labels(self) -> LabelSpace:
        return LabelSpace.from_pairs(self.pairs)


def label_files(root: Path) -> list[Path]:
    """Paths of the metadata and of the pair lists of a benchmark."""
    return [root / METADATA, *(_folder(root) / f"{split}_pairs.txt" for split in SPLITS)]


def has_pair_lists(root: Path) -> bool:
    return (_folder(root) / "train_pairs.txt").is_file()


def read_pair_lists(root: Path) -> PairLists:
    """Read a benchmark's pair lists (train, val, test), in `root` or its folder `compositional-split-natural`."""
    lists = {split: read_pair_list(_folder(root) / f"{split}_pairs.txt") for split in SPLITS}
    pairs = {split: list(dict.fromkeys(listed)) for split, listed in lists.items()}
    return PairLists(pairs, sum(len(lists[split]) - len(pairs[split]) for split in SPLITS))


def read_pair_list(path: Path) -> list[Pair]:
    """The (state, object) of each line that is not blank; raises DuplexError for a line that is not two words."""
    pairs: list[Pair] = []
    for number, line in enumerate(read_lines(path), 1):
        words = re.split(r"[ \t]+", line.strip(" \t"))
        if words == [""]:
            continue
        if len(words) != 2:
            raise DuplexError(
                f"{path}, line {number}: {line[:80]!r} is not `state object`, two words separated by a space"
            )
        pairs.append((words[0], words[1]))
    if not pairs:
        raise DuplexError(f"{path} lists no pairs")
    check_labels((state for state, _ in pairs), "state", path)
    check_labels((thing for _, thing in pairs), "object", path)
    return pairs


def _folder(root: Path) -> Path:
    return root / FOLDER if (root / FOLDER).is_dir() else root
