"""Label spaces: real sizes, index arithmetic, candidates and frequency groups."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError
from duplex.labels import SPLITS, CandidateSet, LabelSpace, frequency_groups, prompt_name
from tests.methods.world import random_labels

WORDS = st.sampled_from(["red", "Faux.Fur", "orange", "wet", "é", "Boots.Mid-Calf", "old_x"])
PAIRS = st.lists(st.tuples(WORDS, WORDS), max_size=20)
LISTS = st.fixed_dictionaries({"train": PAIRS.filter(bool), "val": PAIRS, "test": PAIRS})


def _pair(labels: LabelSpace, composition: int) -> tuple[str, str]:
    m, n = divmod(composition, len(labels.objects))
    return labels.states[m], labels.objects[n]


@settings(max_examples=60, deadline=None)
@given(LISTS)
def test_index_arithmetic_agrees_with_names(lists: dict[str, list[tuple[str, str]]]) -> None:
    labels = LabelSpace.from_pairs(lists)
    assert LabelSpace.from_dict(labels.to_dict()) == labels
    for split in SPLITS:
        assert [_pair(labels, c) for c in labels.pairs[split].tolist()] == sorted(set(lists[split]))
    every = list(itertools.product(labels.states, labels.objects))
    found = labels.index(*zip(*every, strict=True))
    assert found.tolist() == list(range(labels.size))
    assert labels.names(found) == [labels.name(c) for c in range(labels.size)]
    assert labels.composition(labels.state_of(found), labels.object_of(found)).tolist() == found.tolist()
    assert {_pair(labels, c) for c in np.flatnonzero(labels.seen).tolist()} == set(lists["train"])
    for split in ("val", "test"):
        closed = [_pair(labels, c) for c in labels.candidates("closed", split).tolist()]
        assert closed == sorted(set(lists["train"]) | set(lists[split]))


def test_a_word_may_be_state_and_object_and_prompts_use_plain_text() -> None:
    labels = LabelSpace.from_pairs({"train": [("orange", "orange"), ("orange", "car"), ("wet", "orange")]})
    assert labels.index(["orange"], ["orange"]).tolist() == [1]
    assert (labels.states, labels.objects) == (("orange", "wet"), ("car", "orange"))
    raw = LabelSpace.from_pairs({"train": [("Faux.Fur", "Boots.Mid-Calf")]})
    assert (raw.states, raw.name(0), prompt_name("A__b. C")) == (("Faux.Fur",), "faux fur boots mid-calf", "a b c")


def test_unknown_names_and_broken_files_are_refused(tmp_path: Path) -> None:
    labels = LabelSpace.from_pairs({"train": [("red", "car")]})
    with pytest.raises(DuplexError, match="there is no object 'moon'; use one of"):
        labels.index(["red"], ["moon"])
    with pytest.raises(DuplexError, match="does not exist"):
        LabelSpace.load(tmp_path / "labels.json")
    for text in ("", "[]", '{"states": ["a"]}', '{"states": ["a"], "objects": ["b"], "pairs": {"train": ["x"]}}'):
        (tmp_path / "labels.json").write_text(text, encoding="utf-8")
        with pytest.raises(DuplexError, match="is not a label file"):
            LabelSpace.load(tmp_path / "labels.json")


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [9], [2], [-1], [0, 2, 1]])
def test_unsorted_repeated_and_unknown_compositions_are_refused(rows: list[int]) -> None:
    with pytest.raises(DuplexError):
        LabelSpace(("a", "b"), ("c",), {"train": np.array(rows)})


@pytest.mark.parametrize(
    ("seen", "sizes"), [(7, (1, 3, 3)), (8, (2, 2, 4)), (13, (3, 3, 7)), (1, (0, 0, 1)), (3, (1, 1, 1))]
)
def test_cuts_between_groups_are_rounded(seen: int, sizes: tuple[int, int, int]) -> None:
    """Head has 20 % of the seen pairs and medium 30 %; 20 % of 8 is 1.6, rounded to 2."""
    found = frequency_groups(np.arange(seen).repeat(np.arange(seen, 0, -1)), seen + 2)
    groups = found.groups_of(np.arange(seen + 2))
    assert tuple(np.bincount(groups, minlength=4)) == tuple(found.sizes) == (*sizes, 2)
    assert (groups[:seen] == np.repeat([0, 1, 2], sizes)).all()  # the most frequent first


def groups_by_ranking(train: Any, size: int) -> Any:
    counts = np.bincount(train, minlength=size)
    ranked, seen = np.argsort(-counts, kind="stable"), int((counts > 0).sum())
    groups = np.full(size, 3)
    cuts = [0, round(0.2 * seen), round(0.5 * seen), seen]
    for number in range(3):
        groups[ranked[cuts[number] : cuts[number + 1]]] = number
    return groups


@given(st.lists(st.integers(0, 19), max_size=60), st.integers(20, 30))
def test_groups_equal_those_of_ranking_all_compositions(train: list[int], size: int) -> None:
    found, whole = frequency_groups(np.array(train, np.int64), size), groups_by_ranking(np.array(train, int), size)
    assert found.groups_of(np.arange(size)).tolist() == whole.tolist()
    assert found.sizes.tolist() == np.bincount(whole, minlength=4).tolist()


def test_label_spaces_are_equal_if_names_and_splits_are() -> None:
    pairs = {"train": [("red", "car"), ("wet", "dog")], "val": [("red", "dog")], "test": [("wet", "car")]}
    one, same = LabelSpace.from_pairs(pairs), LabelSpace.from_pairs(pairs)
    other = LabelSpace.from_pairs({**pairs, "val": pairs["test"], "test": pairs["val"]})
    assert one == same and hash(one) == hash(same) and one.states == other.states and one.objects == other.objects
    assert one != other and one != LabelSpace.from_pairs({**pairs, "test": [("wet", "cat")]}) and one != "labels"


def test_impossible_label_spaces_are_refused() -> None:
    empty, rows = np.empty(0, np.int64), np.array([0, 1])
    names = tuple(f"n{i}" for i in range(40_000))
    for states, objects, pairs, says in (
        ((), ("car",), {}, "has no states"),
        (("red",), (), {}, "has no objects"),
        (("red", "red"), ("car",), {}, "the state 'red' is listed twice"),
        (("red",), ("car", "car"), {}, "the object 'car' is listed twice"),
        (("red",), ("car",), {"holdout": empty}, "unknown split 'holdout'"),
        (names, names, {}, "make 1,600,000,000 pairs"),
    ):
        with pytest.raises(DuplexError, match=says):
            LabelSpace(states, objects, pairs)
    with pytest.raises(DuplexError, match="unknown split 'valid'"):
        LabelSpace.from_pairs({"train": [("red", "car")], "valid": [("red", "dog")]})
    labels = LabelSpace(("red",), ("car", "dog"), {"train": rows[:1]})
    assert labels.pairs["val"].size == labels.pairs["test"].size == 0
    for world, split, says in (("half", "test", "unknown world"), ("closed", "holdout", "unknown split")):
        with pytest.raises(DuplexError, match=says):
            labels.candidates(world, split)


def test_words_without_training_images_are_new():
    labels = LabelSpace.from_pairs({"train": [("red", "star")], "val": [("old", "star")], "test": [("red", "dog")]})
    states, objects = labels.trained_words
    assert (labels.states, states.tolist()) == (("old", "red"), [False, True])
    assert (labels.objects, objects.tolist()) == (("dog", "star"), [False, True])


def test_candidates_of_training_are_those_of_every_split() -> None:
    pairs = {"train": [("red", "car"), ("wet", "dog")], "val": [("red", "dog")], "test": [("wet", "car")]}
    labels = LabelSpace.from_pairs({**pairs, "val": pairs["val"], "test": [("old", "dog")]})
    assert labels.names(labels.candidates("closed", "train")) == ["old dog", "red car", "red dog", "wet dog"]
    assert labels.names(labels.candidates("closed", "val")) == ["red car", "red dog", "wet dog"]
    assert labels.candidates("open", "val").size == labels.size == 6


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6))
def test_a_candidate_set_equals_its_list(m, n, seed):
    labels = random_labels(m, n, np.random.default_rng(seed))
    every = np.arange(labels.size)
    assert (labels.is_seen(every) == labels.seen).all()
    for world in ("closed", "open"):
        candidates, listed = CandidateSet.of(labels, world, "train"), labels.candidates(world, "train")
        assert (candidates.listed is None) == (world == "open") and len(candidates) == len(listed)
        assert (candidates.contains(every) == np.isin(every, listed)).all()
        assert (candidates.positions(listed) == np.arange(len(listed))).all()
        assert (candidates.at(np.arange(len(listed))) == listed).all() and (candidates.compositions == listed).all()


def test_lists_and_numbers_of_any_type_are_compositions() -> None:
    labels = LabelSpace(("red", "blue"), ("star", "moon"), {"train": [0, 3], "val": []})  # type: ignore[dict-item]
    assert labels.state_of([0, 3]).tolist() == [0, 1] and labels.object_of(np.array([3], np.uint8)).tolist() == [1]
    assert labels.composition(1, 0) == 2 and labels.is_seen([[0, 1], [2, 3]]).tolist() == [[True, False], [False, True]]
    assert labels.pairs["train"].dtype == labels.pairs["val"].dtype == labels.state_of([]).dtype == np.int64
