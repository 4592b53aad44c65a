"""Contents of image files, and random compositional splits that keep images of equal content together.

Near-copies are images saved or scaled again: their *looks*, 8 x 8 pixels, hardly differ.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image

from duplex.data.images import BadImageFile, decode_image, machine_fault, read_image_bytes, uncropped_path
from duplex.errors import DuplexError
from duplex.labels import Ints
from duplex.options import SplitOptions
from duplex.system.files import sha256, write_text
from duplex.system.processes import track

SIDE = 8  # of a look, in pixels
DIFFERENCE = 0.015  # root mean square of near-copies' difference at most, in parts of the brightest value
CONTRAST = 0.2  # the same, in parts of the smaller contrast: flat images are alike, not copies
FEW_PAIRS = 20  # up to which a split leaves each word two training pairs, if possible
BLOCK = 256  # looks compared at once with all others


def content_keys(root: Path, images: Sequence[str]) -> list[str]:
    """One key per image below `root`, equal for images linked by a chain of copies and near-copies."""
    pixels = [each for _, each, _ in read_contents(root, images)]
    keys = [each or image for image, each in zip(images, pixels, strict=True)]
    return join_copies(keys, near_copies(looks_from_texts(pixels)))


def near_copies(looks: NDArray[np.uint8]) -> Ints:
    """Pairs of rows [K, 2] of copies and near-copies among looks [N, 192] (8 x 8 RGB pixels)."""
    mean = looks.mean(axis=1) / 255
    order = np.argsort(mean, kind="stable")  # means differ by at most as much as looks
    mean = mean[order]
    x = looks[order].astype(np.float32) / 255
    colours = x.reshape(len(x), SIDE**2, 3)
    contrast = np.sqrt(((colours - colours.mean(axis=1, keepdims=True)) ** 2).mean(axis=(1, 2)))
    squares = (x**2).sum(axis=1)
    found = [np.empty((0, 2), dtype=np.int64)]
    for start in range(0, len(x), BLOCK):
        rows = slice(start, start + BLOCK)
        others = slice(start, np.searchsorted(mean, mean[rows][-1] + DIFFERENCE, side="right"))
        distance = (squares[rows, None] + squares[others] - 2 * x[rows] @ x[others].T).clip(min=0) / x.shape[1]
        limit = np.minimum(DIFFERENCE, CONTRAST * np.minimum(contrast[rows, None], contrast[others]))
        near = np.triu((distance <= limit**2) & (limit > 0), 1)
        found.append(np.sort(order[start + np.argwhere(near)], axis=1))
    return np.unique(np.concatenate(found), axis=0)


def join_copies(keys: Sequence[str], copies: Ints) -> list[str]:
    """`keys` with equal keys for near-copies; `copies` [K, 2] has two positions in `keys` per row."""
    joined = np.array(keys, dtype=object)
    for one, other in copies:
        joined[joined == joined[other]] = joined[one]
    return list(joined)


def read_digests(root: Path, images: Sequence[str], known: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Each image's sha256 ("" if missing), and a dict like `known`: sha256 -> text about the pixels."""
    found = read_contents(root, images, known)
    return [file for file, _, _ in found], {file: pixels for file, pixels, _ in found}


def read_contents(
    root: Path, images: Sequence[str], known: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[str, str, str]]:
    """Read images; returns each file's sha256, a text about its pixels, and why it is unreadable.

    The text is a digest of the pixels, a space, and the look in base64; for an unreadable image,
    it is the sha256. Images whose sha256 has a text in `known` are not decoded again.
    """
    # every thread changes the warning filters of the process and puts back those that it found
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = pool.map(lambda image: _content(root / image, known), images)
        return list(track(rows, "reading images", len(images)))


def _content(path: Path, known: Mapping[str, str]) -> tuple[str, str, str]:
    file = ""
    try:
        data = read_image_bytes(path)
        file = data.digest
        if file in known:
            return file, known[file], ""
        image = decode_image(data)
    except BadImageFile as error:
        return file, file, error.reason
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()
    look = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS).tobytes()
    return file, f"{digest} {base64.b64encode(look).decode()}", ""


def looks_from_texts(pixels: Iterable[str]) -> NDArray[np.uint8]:
    """Looks [N, 192] from the texts that `read_contents` returns; zeros if unreadable."""
    texts = (text.partition(" ")[2] for text in pixels)
    looks = [base64.b64decode(text) or bytes(3 * SIDE**2) for text in texts]
    return np.frombuffer(b"".join(looks), np.uint8).reshape(len(looks), 3 * SIDE**2)


def file_digests(root: Path, images: Sequence[str]) -> list[str]:
    """The sha256 of each image file below `root`; "" for a file that is missing or may not be read."""

    def digest(image: str) -> str:
        path = root / uncropped_path(image)
        try:
            if not (path.is_file() and os.access(path, os.R_OK)):
                return ""
            if uncropped_path(image) == image:
                return sha256(path)
            return read_image_bytes(root / image).digest
        except (OSError, MemoryError) as error:
            raise machine_fault(path, error) or error from error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(track(pool.map(digest, images), "reading images", len(images)))


FRESH = 2 * 10**9  # nanoseconds: a file so young may change again within a tick of the clock


def remembered_digests(root: Path, images: Sequence[str], memory: Path) -> list[str]:
    """`file_digests`, reading only images whose size or time is not the one in the file `memory`.

    `memory` is then brought up to date, unless it cannot be written.
    """
    place = os.path.realpath(root)
    known = _read_memory(memory, place)
    began = time.time_ns()
    states = {image: _file_state(os.path.join(root, uncropped_path(image))) for image in images}
    missing = [image for image, state in states.items() if not state]
    unread = [image for image, state in states.items() if state not in ([], known.get(image, [])[:2])]
    digests = {image: digest for image, (*_, digest) in known.items()} | dict.fromkeys(missing, "")
    if unread:
        digests |= zip(unread, file_digests(root, unread), strict=True)
    seen = {}
    for image, state in states.items():
        if digests[image] and began - state[1] > FRESH:
            seen[image] = [*state, digests[image]]
    if seen != known:
        with suppress(DuplexError):
            write_text(memory, json.dumps({"root": place, "files": seen}))
    return [digests[image] for image in images]


def _file_state(path: str | Path) -> list[Any]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # there is no such file
        return []
    return [status.st_size, status.st_mtime_ns]


def _read_memory(memory: Path, place: str) -> dict[str, list[Any]]:
    record = _parse_memory(memory, *_file_state(memory))
    return record["files"] if record.get("root") == place else {}


@lru_cache(maxsize=2)
def _parse_memory(memory: Path, *state: int) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return record


def changed_images(root: Path, images: Mapping[str, str]) -> list[str]:
    """Paths of the images whose files changed; `images` maps earlier sha256 values to paths."""
    names = list(images.values())
    after = file_digests(root, names)
    return [name for name, before, now in zip(names, images, after, strict=True) if now != before]


def change_error(image: Path) -> DuplexError:
    return DuplexError(f"{image} changed while it was being encoded; run the command again")


def row_keys(values: NDArray[Any]) -> list[str]:
    """One key per row of features [N, d]; equal rows have equal keys."""
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in values]


def join_keys(keys: Sequence[str], others: Sequence[str]) -> list[str]:
    """Merge two lists of keys: images linked by a chain of equal keys in either get equal keys."""
    first = pd.Series(range(len(keys)))  # the first image that is known to be equal to each
    while True:
        joined = first.groupby(list(keys)).transform("min").groupby(list(others)).transform("min")
        if joined.equals(first):
            return [keys[place] for place in first]
        first = joined


@dataclass(frozen=True)
class SplitResult:
    """A split of a data set's rows, and how many of the requested unseen pairs it lacks."""

    split: pd.Series  # train, val or test for each row, in the rows' order
    short: int  # number of requested unseen pairs that are lacking


def split_at_random(frame: pd.DataFrame, options: SplitOptions, place: object = "the data set") -> SplitResult:
    """Split rows at random, whatever their order; `DuplexError` if there are too few pairs."""
    rng = np.random.default_rng(options.seed)
    frame = frame.reset_index(drop=True)
    ordered = frame.sort_values(["state", "object", "image"])
    listed = list(dict.fromkeys(zip(ordered["state"], ordered["object"], strict=True)))
    pairs = _without_new_words(listed, options, rng, place)
    shares = (options.val_unseen, options.test_unseen)
    wanted = [max(1, round(share * len(pairs))) for share in shares]
    order = [pairs[i] for i in rng.permutation(len(pairs))]
    held_out: list[tuple[str, str]] = []
    if len(pairs) <= FEW_PAIRS:  # a word that is left with one pair cannot be told from the pair's other word
        held_out = _hold_out(order, sum(wanted), 2)
    if len(held_out) < sum(wanted):
        held_out = _hold_out(order, sum(wanted))
    if len(held_out) < 2:
        raise DuplexError(
            f"{place} has {len(pairs)} pairs, too few to hold out two (validation, test) and train on every state and "
            "object; add images of more pairs of these states and objects, or give every image a split in a table"
        )
    val_pairs = min(max(1, round(len(held_out) * wanted[0] / sum(wanted))), len(held_out) - 1)
    unseen = {pair: "val" if i < val_pairs else "test" for i, pair in enumerate(held_out)}
    share = wanted[0] / sum(wanted)
    for i, pair in enumerate(_with_new_words(listed, pairs, rng)):
        unseen[pair] = "val" if int((i + 1) * share) > int(i * share) else "test"
    split = pd.Series("train", index=ordered.index, dtype=object)
    rows = ordered.groupby(["state", "object"], sort=True).indices
    seen = [pair for pair in pairs if pair not in unseen]
    for pair, name in unseen.items():
        split.iloc[rows[pair]] = name
    sizes = [(seen[i], len(rows[seen[i]])) for i in rng.permutation(len(seen))]
    for pair, (val, test) in _divide(sizes, options).items():
        mixed = rng.permutation(rows[pair])
        split.iloc[mixed[:val]] = "val"
        split.iloc[mixed[val : val + test]] = "test"
    return SplitResult(split.sort_index(), sum(wanted) - len(held_out))


def split_by_content(
    frame: pd.DataFrame, contents: Sequence[str], options: SplitOptions, place: object = "the data set"
) -> SplitResult:
    """Split rows at random, but keep copies, images with equal `contents`, in the same split.

    Copies with different pairs all go to the split of the unseen pair, or else to training.
    """
    columns = ["state", "object", "image"]
    rows = frame[columns].reset_index(drop=True).assign(content=list(contents)).sort_values(columns)
    firsts = rows.drop_duplicates(["content", "state", "object"])
    result = split_at_random(firsts[columns], options, place)
    key = ["content", "state", "object"]
    split = firsts[key].assign(split=result.split.to_numpy())
    rows = rows.reset_index(names="row").merge(split, on=key).sort_values("row", ignore_index=True)
    counts = split.groupby("content")["split"].nunique()
    for _, same in rows[rows["content"].isin(counts.index[counts > 1])].groupby("content", sort=True):
        _unite(rows, same)
    return SplitResult(rows["split"], result.short)


def _unite(rows: pd.DataFrame, same: pd.DataFrame) -> None:  # rows `same` of equal content, by the column `split`
    pairs = list(zip(rows["state"], rows["object"], strict=True))
    training = Counter(pair for pair, split in zip(pairs, rows["split"], strict=True) if split == "train")
    held_out = {rows["split"][row] for row in same.index if not training[pairs[row]]}
    if len(held_out) > 1:
        return
    wanted = held_out.pop() if held_out else "train"
    leaving = Counter(pairs[row] for row in same.index if rows["split"][row] == "train" != wanted)
    if all(training[pair] > count for pair, count in leaving.items()):
        rows.loc[same.index, "split"] = wanted


def _hold_out(pairs: list[tuple[str, str]], wanted: int, least: int = 1) -> list[tuple[str, str]]:
    # the first ones whose state and object each stay in `least` other pairs that are not held out
    left: dict[tuple[str, str], int] = {}  # (state or object, name) -> pairs that remain
    for state, thing in pairs:
        for key in (("state", state), ("object", thing)):
            left[key] = left.get(key, 0) + 1
    held_out: list[tuple[str, str]] = []
    for state, thing in pairs:
        keys = (("state", state), ("object", thing))
        if len(held_out) < wanted and all(left[key] > least for key in keys):
            held_out.append((state, thing))
            for key in keys:
                left[key] -= 1
    return held_out


def _without_new_words(
    pairs: list[tuple[str, str]], options: SplitOptions, rng: np.random.Generator, place: object
) -> list[tuple[str, str]]:
    # the pairs without the chosen words, in which all other words remain
    shares = {"states": options.unseen_states, "objects": options.unseen_objects}
    for kind, (noun, share) in enumerate(shares.items()):
        words = list(dict.fromkeys(pair[kind] for pair in pairs))
        wanted = max(1, round(share * len(words))) if share else 0
        for word in rng.permutation(words) if wanted else ():
            rest = [pair for pair in pairs if pair[kind] != word]
            others = {pair[1 - kind] for pair in pairs}
            if wanted and others == {pair[1 - kind] for pair in rest}:
                pairs = rest
                wanted -= 1
        if wanted:
            raise DuplexError(
                f"{place}: unseen_{noun} is {share:g}, but holding out so many of its {len(words)} {noun} would leave "
                f"some {('objects', 'states')[kind]} without training images; lower unseen_{noun}"
            )
    return pairs


def _with_new_words(
    pairs: list[tuple[str, str]], others: list[tuple[str, str]], rng: np.random.Generator
) -> list[tuple[str, str]]:
    # the pairs not among `others`: shuffled, those with a new state first, then a new object, then both
    states = {state for state, _ in others}
    objects = {thing for _, thing in others}
    new = [pair for pair in pairs if pair[0] not in states or pair[1] not in objects]
    shuffled = [new[i] for i in rng.permutation(len(new))]
    return sorted(shuffled, key=lambda pair: (pair[1] not in objects, pair[0] not in states))


def _divide(sizes: list[tuple[tuple[str, str], int]], options: SplitOptions) -> dict[tuple[str, str], tuple[int, int]]:
    # Pair and images -> images in val and in test. At least one image of each pair stays in training. Fractions of an
    # image are carried to the next pair, so that the shares also hold for pairs with few images.
    owed = {"val": 1.0, "test": 1.0}  # 1: the first pair with enough images gives one to each
    shares = {"val": options.val_images, "test": options.test_images}
    counts = {}
    for pair, images in sizes:
        spare = images - 1
        gift = {}
        for name in ("val", "test"):
            owed[name] += shares[name] * images
            gift[name] = min(int(owed[name]), spare)
            owed[name] = min(owed[name] - gift[name], 1.0)
            spare -= gift[name]
        counts[pair] = (gift["val"], gift["test"])
    return counts
