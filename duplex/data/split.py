"""A compositional split for data that comes without one.

Some pairs are held out as unseen, half of the question; images of the pairs that stay are divided as well, so that
validation and test also ask about seen pairs. Every state and every object stays in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from duplex.data.split_options import SplitOptions
from duplex.errors import DuplexError


@dataclass(frozen=True)
class MadeSplit:
    split: pd.Series  # of each row, in the rows' order
    short: int  # unseen pairs fewer than asked for


def make_split(frame: pd.DataFrame, options: SplitOptions, place: object = "the data set") -> MadeSplit:
    """Split rows of (image, state, object). The same rows in any order, with the same seed, are split the same."""
    rng = np.random.default_rng(options.seed)
    frame = frame.reset_index(drop=True)
    ordered = frame.sort_values(["state", "object", "image"])
    pairs = list(dict.fromkeys(zip(ordered["state"], ordered["object"], strict=True)))
    wanted = [max(1, round(share * len(pairs))) for share in (options.val_unseen, options.test_unseen)]
    held = _hold_out([pairs[i] for i in rng.permutation(len(pairs))], sum(wanted))
    if len(held) < 2:
        raise DuplexError(
            f"{place}: no two of its {len(pairs)} pairs can be held out with every state and object still in training; "
            "add pairs that share states and objects, or give each row a split"
        )
    val_pairs = min(max(1, round(len(held) * wanted[0] / sum(wanted))), len(held) - 1)
    unseen = {pair: "val" if i < val_pairs else "test" for i, pair in enumerate(held)}

    split = pd.Series("train", index=ordered.index, dtype=object)
    rows = ordered.groupby(["state", "object"], sort=True).indices
    seen = [pair for pair in pairs if pair not in unseen]
    for pair, name in unseen.items():
        split.iloc[rows[pair]] = name
    for pair, (val, test) in _divide([(pair, len(rows[pair])) for pair in _shuffled(seen, rng)], options).items():
        mixed = rng.permutation(rows[pair])
        split.iloc[mixed[:val]] = "val"
        split.iloc[mixed[val : val + test]] = "test"
    return MadeSplit(split.sort_index(), sum(wanted) - len(held))


def _hold_out(pairs: list[tuple[str, str]], wanted: int) -> list[tuple[str, str]]:
    """The first `wanted` pairs whose state and object both remain in some other pair."""
    left: dict[tuple[str, str], int] = {}
    for state, thing in pairs:
        for key in (("state", state), ("object", thing)):
            left[key] = left.get(key, 0) + 1
    held: list[tuple[str, str]] = []
    for state, thing in pairs:
        keys = (("state", state), ("object", thing))
        if len(held) < wanted and all(left[key] > 1 for key in keys):
            held.append((state, thing))
            for key in keys:
                left[key] -= 1
    return held


def _divide(sizes: list[tuple[tuple[str, str], int]], options: SplitOptions) -> dict[tuple[str, str], tuple[int, int]]:
    """How many images of each seen pair go to val and test. A part of an image is carried to the next pair, so that
    the shares hold over small pairs too; each pair keeps one image in training."""
    owed = {"val": 1.0, "test": 1.0}  # the first pair with images to spare gives one to each
    shares = {"val": options.val_images, "test": options.test_images}
    given = {}
    for pair, images in sizes:
        spare, gift = images - 1, {}
        for name in ("val", "test"):
            owed[name] += shares[name] * images
            gift[name] = min(int(owed[name]), spare)
            owed[name] = min(owed[name] - gift[name], 1.0)
            spare -= gift[name]
        given[pair] = (gift["val"], gift["test"])
    return given


def _shuffled(pairs: list[tuple[str, str]], rng: np.random.Generator) -> list[tuple[str, str]]:
    return [pairs[i] for i in rng.permutation(len(pairs))]
