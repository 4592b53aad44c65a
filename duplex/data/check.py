"""Check a data set on disk: its labels, its splits, and its image files, each of which is opened once."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pandas as pd

from duplex.data.contents import join_copies, looks_from_texts, near_copies, read_contents
from duplex.data.images import ImageTree, describe_skipped, uncropped_path
from duplex.data.tables import LabelledImages, complete_rows
from duplex.labels import SPLITS, prompt_name

ALIKE = "have the same text in prompts"
SHOWN = 5  # examples of an issue in its text


@dataclass(frozen=True)
class DataIssue:
    """A kind of fault in a data set; a `problem` spoils results or loses rows, a `fatal` one prevents training."""

    what: str  # description, to be printed after the count
    count: int
    examples: tuple[str, ...]  # all that were found
    problem: bool  # whether results would be wrong or rows would be lost
    fatal: bool = False  # whether the data set cannot be trained or evaluated at all

    def __str__(self) -> str:
        more = ", ..." if self.count > SHOWN else ""
        return f"{self.count:,} {self.what}: {', '.join(self.examples[:SHOWN])}{more}"


def check_dataset(dataset: LabelledImages, root: Path) -> list[DataIssue]:
    """Check a data set's labels and its images below `root`; returns the faults, problems before remarks."""
    issues = [*check_labels_of(dataset), *_check_images(dataset.manifest, root)]
    return sorted((issue for issue in issues if issue.count), key=lambda issue: not issue.problem)


def check_labels_of(dataset: LabelledImages) -> list[DataIssue]:
    """Check labels without opening images; returns a `DataIssue` per check, of count 0 if it passes."""
    labels = dataset.labels
    manifest = complete_rows(dataset.manifest)
    issues = [_check_splits(dataset)]
    for split in SPLITS:
        rows = manifest[manifest["split"] == split]
        shown = set(labels.index(rows["state"].tolist(), rows["object"].tolist()).tolist())
        without = [divmod(c, len(labels.objects)) for c in labels.pairs[split].tolist() if c not in shown]
        names = (f"{labels.states[m]} {labels.objects[n]}" for m, n in without)
        issues.append(_issue(f"{split} pairs without images", names, split == "train"))
    train = labels.pairs["train"]
    for kind, primitives, known in (
        ("states", labels.states, labels.state_of(train)),
        ("objects", labels.objects, labels.object_of(train)),
    ):
        unseen = sorted(set(range(len(primitives))) - set(known.tolist()))
        issues.append(_issue(f"{kind} that training never shows (new words)", (primitives[i] for i in unseen), False))
        issues.append(_issue(f"{kind} {ALIKE}", _alike(primitives), True))
    return issues


def alike_labels(dataset: LabelledImages) -> list[str]:
    """Warnings about labels that read the same in prompts, most likely two spellings of one label."""
    return [str(issue) for issue in check_labels_of(dataset) if issue.count and issue.what.endswith(ALIKE)]


def _check_splits(dataset: LabelledImages) -> DataIssue:
    labels = dataset.labels
    manifest = complete_rows(dataset.manifest)
    known = labels.seen[labels.index(manifest["state"].tolist(), manifest["object"].tolist())]
    missing = []
    for split in ("val", "test"):
        of_seen = known[(manifest["split"] == split).to_numpy()]
        if not of_seen.any():
            missing.append(f"{split} has no image of a seen pair")
        if of_seen.all():
            missing.append(f"{split} has no image of an unseen pair")
    what = "splits that cannot be evaluated (add more images of each pair, more pairs, or a split of your own)"
    return _issue(what, missing, True, fatal=True)


def _alike(names: Iterable[str]) -> list[str]:
    # differ in spelling but not in their prompt, such as `Red` and `red`, two forms of `é`, or an invisible character
    texts = {}
    for name in names:
        shown = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
        texts[name] = unicodedata.normalize("NFC", prompt_name(shown))
    column = pd.Series(texts, dtype=object)
    return column.index[column.duplicated(keep=False)].tolist()


def _check_images(manifest: pd.DataFrame, root: Path) -> list[DataIssue]:
    tree = ImageTree(root)
    images = list(dict.fromkeys(manifest["image"]))
    present = dict.fromkeys(image for image in images if tree.has(image))
    found = dict(zip(present, read_contents(root, list(present)), strict=True))
    unreadable = [f"{image} ({reason})" for image, (_, _, reason) in found.items() if reason]
    pixels = {image: pixels for image, (_, pixels, reason) in found.items() if not reason}
    copies = near_copies(looks_from_texts(pixels.values()))
    keys = dict(zip(pixels, join_copies(list(pixels.values()), copies), strict=True))
    repeated = manifest["image"][manifest["image"].duplicated()]
    listed = set(map(uncropped_path, present))
    unlisted = [path for path in tree.images(refuse_links=False) if path not in listed]
    kinds = describe_skipped({kind: len(names) for kind, names in tree.skipped.items()})
    return [
        _issue("images are missing", (image for image in images if image not in present), True),
        _issue("images cannot be read", unreadable, True),
        _issue("images are listed more than once", repeated.drop_duplicates(), True),
        _issue("images are in two splits (a leak)", _in_two_splits(manifest, "image"), True),
        *content_issues(manifest, keys),
        _issue("images are on disk but not listed", unlisted, False),
        _issue(f"files are skipped ({kinds})", chain.from_iterable(tree.skipped.values()), False),
    ]


def content_issues(
    manifest: pd.DataFrame, keys: Mapping[str, str], nouns: tuple[str, str] = ("content", "contents")
) -> list[DataIssue]:
    """Issues about copies of images: with the same label, with different labels, in two splits.

    keys: image -> key, equal for copies; nouns: word for what copies share, also in plural.
    """
    known = manifest.assign(content=manifest["image"].map(pd.Series(keys, dtype=object)))
    labels = {row.image: f"{row.state} {row.object}" for row in manifest.itertuples()}
    firsts: dict[str, str] = {}  # key -> the first image with it
    alike = []
    contradicted = []
    for image, key in sorted(keys.items()):
        first = firsts.setdefault(key, image)
        if first != image and labels[image] == labels[first]:
            alike.append(f"{image} = {first}")
        elif first != image:
            contradicted.append(f"{image} ({labels[image]}) = {first} ({labels[first]})")
    what = f"images have the same {nouns[0]} as another image"
    return [
        _issue(what, alike, False),
        _issue(f"{what} with another label", contradicted, False),
        _issue(f"image {nouns[1]} are in two splits (a leak)", _in_two_splits(known.dropna(), "content"), True),
    ]


def _in_two_splits(rows: pd.DataFrame, key: str) -> list[str]:  # texts such as `a.jpg (train) = b.jpg (test)`
    firsts = rows.drop_duplicates([key, "split"])
    shared = firsts[firsts[key].duplicated(keep=False)]
    named = (shared["image"] + " (" + shared["split"] + ")").groupby(shared[key], sort=False)
    return [" = ".join(names) for _, names in named]


def _issue(what: str, names: Iterable[str], problem: bool, *, fatal: bool = False) -> DataIssue:
    listed = tuple(names)
    return DataIssue(what, len(listed), listed, problem, fatal)
