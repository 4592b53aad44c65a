"""States, objects and their compositions (state-object pairs) as integers.

A composition `c = (s_m, o_n)` is the number `m * N + n` (`N` objects), so one division gives the
states and objects of an array of compositions. States and objects are separate name spaces: a word
may be both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from duplex.errors import DuplexError, UsageError, require, require_whole, shown
from duplex.system.files import write_text

SPLITS = ("train", "val", "test")
World = Literal["closed", "open"]
GROUPS = ("head", "medium", "tail", "unseen")  # of compositions by training frequency
HEAD = 0.2  # share of the seen compositions
HEAD_AND_MEDIUM = 0.5
MAX_PAIRS = 1 << 30  # a mask over them takes a gigabyte
WORLDS: tuple[World, ...] = ("closed", "open")
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def prompt_name(label: str) -> str:
    """A state's or object's name as prompts write it: `Faux.Fur` -> `faux fur`."""
    return " ".join(label.replace(".", " ").replace("_", " ").lower().split())


@dataclass(frozen=True, eq=False)
class LabelSpace:
    """Labels of a data set: `M` states, `N` objects, and the compositions of each split."""

    states: tuple[str, ...]
    objects: tuple[str, ...]
    pairs: Mapping[str, Ints]  # split -> its compositions, sorted; "train": seen ones
    _state_index: dict[str, int] = field(init=False, repr=False)
    _object_index: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for kind, names in (("state", self.states), ("object", self.objects)):
            if not names:
                raise DuplexError(f"the data set has no {kind}s; at least one is needed")
            if len(set(names)) != len(names):
                raise DuplexError(f"the {kind} {max(names, key=names.count)!r} is listed twice; list it once")
        if self.size > MAX_PAIRS:
            raise DuplexError(
                f"{len(self.states)} states and {len(self.objects)} objects make {self.size:,} pairs; "
                f"expected at most {MAX_PAIRS:,}"
            )
        checked = dict.fromkeys(SPLITS, np.empty(0, dtype=np.int64))
        for split, pairs in self.pairs.items():
            listed = checked_numbers(pairs, self.size, f"the pairs of {require(split, SPLITS, 'split')}")
            if listed.ndim != 1 or not (listed[1:] > listed[:-1]).all():
                raise UsageError(f"the compositions of {split!r} must be ascending and distinct; use numpy.unique")
            checked[split] = listed
        object.__setattr__(self, "pairs", checked)
        object.__setattr__(self, "_state_index", {name: m for m, name in enumerate(self.states)})
        object.__setattr__(self, "_object_index", {name: n for n, name in enumerate(self.objects)})

    @classmethod
    def from_pairs(cls, pairs: Mapping[str, Iterable[tuple[str, str]]]) -> LabelSpace:
        """Make a label space from `pairs`, the (state, object) names of each split (train, val, test); sorts names."""
        listed = {require(split, SPLITS, "split"): list(rows) for split, rows in pairs.items()}
        columns = {split: tuple(zip(*listed.get(split, ()), strict=True)) or ((), ()) for split in SPLITS}
        states = sorted(set().union(*(column[0] for column in columns.values())))
        objects = sorted(set().union(*(column[1] for column in columns.values())))
        labels = cls(tuple(states), tuple(objects), {})
        return replace(labels, pairs={split: np.unique(labels.index(*names)) for split, names in columns.items()})

    @property
    def size(self) -> int:
        """Number of all compositions: states times objects."""
        return len(self.states) * len(self.objects)

    def state_of(self, compositions: ArrayLike) -> Ints:
        """The index of the state of each composition in `compositions`."""
        return checked_numbers(compositions, self.size, "compositions") // len(self.objects)

    def object_of(self, compositions: ArrayLike) -> Ints:
        """The index of the object of each composition in `compositions`."""
        return checked_numbers(compositions, self.size, "compositions") % len(self.objects)

    def composition(self, states: ArrayLike, objects: ArrayLike) -> Ints:
        """Composition numbers `m * N + n` from indices of states (m) and of objects (n, out of N)."""
        m = checked_numbers(states, len(self.states), "states")
        n = checked_numbers(objects, len(self.objects), "objects")
        return m * len(self.objects) + n

    def index(self, states: Sequence[str], objects: Sequence[str]) -> Ints:
        """Composition numbers [n] of the state names `states` and the object names `objects`."""
        m, n = _look_up(self._state_index, states, "state"), _look_up(self._object_index, objects, "object")
        if len(m) != len(n):
            raise UsageError(f"states ({len(m)}) and objects ({len(n)}) differ in number; give the same number of both")
        return m * len(self.objects) + n

    def partial_index(self, states: Sequence[str], objects: Sequence[str]) -> Ints:
        """Like `index`, but a name in `states` or `objects` may be "": -1 - m is state m, -1 - M - n object n alone."""
        columns = []
        for index, names, kind in ((self._state_index, states, "state"), (self._object_index, objects, "object")):
            column = np.full(len(names), -1, dtype=np.int64)
            column[[name != "" for name in names]] = _look_up(index, filter(None, names), kind)
            columns.append(column)
        m, n = columns
        alone = np.where(n < 0, -1 - m, -1 - len(self.states) - n)
        return np.where((m < 0) | (n < 0), alone, m * len(self.objects) + n)

    def name(self, composition: int) -> str:
        """The name of a `composition` in prompts and lists, such as `striped heart`."""
        m, n = divmod(require_whole(composition, "composition", 0, self.size - 1), len(self.objects))
        return f"{prompt_name(self.states[m])} {prompt_name(self.objects[n])}"

    def names(self, compositions: ArrayLike) -> list[str]:
        """The names of `compositions` [C] in prompts and lists, such as `striped heart`."""
        listed = checked_numbers(compositions, self.size, "compositions")
        states = [prompt_name(label) for label in self.states]
        objects = [prompt_name(label) for label in self.objects]
        m, n = np.divmod(listed, len(self.objects))
        return [f"{states[i]} {objects[j]}" for i, j in zip(m.tolist(), n.tolist(), strict=True)]

    @property
    def seen(self) -> Bools:
        """Mask [M*N] of the seen compositions, which have training images."""
        mask = np.zeros(self.size, dtype=bool)
        mask[self.pairs["train"]] = True
        return mask

    def is_seen(self, compositions: ArrayLike) -> Bools:
        """Mask [C]: whether each of the `compositions` [C] is seen, that is, has training images."""
        return contains_sorted(self.pairs["train"], checked_numbers(compositions, self.size, "compositions"))

    @property
    def trained_words(self) -> tuple[Bools, Bools]:
        """Two masks: the states [M] and the objects [N] that occur in seen compositions."""
        train = self.pairs["train"]
        states = np.isin(np.arange(len(self.states)), train // len(self.objects))
        return states, np.isin(np.arange(len(self.objects)), train % len(self.objects))

    def candidates(self, world: str, split: str) -> Ints:
        """The sorted compositions that an answer is chosen from (the Duplex paper's `C_tgt`).

        In the open world, all. In the closed world, the seen ones and those of `split`; for
        "train", those of all splits, because training may update all of their prototypes.
        """
        require(world, WORLDS, "world")
        require(split, SPLITS, "split")
        if world == "open":
            return np.arange(self.size, dtype=np.int64)
        splits = SPLITS if split == "train" else ("train", split)
        return np.unique(np.concatenate([self.pairs[name] for name in splits]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LabelSpace) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.states, self.objects))

    def to_dict(self) -> dict[str, Any]:
        """Names and each split's composition numbers, as a dict that JSON can store."""
        pairs = {split: rows.tolist() for split, rows in self.pairs.items()}
        return {"states": list(self.states), "objects": list(self.objects), "pairs": pairs}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> LabelSpace:
        """Make a label space from `record`, a result of `to_dict`."""
        pairs = {split: np.array(rows, dtype=np.int64) for split, rows in record["pairs"].items()}
        return cls(tuple(record["states"]), tuple(record["objects"]), pairs)

    def save(self, path: Path | str) -> None:
        """Write the label space to the JSON file `path`."""
        write_text(Path(path), json.dumps(self.to_dict(), ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> LabelSpace:
        """Read a label space from the JSON file `path` that `save` wrote; raises DuplexError if that fails."""
        path = Path(path)
        command = f"duplex prepare --dataset {path.parent.name}"
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise DuplexError(f"{path} does not exist; `{command}` writes it") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, DuplexError) as error:
            raise DuplexError(f"{path} is not a label file ({error}); `{command}` writes it again") from error


def _look_up(index: Mapping[str, int], names: Iterable[str], kind: str) -> Ints:
    try:
        return np.fromiter(map(index.__getitem__, names), dtype=np.int64)
    except KeyError as error:
        raise DuplexError(f"there is no {kind} {error}; use one of the {len(index)} in `LabelSpace.{kind}s`") from error


def checked_numbers(values: ArrayLike, size: int, noun: str) -> Ints:
    """`values` as int64; UsageError, with `noun`, unless all are integers from 0 to `size - 1`."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= size):
        raise UsageError(f"indices of {noun} must be integers from 0 to {size - 1}; correct others in {shown(values)}")
    return array.astype(np.int64, copy=False)


@dataclass(frozen=True)
class CandidateSet:
    """The compositions that an answer is chosen from: sorted; `listed` is None for all `size`."""

    size: int
    listed: Ints | None

    @classmethod
    def of(cls, labels: LabelSpace, world: str, split: str) -> CandidateSet:
        return cls(labels.size, None if world == "open" else labels.candidates(world, split))

    def __len__(self) -> int:
        return self.size if self.listed is None else len(self.listed)

    @property
    def compositions(self) -> Ints:
        return np.arange(self.size, dtype=np.int64) if self.listed is None else self.listed

    def at(self, positions: Ints) -> Ints:
        """The composition numbers of the candidates at `positions` in the sorted list."""
        return positions if self.listed is None else self.listed[positions]

    def contains(self, compositions: Ints) -> Bools:
        """Mask [n]: whether each of the `compositions` [n] is a candidate."""
        if self.listed is None:
            return np.ones_like(compositions, bool)
        return contains_sorted(self.listed, compositions)

    def positions(self, compositions: Ints) -> Ints:
        """Positions of `compositions`, all of them candidates, in the sorted list."""
        return compositions if self.listed is None else np.searchsorted(self.listed, compositions)


def contains_sorted(listed: Ints, compositions: Ints) -> Bools:
    """Mask [n]: whether each of the `compositions` [n] is in the sorted array `listed`."""
    if not len(listed):
        return np.zeros(compositions.shape, dtype=bool)
    return np.asarray(listed[np.searchsorted(listed, compositions).clip(max=len(listed) - 1)] == compositions)


@dataclass(frozen=True)
class FrequencyGroups:
    """Frequency groups: composition `seen[i]` is in `GROUPS[group[i]]`, all others in "unseen"."""

    size: int  # number of all compositions
    seen: Ints  # [K] seen compositions, sorted
    group: Ints  # [K] their groups

    def groups_of(self, compositions: Ints) -> Ints:
        groups = np.full(compositions.shape, GROUPS.index("unseen"), dtype=np.int64)
        is_seen = contains_sorted(self.seen, compositions)
        groups[is_seen] = self.group[np.searchsorted(self.seen, compositions[is_seen])]
        return groups

    @property
    def sizes(self) -> Ints:
        """Number of compositions in each group of `GROUPS`: head, medium, tail and unseen."""
        sizes = np.bincount(self.group, minlength=len(GROUPS))
        sizes[GROUPS.index("unseen")] += self.size - len(self.seen)
        return sizes


def frequency_groups(train: Ints, size: int) -> FrequencyGroups:
    """Divide `size` compositions into frequency groups by counts in `train`, of training images.

    Of the seen ones, head is the most frequent 20 %, medium the next 30 %, tail the rest (appendix
    of the Duplex paper). Of equally frequent ones, the one with the lower number ranks first.
    """
    seen, counts = np.unique(train, return_counts=True)
    group = np.empty(len(seen), dtype=np.int64)
    cuts = [0, round(HEAD * len(seen)), round(HEAD_AND_MEDIUM * len(seen)), len(seen)]
    ranked = np.argsort(-counts, kind="stable")
    for number, (first, last) in enumerate(pairwise(cuts)):
        group[ranked[first:last]] = number
    return FrequencyGroups(size, seen, group)
