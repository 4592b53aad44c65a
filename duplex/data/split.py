"""Make random compositional splits (train, val and test) of data sets that have none.

Some pairs are held out as unseen; images of the other pairs are divided as well, so that validation and test have seen
and unseen pairs. Every state and every object stays in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from duplex.data.source_options import SplitOptions
from duplex.errors import DuplexError


@dataclass(frozen=True)
class SplitResult:
    """The split (train, val or test) of each row of a data set, and how many of the wanted unseen pairs it lacks."""

    split: pd.Series  # train, val or test for each row, in the rows' order
    short: int  # number of unseen pairs below the requested one


def make_split(frame: pd.DataFrame, options: SplitOptions, place: object = "the data set") -> SplitResult:
    """Assign rows of (image, state, object) to train, val and test at random.

    The result depends on the seed and not on the order of the rows. Raise DuplexError if fewer than two pairs can be
    held out.
    """
    rng = np.random.default_rng(options.seed)
    frame = frame.reset_index(drop=True)
    ordered = frame.sort_values(["state", "object", "image"])
    pairs = list(dict.fromkeys(zip(ordered["state"], ordered["object"], strict=True)))
    wanted = [max(1, round(share * len(pairs))) for share in (options.val_unseen, options.test_unseen)]
    held_out = _hold_out([pairs[i] for i in rng.permutation(len(pairs))], sum(wanted))
    if len(held_out) < 2:
        raise DuplexError(
            f"{place}: no two of its {len(pairs)} pairs can be held out with every state and object still in training; "
            "add pairs that share states and objects, or give each row a split"
        )
    val_pairs = min(max(1, round(len(held_out) * wanted[0] / sum(wanted))), len(held_out) - 1)
    unseen = {pair: "val" if i < val_pairs else "test" for i, pair in enumerate(held_out)}

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
    """Assign rows to train, val and test like `make_split`, but keep images of equal content in one split.

    Images of equal content that are labelled with different pairs go to the split of the held-out pair, or else to
    training. They stay apart if a seen pair would lose its last training image, or if two of the pairs are held out for
    different splits; `duplex data check` reports such images.

    Args:
        contents: key of each row's image, equal for images of equal content. If all keys differ, the result is that of
            `make_split`.
    """
    columns = ["state", "object", "image"]
    rows = frame[columns].reset_index(drop=True).assign(content=list(contents)).sort_values(columns)
    firsts = rows.drop_duplicates(["content", "state", "object"])
    result = make_split(firsts[columns], options, place)
    key = ["content", "state", "object"]
    split = firsts[key].assign(split=result.split.to_numpy())
    rows = rows.reset_index(names="row").merge(split, on=key).sort_values("row", ignore_index=True)
    for _, same in rows[rows["content"].isin(_in_two_splits(split))].groupby("content", sort=True):
        _unite(rows, same)
    return SplitResult(rows["split"], result.short)


def _in_two_splits(rows: pd.DataFrame) -> list[str]:
    counts = rows.groupby("content")["split"].nunique()
    return list(counts.index[counts > 1])


def _unite(rows: pd.DataFrame, same: pd.DataFrame) -> None:
    """Move images of equal content to one split, by changing the column `split` of `rows`.

    Nothing is moved if a seen pair would lose its last training image, or if two pairs of these images are held out for
    different splits.

    same: the rows of these images.
    """
    pairs = list(zip(rows["state"], rows["object"], strict=True))
    training = Counter(pair for pair, split in zip(pairs, rows["split"], strict=True) if split == "train")
    held_out = {rows["split"][row] for row in same.index if not training[pairs[row]]}
    if len(held_out) > 1:
        return
    wanted = held_out.pop() if held_out else "train"
    leaving = Counter(pairs[row] for row in same.index if rows["split"][row] == "train" != wanted)
    if all(training[pair] > count for pair, count in leaving.items()):
        rows.loc[same.index, "split"] = wanted


def _hold_out(pairs: list[tuple[str, str]], wanted: int) -> list[tuple[str, str]]:
    """Up to `wanted` pairs to hold out as unseen, the first ones of `pairs` that may be held out.

    A pair may be held out if its state and its object each stay in another pair that is not held out.
    """
    left: dict[tuple[str, str], int] = {}  # (state or object, name) -> pairs that remain
    for state, thing in pairs:
        for key in (("state", state), ("object", thing)):
            left[key] = left.get(key, 0) + 1
    held_out: list[tuple[str, str]] = []
    for state, thing in pairs:
        keys = (("state", state), ("object", thing))
        if len(held_out) < wanted and all(left[key] > 1 for key in keys):
            held_out.append((state, thing))
            for key in keys:
                left[key] -= 1
    return held_out


def _divide(sizes: list[tuple[tuple[str, str], int]], options: SplitOptions) -> dict[tuple[str, str], tuple[int, int]]:
    """How many images of each seen pair go to validation and to test: pair -> (number in val, number in test).

    At least one image of each pair stays in training. Fractions of an image are carried to the next pair, so that the
    shares also hold for pairs with few images.

    sizes: (pair, number of images) of each seen pair.
    """
    owed = {"val": 1.0, "test": 1.0}  # 1: the first pair with enough images gives one to each
    shares = {"val": options.val_images, "test": options.test_images}
    counts = {}
    for pair, images in sizes:
        spare, gift = images - 1, {}
        for name in ("val", "test"):
            owed[name] += shares[name] * images
            gift[name] = min(int(owed[name]), spare)
            owed[name] = min(owed[name] - gift[name], 1.0)
            spare -= gift[name]
        counts[pair] = (gift["val"], gift["test"])
    return counts
