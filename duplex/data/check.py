"""What may be wrong with a data set on disk, found by opening every picture once."""

from __future__ import annotations

import hashlib
import io
import os
import unicodedata
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from PIL import Image

from duplex.data.dataset import Dataset
from duplex.data.image_errors import DECODING, machine_fault
from duplex.data.progress import tracked
from duplex.data.tree import PictureTree
from duplex.labels import SPLITS, LabelSpace, prompt_name

SHOWN = 5  # names of a finding, as text


@dataclass(frozen=True)
class Finding:
    what: str
    count: int
    examples: tuple[str, ...]  # all of them
    problem: bool  # whether results made from this data would be wrong or rows would be lost
    fatal: bool = False  # whether nothing can be trained or evaluated with it

    def __str__(self) -> str:
        more = ", ..." if self.count > SHOWN else ""
        return f"{self.count:,} {self.what}: {', '.join(self.examples[:SHOWN])}{more}"


def check_dataset(dataset: Dataset, root: Path) -> list[Finding]:
    """All findings that are not empty, problems first."""
    findings = [*check_labels_of(dataset), *_check_pictures(dataset.manifest, root)]
    return sorted((finding for finding in findings if finding.count), key=lambda finding: not finding.problem)


def check_labels_of(dataset: Dataset) -> list[Finding]:
    """What needs no picture: pairs without images, primitives that training never shows, splits without a question."""
    labels, manifest = dataset.labels, dataset.manifest
    found = [_unasked(dataset)]
    for split in SPLITS:
        rows = manifest[manifest["split"] == split]
        shown = set(labels.index(rows["state"].tolist(), rows["object"].tolist()).tolist())
        without = [c for c in labels.pairs[split].tolist() if c not in shown]
        found.append(
            _finding(f"{split} pairs without images", (_pair_name(labels, c) for c in without), split == "train")
        )
    train = labels.pairs["train"]
    for kind, names, known in (
        ("states", labels.states, labels.state_of(train)),
        ("objects", labels.objects, labels.object_of(train)),
    ):
        unseen = sorted(set(range(len(names))) - set(known.tolist()))
        found.append(_finding(f"{kind} that training never shows", (names[i] for i in unseen), True))
        found.append(_finding(f"{kind} read like another in a prompt", _alike(names), True))
    return found


def _unasked(dataset: Dataset) -> Finding:
    """AUC asks about seen and unseen pairs; validation chooses by it, test reports it."""
    labels, manifest = dataset.labels, dataset.manifest
    known = labels.seen[labels.index(manifest["state"].tolist(), manifest["object"].tolist())]
    lacking = [
        f"{split} has no image of {'a seen' if wanted else 'an unseen'} pair"
        for split in ("val", "test")
        for wanted in (True, False)
        if not ((manifest["split"] == split).to_numpy() & (known == wanted)).any()
    ]
    return _finding(
        "splits that cannot be evaluated (more images a pair, more pairs, or a split of your own)",
        lacking,
        True,
        fatal=True,
    )


def _alike(names: Iterable[str]) -> list[str]:
    """Labels that differ in spelling but not in their prompt, such as `Red` and `red`, or two ways to write `é`."""
    texts = pd.Series({name: unicodedata.normalize("NFC", prompt_name(name)) for name in names}, dtype=object)
    return texts.index[texts.duplicated(keep=False)].tolist()


def _check_pictures(manifest: pd.DataFrame, root: Path) -> list[Finding]:
    tree, images = PictureTree(root), list(dict.fromkeys(manifest["image"]))
    present = {image for image in images if tree.has(image)}
    opened = _open_all(root, [image for image in images if image in present])
    unreadable = [f"{image} ({reason})" for image, (reason, _) in opened.items() if reason]
    content = pd.Series({image: digest for image, (reason, digest) in opened.items() if not reason}, dtype=object)
    known = manifest.assign(content=manifest["image"].map(content))
    same = content[content.duplicated(keep=False)].sort_values(kind="stable")
    return [
        _finding("images are missing", (image for image in images if image not in present), True),
        _finding("images cannot be read", unreadable, True),
        _finding("images are listed more than once", _repeated(manifest["image"]), True),
        _finding("images have the content of another", same.index[same.duplicated()], False),
        _finding("images are in two splits (a leak)", _in_two_splits(manifest, "image"), True),
        _finding("image contents are in two splits (a leak)", _in_two_splits(known.dropna(), "content"), True),
        _finding("pictures are on disk but not listed", (p for p in tree.pictures() if p not in present), False),
        *(_finding(f"files are passed over: {what}", names, False) for what, names in tree.passed.items()),
    ]


def _in_two_splits(rows: pd.DataFrame, key: str) -> list[str]:
    """For each key that occurs in more than one split the first image of each, with its split."""
    firsts = rows.drop_duplicates([key, "split"])
    shared = firsts[firsts[key].duplicated(keep=False)]
    named = (shared["image"] + " (" + shared["split"] + ")").groupby(shared[key], sort=False)
    return [" = ".join(names) for _, names in named]


def _repeated(images: pd.Series) -> list[str]:
    return images[images.duplicated()].drop_duplicates().tolist()


def _open_all(root: Path, images: list[str]) -> dict[str, tuple[str, bytes]]:
    """Image -> what is wrong with it (empty: nothing), sha256 of its bytes."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda image: open_picture(root / image), images, chunksize=1)
        return dict(zip(images, tracked(results, "opening pictures", len(images)), strict=True))


def open_picture(path: Path) -> tuple[str, bytes]:
    """Read all of a picture. JPEGs are decoded at an eighth of their size: every byte is still parsed."""
    try:
        data = path.read_bytes()
        if not data:
            return "0 bytes", b""
        with Image.open(io.BytesIO(data)) as picture:
            picture.draft("RGB", (1, 1))
            picture.load()
    except (MemoryError, Image.DecompressionBombError, *DECODING) as error:
        if fault := machine_fault(path, error):
            raise fault from error
        return str(error).replace("<_io.BytesIO object at ", "<").split("\n", 1)[0][:80] or type(error).__name__, b""
    return "", hashlib.sha256(data).digest()


def _pair_name(labels: LabelSpace, composition: int) -> str:
    state, thing = divmod(composition, len(labels.objects))
    return f"{labels.states[state]} {labels.objects[thing]}"


def _finding(what: str, names: Iterable[str], problem: bool, *, fatal: bool = False) -> Finding:
    listed = tuple(names)
    return Finding(what, len(listed), listed, problem, fatal)
