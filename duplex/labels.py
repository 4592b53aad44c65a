"""States, objects and their compositions as integers.

A composition `c = (s_m, o_n)` is the number `m * N + n`, so that state and object of any array of compositions
are one division away and no table of all `M * N` pairs is ever built from Python objects. States and objects are
separate name spaces: a word may be both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError, require
from duplex.system.files import write_text

SPLITS = ("train", "val", "test")
World = Literal["closed", "open"]
GROUPS = ("head", "medium", "tail", "unseen")  # compositions by how often they are trained on
HEAD, HEAD_AND_MEDIUM = 0.2, 0.5
MOST = 1 << 30  # pairs: a mark for each of them is a gigabyte
MARKS = 1 << 10  # to a composition that occurs: beyond it, sorting those that do is the sooner done
WORLDS: tuple[World, ...] = ("closed", "open")
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def prompt_name(label: str) -> str:
    """The text of a label in a prompt: `Faux.Fur` -> `faux fur`. The label's key stays the raw name."""
    return " ".join(label.replace(".", " ").replace("_", " ").lower().split())


@dataclass(frozen=True, eq=False)
class LabelSpace:
    """`M` states, `N` objects and the compositions that each split lists."""

    states: tuple[str, ...]
    objects: tuple[str, ...]
    pairs: Mapping[str, Ints]  # split -> sorted compositions it lists; "train" lists the seen ones
    _state_index: dict[str, int] = field(init=False, repr=False)
    _object_index: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for kind, names in (("state", self.states), ("object", self.objects)):
            if not names:
                raise DuplexError(f"the data set has no {kind}s")
            if len(set(names)) != len(names):
                raise DuplexError(f"a {kind} is listed twice")
        if self.size > MOST:
            raise DuplexError(f"{len(self.states)} states and {len(self.objects)} objects make {self.size:,} pairs")
        for split, pairs in self.pairs.items():
            require(split, SPLITS, "split")
            if pairs.size and not (pairs[0] >= 0 and pairs[-1] < self.size):
                raise DuplexError(f"{split} lists a composition outside of {self.size}")
            if not (pairs[1:] > pairs[:-1]).all():
                raise DuplexError(f"{split} does not list its compositions once each, in rising order")
        empty = np.empty(0, dtype=np.int64)
        object.__setattr__(self, "pairs", {split: self.pairs.get(split, empty) for split in SPLITS})
        object.__setattr__(self, "_state_index", {name: m for m, name in enumerate(self.states)})
        object.__setattr__(self, "_object_index", {name: n for n, name in enumerate(self.objects)})

    @classmethod
    def from_pairs(cls, pairs: Mapping[str, Iterable[tuple[str, str]]]) -> LabelSpace:
        """Build from named (state, object) pairs of each split; the primitives are all that occur, sorted."""
        columns = {split: tuple(zip(*pairs.get(split, ()), strict=True)) or ((), ()) for split in SPLITS}
        states = sorted(set().union(*(column[0] for column in columns.values())))
        objects = sorted(set().union(*(column[1] for column in columns.values())))
        state_index, object_index = ({name: i for i, name in enumerate(names)} for names in (states, objects))
        rows = {
            split: _distinct(
                _look_up(state_index, s, "state") * len(objects) + _look_up(object_index, o, "object"),
                size=len(states) * len(objects),
            )
            for split, (s, o) in columns.items()
        }
        return cls(tuple(states), tuple(objects), rows)

    # -- sizes and index arithmetic ---------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """`M * N`, the number of compositions that exist."""
        return len(self.states) * len(self.objects)

    def state_of(self, compositions: Ints) -> Ints:
        return compositions // len(self.objects)

    def object_of(self, compositions: Ints) -> Ints:
        return compositions % len(self.objects)

    def composition(self, states: Ints, objects: Ints) -> Ints:
        return states * len(self.objects) + objects

    def index(self, states: Sequence[str], objects: Sequence[str]) -> Ints:
        """Compositions of two columns of names."""
        return self.composition(
            _look_up(self._state_index, states, "state"), _look_up(self._object_index, objects, "object")
        )

    def name(self, composition: int) -> str:
        """`striped heart`: what a person reads and a prompt says."""
        n = len(self.objects)
        return f"{prompt_name(self.states[composition // n])} {prompt_name(self.objects[composition % n])}"

    def names(self, compositions: Ints) -> list[str]:
        """`name` of an array of compositions; each primitive's text is made once."""
        states, objects = ([prompt_name(label) for label in labels] for labels in (self.states, self.objects))
        rows = zip(self.state_of(compositions).tolist(), self.object_of(compositions).tolist(), strict=True)
        return [f"{states[m]} {objects[n]}" for m, n in rows]

    # -- sets of compositions -----------------------------------------------------------------------------------

    @property
    def seen(self) -> Bools:
        """[M*N] True where a composition labels training images."""
        mask = np.zeros(self.size, dtype=bool)
        mask[self.pairs["train"]] = True
        return mask

    def is_seen(self, compositions: Ints) -> Bools:
        """[C] `seen` of some compositions, without a mark for every other."""
        return contains_sorted(self.pairs["train"], compositions)

    def target(self, world: str, split: str) -> Ints:
        """`C_tgt`, sorted. Closed world: the seen pairs and those that `split` lists; `train` stands for all that
        any split lists, which is what refinement may touch. Open world: all `M * N`."""
        require(world, WORLDS, "world")
        require(split, SPLITS, "split")
        if world == "open":
            return np.arange(self.size, dtype=np.int64)
        splits = SPLITS if split == "train" else ("train", split)
        return _distinct(np.concatenate([self.pairs[name] for name in splits]), self.size)

    # -- on disk ----------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LabelSpace) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.states, self.objects))

    def to_dict(self) -> dict[str, Any]:
        return {
            "states": list(self.states),
            "objects": list(self.objects),
            "pairs": {split: rows.tolist() for split, rows in self.pairs.items()},
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> LabelSpace:
        for kind in ("states", "objects"):
            if not (isinstance(record[kind], list) and all(isinstance(name, str) for name in record[kind])):
                raise TypeError(f"{kind} is not a list of names")
        for split, rows in record["pairs"].items():
            if not (isinstance(rows, list) and all(type(row) is int for row in rows)):
                raise TypeError(f"the pairs of {split} are not a list of whole numbers")
        pairs = {split: np.array(rows, dtype=np.int64) for split, rows in record["pairs"].items()}
        return cls(tuple(record["states"]), tuple(record["objects"]), pairs)

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> LabelSpace:
        command = f"duplex prepare --dataset {path.parent.name}"
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise DuplexError(f"{path} does not exist; `{command}` writes it") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise DuplexError(f"{path} is not a label file ({error}); `{command}` writes it again") from error


def _look_up(index: Mapping[str, int], names: Iterable[str], kind: str) -> Ints:
    """Indices of a column of names, in one pass over a hash table."""
    try:
        return np.fromiter(map(index.__getitem__, names), dtype=np.int64)
    except KeyError as error:
        raise DuplexError(f"{kind} {error.args[0]!r} is not among the data set's {len(index)} {kind}s") from error


@dataclass(frozen=True)
class Target:
    """`C_tgt` without a list of what has none: `listed` compositions, rising, or all `size` of them."""

    size: int
    listed: Ints | None

    @classmethod
    def of(cls, labels: LabelSpace, world: str, split: str) -> Target:
        return cls(labels.size, None if world == "open" else labels.target(world, split))

    def __len__(self) -> int:
        return self.size if self.listed is None else len(self.listed)

    @property
    def columns(self) -> Ints:
        """[C] All that belong to it, listed."""
        return np.arange(self.size, dtype=np.int64) if self.listed is None else self.listed

    def at(self, columns: Ints) -> Ints:
        """The compositions of some columns."""
        return columns if self.listed is None else self.listed[columns]

    def holds(self, compositions: Ints) -> Bools:
        """[...] Which of some compositions belong to it."""
        every = np.ones(compositions.shape, dtype=bool)
        return every if self.listed is None else contains_sorted(self.listed, compositions)

    def places(self, compositions: Ints) -> Ints:
        """Columns of compositions that belong to it."""
        return compositions if self.listed is None else np.searchsorted(self.listed, compositions)


def contains_sorted(listed: Ints, compositions: Ints) -> Bools:
    """[...] Which of some compositions a rising list holds."""
    if not len(listed):
        return np.zeros(compositions.shape, dtype=bool)
    found: Bools = listed[np.searchsorted(listed, compositions).clip(max=len(listed) - 1)] == compositions
    return found


def _distinct(compositions: Ints, size: int) -> Ints:
    """Sorted, each once: marking beats sorting where all that can occur is a short range."""
    if size > MARKS * max(1, len(compositions)):
        return np.unique(compositions)
    mask = np.zeros(size, dtype=bool)
    mask[compositions] = True
    return np.flatnonzero(mask)


@dataclass(frozen=True)
class FrequencyGroups:
    """How often compositions are trained on, as indices into `GROUPS`; only those that are have a mark."""

    size: int  # of the label space
    seen: Ints  # rising [K]
    group: Ints  # of each of them [K]

    def of(self, compositions: Ints) -> Ints:
        """[...] The groups of some compositions."""
        unseen = np.full(compositions.shape, GROUPS.index("unseen"), dtype=np.int64)
        mine = contains_sorted(self.seen, compositions)
        unseen[mine] = self.group[np.searchsorted(self.seen, compositions[mine])]
        return unseen

    @property
    def sizes(self) -> Ints:
        """Compositions of each group."""
        found = np.bincount(self.group, minlength=len(GROUPS))
        found[GROUPS.index("unseen")] += self.size - len(self.seen)
        return found


def frequency_groups(train: Ints, size: int) -> FrequencyGroups:
    """Of all `size` compositions, from those of the training images: head is the most frequent 20 % of the seen ones,
    medium the next 30 %, tail the last 50 % (the paper's appendix).

    Among equal counts the lower composition is the more frequent one, so that the groups are always the same.
    """
    seen, counts = np.unique(train, return_counts=True)
    group = np.empty(len(seen), dtype=np.int64)
    cuts = [0, round(HEAD * len(seen)), round(HEAD_AND_MEDIUM * len(seen)), len(seen)]
    ranked = np.argsort(-counts, kind="stable")
    for number, (first, last) in enumerate(pairwise(cuts)):
        group[ranked[first:last]] = number
    return FrequencyGroups(size, seen, group)
