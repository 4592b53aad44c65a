"""Read and check tables of labelled images: a user's CSV or Parquet file, and its manifest.

The manifest has the columns `image, state, object, split` and one row per image.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML

from duplex.data.contents import SplitResult, split_at_random, split_by_content
from duplex.data.images import read_bytes, read_text
from duplex.errors import DuplexError, UsageError, install_command
from duplex.labels import GROUPS, SPLITS, LabelSpace, frequency_groups, prompt_name
from duplex.options import SplitOptions
from duplex.system.files import replace_file

COLUMNS = ["image", "state", "object", "split"]
NEEDED = ("image", "state", "object")
ROOT = "the image folder (the table's own, unless --images or `source: {root: ...}` names another)"
# control characters, line ends, half characters
UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")
PATH_LIMIT = 4096
LABEL_LIMIT = 100  # characters; both labels and a context share the 77 tokens of CLIP's prompts
SPLIT_NAMES = {"set", "subset", "fold", "phase", "partition"}  # of `split` in other programs' tables
CSV = (".csv", ".tsv")
PARQUET = (".parquet", ".pq")
TABLES = (*CSV, *PARQUET, ".json")  # the last one of Label Studio
CROP = ["x", "y", "width", "height"]  # columns of a crop, in pixels of the upright image
FIRST_SEED = 1_000_000  # of re-splits, far from usual seeds of `split:`
Place = Callable[[int], str]  # number of a row -> its name in messages


def write_manifest(frame: pd.DataFrame, path: Path) -> None:
    """Write a manifest, or a table without splits, as CSV; equal rows give equal bytes."""
    with replace_file(path) as scratch:
        scratch.write_bytes(manifest_bytes(frame))


def manifest_bytes(frame: pd.DataFrame) -> bytes:
    text: str = frame[[name for name in COLUMNS if name in frame]].to_csv(
        index=False, lineterminator="\n", quoting=csv.QUOTE_MINIMAL
    )
    return text.encode("utf-8")


def read_manifest(path: Path) -> pd.DataFrame:
    """Read and check a manifest; every cell is text, so a state named `NA` or `1` stays as it is."""
    command = f"`duplex prepare --dataset {path.parent.name}` writes it"
    if not path.is_file():
        raise DuplexError(f"{path} does not exist; {command}")
    try:
        lines = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
        rows = [row for row in lines if row]
    except csv.Error as error:
        raise DuplexError(f"{path} cannot be read as a manifest ({error}); {command} again") from error
    if rows[:1] != [COLUMNS]:
        raise DuplexError(f"{path} does not begin with the header {','.join(COLUMNS)!r}; {command} again")
    for number, row in enumerate(rows):
        if len(row) != len(COLUMNS):
            raise DuplexError(f"{path}, row {number} has {len(row)} cells instead of {len(COLUMNS)}; {command} again")
    frame = pd.DataFrame(rows[1:], columns=COLUMNS, dtype=str)
    checked = checked_cells(frame, path, lambda row: f"{path}, row {row + 1}")
    if "split" not in checked:
        raise DuplexError(f"{path}: no row has a split; {command} again")
    differs = checked["image"] != frame["image"]
    if differs.any():
        bad = int(differs.argmax())
        raise DuplexError(f"{path}, row {bad + 1}: {frame['image'][bad]!r} has empty or `.` parts; {command} again")
    return checked


def checked_cells(
    frame: pd.DataFrame, table: object, place: Callable[[int], str], *, paths: bool = True
) -> pd.DataFrame:
    """Check a table's cells and return it, with `.` and empty parts removed from image paths.

    All rows or none have a split; an empty column `split` is removed. Only training rows may lack
    a state or an object. Unless `paths`, images may be any text.
    """
    checked: dict[str, list[str]] = {}
    for name in map(str, frame.columns):
        cells = checked.setdefault(name, [])
        for row, given in enumerate(frame[name]):
            cell = "" if given is None and name != "image" else given
            if not isinstance(cell, str):
                raise DuplexError(f"{place(row)}: the column {name!r} holds {cell!r:.80}, not text; convert it to text")
            if name == "image" and not cell:
                raise DuplexError(f"{place(row)}: the column {name!r} has an empty cell; fill it in or remove the row")
            if name == "split" and cell not in (*SPLITS, ""):
                raise DuplexError(f"{place(row)}: the split {cell!r} is not one of {', '.join(SPLITS)}")
            cells.append(checked_image_path(cell, place(row)) if name == "image" and paths else cell)
    splits = checked.get("split", [""] * len(frame))
    for row, (state, thing, split) in enumerate(zip(checked["state"], checked["object"], splits, strict=True)):
        if not (state and thing) and (split != "train" or state == thing):
            empty = "object" if state else "state"
            raise DuplexError(
                f"{place(row)}: the {empty} is empty; fill it in (only training images may lack a state or an object)"
            )
    for kind in ("state", "object"):
        check_labels(filter(None, checked[kind]), kind, table)
    without = checked.get("split", []).count("")
    if 0 < without < len(frame):
        raise DuplexError(f"{table}: 'split' is empty in {without} of {len(frame)} rows; fill it in for all or none")
    if without:
        del checked["split"]
    return pd.DataFrame(checked, dtype=str)


def check_labels(labels: Iterable[str], kind: str, place: object) -> None:
    """Raise DuplexError for labels that are too long, unprintable or without a word."""
    for label in set(labels):
        if len(label) > LABEL_LIMIT:
            raise DuplexError(
                f"{place}: the {kind} {label[:40]!r}... is too long for a prompt ({len(label)} characters); shorten it "
                f"to at most {LABEL_LIMIT}"
            )
        if UNFIT.search(label):
            raise DuplexError(f"{place}: the {kind} {label!r} contains an unprintable character; remove that character")
        if not prompt_name(label):
            raise DuplexError(f"{place}: the {kind} {label!r} contains no word for a prompt; rename it")


def checked_image_path(image: str, place: object) -> str:
    """`image` without `.` and empty parts; DuplexError if it is invalid or leaves the data root."""
    if UNFIT.search(image):
        raise DuplexError(f"{place}: the image path {image[:80]!r} has an unprintable character; rename the file")
    if len(image) > PATH_LIMIT:
        raise DuplexError(f"{place}: the image path {image[:80]!r}... is too long; use at most {PATH_LIMIT} characters")
    if image.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[\\/]", image):
        raise DuplexError(f"{place}: the image path {image!r} is absolute; write it relative to {ROOT}")
    parts = [part for part in image.split("/") if part not in ("", ".")]
    if not parts:
        raise DuplexError(f"{place}: the image path {image!r} names no file; give an image's path")
    if ".." in parts or "..\\" in image:
        raise DuplexError(
            f"{place}: the image path {image!r} contains `..`; move the image to {ROOT} and write its path without `..`"
        )
    return "/".join(parts)


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES


def read_table(path: Path, optional: Sequence[str] = (), needed: Sequence[str] = NEEDED) -> pd.DataFrame:
    """Read and check a table: the `needed` columns, and `split`, crops and `optional` ones if any."""
    if not is_table(path):
        raise UsageError(f"{path} is in no supported table format; save it as one of {', '.join(TABLES)}")
    readers = {**dict.fromkeys(CSV, _read_csv), **dict.fromkeys(PARQUET, _read_parquet)}
    frame, place = readers.get(path.suffix.lower(), _read_label_studio)(path, optional, needed)
    if frame.empty:
        raise DuplexError(f"{path} has no rows")
    return checked_cells(_with_crops(frame, place) if set(CROP) <= set(frame) else frame, path, place)


def _with_crops(frame: pd.DataFrame, place: Place) -> pd.DataFrame:
    numbers = frame[CROP].apply(pd.to_numeric, errors="coerce").to_numpy(float)
    is_whole = frame[CROP].isin(["", None]).all(axis=1)
    wrong = ~is_whole & ~((numbers >= (0, 0, 1, 1)) & (numbers < 2**31)).all(axis=1)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        cells = ", ".join(f"{name} {cell}" for name, cell in frame[CROP].iloc[row].items())
        raise DuplexError(
            f"{place(row)}: the crop is {cells}; use x and y from 0, width and height from 1, or leave all four empty"
        )
    numbers = np.nan_to_num(numbers)
    first = numbers[:, :2].round()
    end = (numbers[:, :2] + numbers[:, 2:]).round()
    boxes = np.hstack([first, end - first]).astype(int).tolist()
    crops = [f"#xywh={','.join(map(str, box))}" for box in boxes]
    cropped = frame["image"].astype(str) + crops
    return frame.assign(image=frame["image"].where(is_whole, cropped)).drop(columns=CROP)


def known_columns(
    header: Sequence[str], place: object, needed: Sequence[str] = NEEDED, optional: Sequence[str] = ()
) -> list[str]:
    """The columns to read; DuplexError if one is repeated in `header`, missing or misspelt."""
    optional = (*optional, *(CROP if "image" in needed and set(CROP) <= set(header) else ()))
    columns = [*needed, *(name for name in ("split", *optional) if name in header)]
    for name in columns:
        if header.count(name) != 1:
            count = "no column" if name not in header else "two columns"
            raise DuplexError(
                f"{place} has {count} {name!r}; name its columns {', '.join(needed)} and, optionally, split (now: "
                f"{', '.join(map(repr, header)):.100})"
            )
    _refuse_misspelt(header, place, (*needed, "split", *optional))
    return columns


def _refuse_misspelt(header: Sequence[str], place: object, known: Sequence[str]) -> None:
    lacking = [name for name in known if name not in header]
    for name in header:
        word = "_".join(name.lower().split())
        similar = difflib.get_close_matches(word, lacking, n=1, cutoff=0.8)
        if "split" in lacking and word.rstrip("s") in SPLIT_NAMES:
            similar = ["split"]
        if similar:
            raise DuplexError(
                f"{place}: unknown column {name!r}; call it {similar[0]!r} if you meant that, otherwise remove it"
            )


def _read_csv(path: Path, optional: Sequence[str], needed: Sequence[str]) -> tuple[pd.DataFrame, Place]:
    text = read_text(path)
    first = text.lstrip("\r\n").split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    file = io.StringIO(text, newline="")
    lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []
    numbers: list[int] = []
    number = 1  # line where the next row begins: an open quote may make it the last
    try:
        for cells in lines:
            if any(cell.strip() for cell in cells):
                rows.append([cell.strip() for cell in cells])
                numbers.append(number)
            number = lines.line_num + 1
    except csv.Error as error:
        raise DuplexError(f"{path}, line {number} is not valid CSV ({error}); correct its quotes") from error
    if not rows:
        raise DuplexError(f"{path} is empty; it needs a header line with {', '.join(needed)} and, optionally, split")
    header = rows[0]
    columns = known_columns(header, path, needed, optional)
    for number, cells in zip(numbers, rows, strict=True):
        if len(cells) != len(header):
            raise DuplexError(f"{path}, line {number} has {len(cells)} cells, but the header has {len(header)}")
    frame = pd.DataFrame(rows[1:], columns=header, dtype=str)
    return frame[columns], lambda row: f"{path}, line {numbers[row + 1]}"


def _read_parquet(path: Path, optional: Sequence[str], needed: Sequence[str]) -> tuple[pd.DataFrame, Place]:
    try:
        from pyarrow import ArrowException, BufferReader, parquet
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow; run {install_command('parquet')}, or save it as .csv") from error

    source = BufferReader(read_bytes(path))  # of a Python file, Arrow's threads abort the program at its exit
    try:
        file = parquet.ParquetFile(source)
        columns = known_columns(file.schema_arrow.names, path, needed, optional)
        table = file.read(columns=columns, use_threads=False)
        cells: dict[str, list[object]] = {}
        metadata = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", "{}"))
        # of the package `datasets`: names of numbered labels
        features = metadata.get("info", {}).get("features", {})
        for name in columns:
            given = table.column(name).to_pylist()
            names = features.get(name, {}).get("names")
            if names:
                given = [None if cell is None or cell < 0 else names[cell] for cell in given]  # -1: not labelled
            given = _as_files(given, path) if name == "image" else given
            cells[name] = [cell.strip() if isinstance(cell, str) else cell for cell in given]
    except (ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0][:120]
        raise DuplexError(f"{path} is not a Parquet table ({reason}); save it again as .parquet or .csv") from error
    return pd.DataFrame(cells, dtype=object), lambda row: f"{path}, row {row + 1}"


def _as_files(cells: Sequence[Any], table: Path) -> list[Any]:
    # images stored as bytes are written to a folder beside the table
    folder = table.with_name(f"{table.stem}-images")
    names = []
    for cell in cells:
        data = name = cell
        if isinstance(cell, dict):
            data = cell.get("bytes")
            name = cell.get("path")
        if isinstance(data, bytes):
            suffix = Path(name).suffix if isinstance(name, str) else ""
            file = folder / f"{hashlib.sha256(data).hexdigest()[:24]}{suffix}"
            folder.mkdir(exist_ok=True)
            if not file.exists():
                with replace_file(file) as scratch:
                    scratch.write_bytes(data)
            name = f"{folder.name}/{file.name}"
        names.append(name)
    return names


def _read_label_studio(path: Path, *_: Sequence[str]) -> tuple[pd.DataFrame, Place]:
    from duplex.data.label_studio import read_tasks

    frame = pd.DataFrame(read_tasks(path), columns=[*NEEDED, *CROP], dtype=object)
    return frame, lambda row: f"{path}, label {row + 1}"


@dataclass(frozen=True)
class LabelledImages:
    """A data set in memory: manifest, labels, and notes on rows that were left out."""

    manifest: pd.DataFrame  # columns image, state, object, split; one row per image
    labels: LabelSpace
    notes: dict[str, int] = field(default_factory=dict)  # rows left out or pairs lacking -> count
    made_split: bool = False  # whether this package made the split
    contents: tuple[str, ...] | None = None  # row -> key of its image, if copies are kept together


def labels_of(manifest: pd.DataFrame) -> LabelSpace:
    """The states and objects in a manifest and, for each split, the pairs that its images show."""
    pairs = {}
    complete = complete_rows(manifest)
    for split in SPLITS:
        rows = complete.loc[complete["split"] == split, ["state", "object"]].drop_duplicates()
        pairs[split] = list(zip(rows["state"], rows["object"], strict=True))
    labels = LabelSpace.from_pairs(pairs)
    sides = (("state", "object", labels.states), ("object", "state", labels.objects))
    for kind, other, names in sides:
        lacking = sorted(set(manifest[kind]) - {"", *names})
        if lacking:
            raise DuplexError(
                f"every image of the {kind} {lacking[0]!r} lacks its {other}; fill in one, or remove these rows"
            )
    return labels


def complete_rows(manifest: pd.DataFrame) -> pd.DataFrame:
    """The rows that have both a state and an object."""
    return manifest[(manifest["state"] != "") & (manifest["object"] != "")]


def from_rows(
    frame: pd.DataFrame,
    options: SplitOptions,
    place: object,
    contents: Callable[[Sequence[str]], Sequence[str]] | None = None,
) -> LabelledImages:
    """Make a data set from a table; without a column split, a random split is drawn.

    `contents` returns a key per image; images with equal keys get the same split.
    """
    if frame.empty:
        raise DuplexError(f"{place} lists no images")
    repeated = frame.duplicated()
    notes = {"rows left out because they repeat another row": int(repeated.sum())}
    frame = frame[~repeated].reset_index(drop=True)
    twice = frame["image"].duplicated()
    if twice.any():
        image = frame.loc[twice, "image"].iloc[0]
        raise DuplexError(f"{place}: the image {image!r} has two different rows; keep only the right one")
    made_split = "split" not in frame
    keys = None
    if made_split:
        keys = None if contents is None else tuple(contents(frame["image"].tolist()))
        result = _split(frame, keys, options, place)
        frame = limit_images(frame.assign(split=result.split), options)
        keys = None if keys is None else tuple(keys[row] for row in frame.index)
        frame = frame.reset_index(drop=True)
        notes["unseen pairs fewer than requested, so that every state and object stays in training"] = result.short
    for split in SPLITS:
        if not (frame["split"] == split).any():
            raise DuplexError(
                f"{place} has no {split} images; list some, or leave out the column split to have a split made"
            )
    notes = {text: count for text, count in notes.items() if count}
    return LabelledImages(frame[COLUMNS], labels_of(frame), notes, made_split, keys)


def _split(frame: pd.DataFrame, keys: Sequence[str] | None, options: SplitOptions, place: object) -> SplitResult:
    return split_at_random(frame, options, place) if keys is None else split_by_content(frame, keys, options, place)


def split_name(dataset: str, number: int, options: SplitOptions = SplitOptions()) -> str:
    """Name of a re-split: `zap-split1`, or `zap-words1` if it keeps words out of training."""
    few = "" if options.images_per_pair is None else f"-few{options.images_per_pair}"
    kind = "words" if options.unseen_states or options.unseen_objects else "split"
    return f"{dataset}{few}-{kind}{number}"


def limit_images(frame: pd.DataFrame, options: SplitOptions) -> pd.DataFrame:
    """`frame` with at most `options.images_per_pair` random training images of each pair."""
    if options.images_per_pair is None:
        return frame
    ordered = frame[frame["split"] == "train"].sort_values("image")
    train = ordered.sample(frac=1, random_state=options.seed % 2**32)
    place = train.groupby(["state", "object"]).cumcount()
    return frame.drop(index=train.index[place >= options.images_per_pair])


def resplit(data: LabelledImages, number: int, options: SplitOptions = SplitOptions()) -> LabelledImages:
    """The data set with a random split, given by `number`, into parts of the same sizes.

    Of `options`, only shares of new words and `images_per_pair` are used.
    """
    rows = data.manifest
    own = split_options_like(rows, FIRST_SEED + number)
    chosen = replace(
        own,
        unseen_states=options.unseen_states,
        unseen_objects=options.unseen_objects,
        images_per_pair=options.images_per_pair,
    )
    result = _split(rows, data.contents, chosen, "the data set")
    manifest = limit_images(rows.assign(split=result.split.to_numpy()), chosen).reset_index(drop=True)
    short = {"unseen pairs fewer than in the data set's own split": result.short} if result.short else {}
    notes = {**data.notes, **short}
    return replace(data, manifest=manifest, labels=labels_of(manifest), notes=notes, made_split=True)


def split_options_like(rows: pd.DataFrame, seed: int) -> SplitOptions:
    """Options of a random split whose validation and test sets are as large as those of `rows`."""
    partial = rows.drop(complete_rows(rows).index)["image"].tolist()
    if partial:
        raise UsageError(f"a re-split needs the state and object of every image; add what {partial[0]!r} lacks")
    pairs = pd.Series(list(zip(rows["state"], rows["object"], strict=True)), rows.index)
    seen = pairs.isin(pairs[rows["split"] == "train"])
    unseen_pairs = []
    seen_images = []
    for split in ("val", "test"):
        here = rows["split"] == split
        for kind, mask in (("with", seen), ("without", ~seen)):
            if not (here & mask).any():
                raise UsageError(f"a re-split needs {split} images of pairs {kind} training images; add some")
        unseen_pairs.append(pairs[here & ~seen].nunique() / pairs.nunique())
        seen_images.append(float((here & seen).sum() / seen.sum()))
    return SplitOptions(seed, unseen_pairs[0], unseen_pairs[1], seen_images[0], seen_images[1])


@dataclass(frozen=True)
class SplitCounts:
    seen: int  # listed pairs that are in training
    unseen: int  # listed pairs that are not
    images: int | None  # None if only pair lists are known


@dataclass(frozen=True)
class DatasetStatistics:
    states: int
    objects: int
    splits: dict[str, SplitCounts]
    shares: dict[str, dict[str, float]] | None  # split -> frequency group -> share of the split's images

    def to_dict(self) -> dict[str, Any]:
        train = self.splits["train"]
        return {
            "states": self.states,
            "objects": self.objects,
            "train": {"seen": train.seen, "images": train.images},
            "val": vars(self.splits["val"]).copy(),
            "test": vars(self.splits["test"]).copy(),
            "shares": self.shares and {group: self.shares["train"][group] for group in GROUPS[:3]},
        }


def count_dataset(labels: LabelSpace, manifest: pd.DataFrame | None = None) -> DatasetStatistics:
    """Count a data set's listed pairs and, if there is a manifest, its images."""
    seen = labels.seen
    shares: dict[str, dict[str, float]] | None = None
    images: dict[str, int | None] = dict.fromkeys(SPLITS)
    if manifest is not None:
        images = {split: int((manifest["split"] == split).sum()) for split in SPLITS}
        complete = complete_rows(manifest)
        compositions = labels.index(complete["state"].tolist(), complete["object"].tolist())
        rows = {split: compositions[(complete["split"] == split).to_numpy()] for split in SPLITS}
        groups = frequency_groups(rows["train"], labels.size)
        shares = {}
        for split in SPLITS:
            counted = np.bincount(groups.groups_of(rows[split]), minlength=len(GROUPS))
            shares[split] = {name: float(counted[i] / max(1, counted.sum())) for i, name in enumerate(GROUPS)}
    counts = {}
    for split in SPLITS:
        known = int(seen[labels.pairs[split]].sum())
        counts[split] = SplitCounts(known, len(labels.pairs[split]) - known, images[split])
    return DatasetStatistics(len(labels.states), len(labels.objects), counts, shares)


def statistics_text(name: str, stats: DatasetStatistics) -> str:
    """A text table of the counts of the data set `name`, with the images in each frequency group."""
    header = ["", "|S|", "|O|", "|S|x|O|", "C_s", "X_s", "val C_s", "C_u", "imgs", "test C_s", "C_u", "imgs"]
    train = stats.splits["train"]
    counts = [stats.states, stats.objects, stats.states * stats.objects, train.seen, train.images]
    for split in ("val", "test"):
        counts += vars(stats.splits[split]).values()
    cells = [name, *("-" if count is None else f"{count:,}" for count in counts)]
    lines = _aligned([header, cells])
    if stats.shares:
        body = [[split, *(f"{stats.shares[split][group]:.1%}" for group in GROUPS)] for split in SPLITS]
        lines += ["", *_aligned([["images in", *GROUPS], *body])]
    return "\n".join(lines)


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def read_benchmarks() -> dict[str, dict[str, Any]]:
    """Read benchmarks.yaml: archives, terms, citation and counts of each published data set."""
    text = files("duplex.data").joinpath("benchmarks.yaml").read_text(encoding="utf-8")
    return dict(YAML(typ="safe", pure=True).load(text))


def published_differences(name: str, stats: DatasetStatistics) -> list[str]:
    """One line per count that differs from the published one of the data set `name`, if any."""
    benchmark = read_benchmarks().get(name)
    if benchmark is None:
        return []
    published = benchmark["counts"]
    rows = [(name, getattr(stats, name), published[name]) for name in ("states", "objects")]
    for split, counts in stats.splits.items():
        names = [f"{split} {what}" for what in ("seen pairs", "unseen pairs", "images")]
        rows += zip(names, vars(counts).values(), published.get(split, [None] * 3), strict=True)
    return [
        f"{what}: {count:,}, published {known:,}"
        for what, count, known in rows
        if None not in (count, known) and count != known
    ]
