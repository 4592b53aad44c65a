"""The pair lists of a benchmark: one file per split with one `state object` per line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from duplex.data.names import check_labels
from duplex.data.text_files import read_lines
from duplex.errors import DuplexError
from duplex.labels import SPLITS, LabelSpace

FOLDER = "compositional-split-natural"
Pair = tuple[str, str]


@dataclass(frozen=True)
class PairLists:
    """The pair lists of all splits."""

    pairs: dict[str, list[Pair]]  # split -> its pairs without repeats
    repeats: int  # lines that repeat a pair of their own list

    def labels(self) -> LabelSpace:
        return LabelSpace.from_pairs(self.pairs)


def has_pair_lists(root: Path) -> bool:
    return (_folder(root) / "train_pairs.txt").is_file()


def read_pair_lists(root: Path) -> PairLists:
    """Read the three lists in `root`, or in its folder `compositional-split-natural`."""
    lists = {split: read_pair_list(_folder(root) / f"{split}_pairs.txt") for split in SPLITS}
    pairs = {split: list(dict.fromkeys(listed)) for split, listed in lists.items()}
    return PairLists(pairs, sum(len(lists[split]) - len(pairs[split]) for split in SPLITS))


def read_pair_list(path: Path) -> list[Pair]:
    """Return the (state, object) of every line that is not blank; raise DuplexError for a line without two words."""
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
