"""Splits and random re-splits: no leak, every primitive stays in training, the same for the same rows and seed."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from duplex.data.contents import _divide, _hold_out, split_at_random
from duplex.data.sources import load_source
from duplex.data.tables import from_rows, resplit, split_name, split_options_like
from duplex.errors import DuplexError, UsageError
from duplex.options import SourceOptions, SplitOptions
from tests.data.makers import make_folder, make_standard, make_table

GRIDS = st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.integers(1, 9), min_size=4, max_size=49)
LARGER_GRIDS = st.dictionaries(
    st.tuples(st.integers(0, 6), st.integers(0, 6)), st.integers(2, 9), min_size=9, max_size=49
)
SHARES = st.floats(0.02, 0.45)


def frame_of(grid: dict[tuple[int, int], int]) -> pd.DataFrame:
    rows = [(f"{s}/{o}/{i}.jpg", f"s{s}", f"o{o}") for (s, o), n in grid.items() for i in range(n)]
    return pd.DataFrame(rows, columns=["image", "state", "object"])


def pairs_of(frame: pd.DataFrame) -> dict[str, set[tuple[str, str]]]:
    return {split: set(zip(rows["state"], rows["object"], strict=True)) for split, rows in frame.groupby("split")}


@settings(max_examples=40, deadline=None)
@given(GRIDS, st.integers(0, 2**32), SHARES, SHARES, SHARES, SHARES, st.randoms())
def test_splits_keep_every_primitive_in_training(grid, seed, val_unseen, test_unseen, val_images, test_images, random):
    frame = frame_of(grid)
    options = SplitOptions(seed, val_unseen, test_unseen, val_images, test_images)
    try:
        made = split_at_random(frame, options)
    except DuplexError as error:
        assume("hold out" not in str(error))
        raise
    frame = frame.assign(split=made.split)
    pairs = pairs_of(frame)
    assert set(frame["split"]) <= {"train", "val", "test"} and len(made.split) == len(frame)
    assert set(frame["state"]) == {s for s, _ in pairs["train"]} and set(frame["object"]) == {
        o for _, o in pairs["train"]
    }
    unseen = {split: pairs[split] - pairs["train"] for split in ("val", "test")}
    assert unseen["val"] and unseen["test"] and not unseen["val"] & unseen["test"]
    assert not unseen["val"] & pairs["test"] and not unseen["test"] & pairs["val"]
    wanted = max(1, round(val_unseen * len(grid))) + max(1, round(test_unseen * len(grid)))
    assert len(unseen["val"]) + len(unseen["test"]) + made.short == wanted
    seen_images = frame[[pair in pairs["train"] for pair in zip(frame["state"], frame["object"], strict=True)]]
    spare = (seen_images.groupby(["state", "object"]).size() - 1).sum()
    for split, share in (("val", val_images), ("test", test_images)):
        given_away = (seen_images["split"] == split).sum()
        assert given_away <= share * len(seen_images) + 2
        assert given_away > 0 or spare < 2

    order = random.sample(range(len(frame)), len(frame))
    again = split_at_random(frame.iloc[order][["image", "state", "object"]], options)
    assert again.split.tolist() == frame["split"].iloc[order].tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(5, 8), st.integers(5, 8), st.floats(0, 0.4), st.floats(0, 0.4), st.integers(0, 99), st.randoms())
def test_new_words_have_no_training_image_and_all_others_do(states, objects, of_states, of_objects, seed, random):
    grid = {(s, o): 3 for s in range(states) for o in range(objects)}
    options = SplitOptions(seed, unseen_states=of_states, unseen_objects=of_objects)
    frame = frame_of(grid)
    frame = frame.assign(split=split_at_random(frame, options).split)
    pairs = pairs_of(frame)
    for kind, words, share in (("state", states, of_states), ("object", objects, of_objects)):
        new = set(frame[kind]) - set(frame[kind][frame["split"] == "train"])
        assert len(new) == (max(1, round(share * words)) if share else 0)
        for split in ("val", "test"):
            assert not new or new & set(frame[kind][frame["split"] == split])
    unseen = {split: pairs[split] - pairs["train"] for split in ("val", "test")}
    assert not unseen["val"] & unseen["test"]
    order = random.sample(range(len(frame)), len(frame))
    again = split_at_random(frame.iloc[order][["image", "state", "object"]], options)
    assert again.split.tolist() == frame["split"].iloc[order].tolist()


def test_a_word_whose_partner_has_no_other_pair_stays_in_training() -> None:
    grid = {(0, 0): 2, (0, 1): 2, (1, 0): 2, (1, 1): 2, (2, 0): 2, (2, 1): 2, (2, 2): 2}  # o2 occurs with s2 alone
    for seed in range(8):
        frame = frame_of(grid)
        split = split_at_random(frame, SplitOptions(seed, unseen_states=0.3)).split
        assert "s2" in set(frame["state"][split == "train"])
    with pytest.raises(DuplexError, match=r"unseen_states is 0\.9, but holding out so many of its 3 states .* lower"):
        split_at_random(frame_of(grid), SplitOptions(unseen_states=0.9))


def test_a_re_split_has_the_new_words_that_its_source_asks_for(tmp_path) -> None:
    make_folder(tmp_path / "own", "nested")
    plain = SourceOptions("folder", tmp_path / "own")
    assert all(mask.all() for mask in load_source(plain).labels.trained_words)
    source = replace(plain, resplit=1, split=SplitOptions(unseen_states=0.3, unseen_objects=0.3))
    labels = load_source(source).labels
    assert [int((~mask).sum()) for mask in labels.trained_words] == [1, 1]
    assert split_name("own", 1, source.split) == "own-words1" and split_name("own", 1) == "own-split1"
    alone = load_source(replace(source, resplit=None)).labels
    assert [int((~mask).sum()) for mask in alone.trained_words] == [1, 1]


def test_few_images_are_a_part_of_the_training_images() -> None:
    frame = frame_of(LARGE)
    whole = from_rows(frame, SplitOptions(3), "t", list)
    few = from_rows(frame, SplitOptions(3, images_per_pair=2), "t", list)
    assert few.contents == tuple(few.manifest["image"]) and few.labels == whole.labels
    both = whole.manifest.merge(few.manifest, how="left", indicator=True)
    train = both[both["split"] == "train"]
    assert (both[both["split"] != "train"]["_merge"] == "both").all() and len(train) > 4 * len(
        few.labels.pairs["train"]
    )
    assert (train[train["_merge"] == "both"].groupby(["state", "object"]).size() == 2).all()
    again = resplit(whole, 1, SplitOptions(images_per_pair=1))
    assert len(again.manifest[again.manifest["split"] == "train"]) == len(again.labels.pairs["train"])
    assert split_name("own", 1, SplitOptions(images_per_pair=4)) == "own-few4-split1"


def test_data_without_pairs_to_hold_out_is_refused() -> None:
    with pytest.raises(DuplexError, match="hold out"):
        split_at_random(frame_of({(0, 0): 5, (1, 1): 5, (2, 2): 5}), SplitOptions())


@pytest.mark.parametrize("shares", [{"val_unseen": 0.0}, {"test_unseen": 1.0}, {"val_images": 0.5, "test_images": 0.5}])
def test_shares_outside_of_0_to_1_are_refused(shares: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="with a sum below 1"):
        SplitOptions(**shares)


def parts(frame: pd.DataFrame, options: SplitOptions) -> tuple[pd.DataFrame, dict[str, set[tuple[str, str]]]]:
    """Rows with their split, and the pairs that each split alone shows."""
    frame = frame.assign(split=split_at_random(frame, options).split)
    pairs = pairs_of(frame)
    return frame, {split: pairs[split] - pairs["train"] for split in ("val", "test")}


LARGE = {(s, o): 20 for s in range(10) for o in range(10)}


def test_shares_apply_to_their_own_split() -> None:
    frame, unseen = parts(frame_of(LARGE), SplitOptions(0, 0.05, 0.25, 0.3, 0.1))
    assert split_at_random(frame_of(LARGE), SplitOptions(0, 0.05, 0.25, 0.3, 0.1)).short == 0
    assert (len(unseen["val"]), len(unseen["test"])) == (5, 25)
    held = unseen["val"] | unseen["test"]
    seen = frame[[pair not in held for pair in zip(frame["state"], frame["object"], strict=True)]]
    shares = seen["split"].value_counts(normalize=True)
    assert shares["val"] == pytest.approx(0.3, abs=0.01) and shares["test"] == pytest.approx(0.1, abs=0.01)


def test_pairs_and_images_are_chosen_at_random() -> None:
    frame, unseen = parts(frame_of(LARGE), SplitOptions(0))
    other, differently = parts(frame_of(LARGE), SplitOptions(1))
    assert unseen["val"] != differently["val"] and len({s for s, _ in unseen["val"] | unseen["test"]}) > 5
    numbers = frame["image"].str.extract(r"/(\d+)\.jpg")[0].astype(int)
    given = numbers[(frame["split"] == "val") & ~frame[["state", "object"]].apply(tuple, axis=1).isin(unseen["val"])]
    assert given.nunique() > 10, "the same numbers of every pair are given away"
    same = frame["split"] == other["split"]
    assert 0.3 < same.mean() < 0.9


def test_two_pairs_to_hold_out_suffice() -> None:
    """Of two states and two objects just two pairs can be: whatever the shares, one unseen pair each."""
    grid = {(s, o): 4 for s in range(2) for o in range(2)}
    for val, test in ((0.9, 0.05), (0.05, 0.9), (0.4, 0.4)):
        made = split_at_random(frame_of(grid), SplitOptions(0, val, test))
        _, unseen = parts(frame_of(grid), SplitOptions(0, val, test))
        assert len(unseen["val"]) == len(unseen["test"]) == 1
        assert made.short == max(1, round(val * 4)) + max(1, round(test * 4)) - 2


@settings(max_examples=40, deadline=None)
@given(GRIDS, st.integers(1, 30), st.randoms())
def test_held_out_pairs_equal_a_naive_search(grid, wanted, random) -> None:
    pairs = [(f"s{s}", f"o{o}") for s, o in grid]
    random.shuffle(pairs)
    held: list[tuple[str, str]] = []
    for pair in pairs:
        stay = [other for other in pairs if other != pair and other not in held]
        if len(held) < wanted and pair[0] in {s for s, _ in stay} and pair[1] in {o for _, o in stay}:
            held.append(pair)
    assert _hold_out(pairs, wanted) == held


@pytest.mark.parametrize(
    ("images", "share", "expected"),
    [
        ([8] * 5, 0.25, [(3, 3), (2, 2), (2, 2), (2, 2), (2, 2)]),  # the first pair gives one more to each
        ([1] * 10 + [8], 0.4, [(0, 0)] * 10 + [(4, 3)]),  # int(1 + 0.4 * 8), and what is left but for one
    ],
)
def test_fractions_are_carried_to_the_next_pair_but_large_pairs_do_not_make_up_for_small_ones(images, share, expected):
    sizes = [((f"s{i}", "o"), count) for i, count in enumerate(images)]
    assert list(_divide(sizes, SplitOptions(0, 0.1, 0.1, share, share)).values()) == expected


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(LARGER_GRIDS, st.integers(1, 10_000), st.integers(0, 5))
def test_resplits_keep_shares_and_primitives(grid: dict[tuple[int, int], int], number: int, seed: int) -> None:
    try:
        data = from_rows(frame_of(grid), SplitOptions(seed), "here")
        split_options_like(data.manifest, 0)
        again = resplit(data, number)
    except (DuplexError, UsageError) as error:
        assume("hold out" not in str(error) and "training images; add some" not in str(error))
        raise
    assert again.manifest[["image", "state", "object"]].equals(data.manifest[["image", "state", "object"]])
    pairs, before = pairs_of(again.manifest), pairs_of(data.manifest)
    unseen = {split: pairs[split] - pairs["train"] for split in ("val", "test")}
    for split, other in (("val", "test"), ("test", "val")):
        assert unseen[split] and not unseen[split] & pairs["train"] and not unseen[split] & pairs[other]
    for state, thing in unseen["val"] | unseen["test"]:
        assert any(state == known for known, _ in pairs["train"]) and any(thing == known for _, known in pairs["train"])
    held = sum(len(unseen[split]) for split in ("val", "test"))
    short = again.notes.get("unseen pairs fewer than in the data set's own split", 0)
    assert held + short == sum(len(before[split] - before["train"]) for split in ("val", "test"))
    assert 0 not in again.notes.values()
    assert resplit(data, number).manifest.equals(again.manifest)
    divided = (divmod(c, len(again.labels.objects)) for c in again.labels.pairs["train"].tolist())
    assert pairs["train"] == {(again.labels.states[m], again.labels.objects[n]) for m, n in divided}


def test_numbers_are_different_splits_with_the_shares_of_the_first() -> None:
    data = from_rows(frame_of(LARGE), SplitOptions(3, 0.1, 0.2, 0.15, 0.25), "here")
    drawn = [resplit(data, number) for number in (1, 2, 3)]
    unseen = [frozenset(pairs_of(one.manifest)["test"] - pairs_of(one.manifest)["train"]) for one in (data, *drawn)]
    assert len(set(unseen)) == 4 and {len(one) for one in unseen} == {20}
    for one in drawn:
        for split in ("train", "val", "test"):
            assert (one.manifest["split"] == split).mean() == pytest.approx(
                (data.manifest["split"] == split).mean(), abs=0.01
            )


@pytest.mark.parametrize("kind", ["standard", "table", "folder", "shapes"])
def test_a_source_of_any_kind_is_split_anew_by_its_key(tmp_path, kind) -> None:
    if kind == "standard":
        make_standard(tmp_path, "flat")
    if kind == "folder":
        make_folder(tmp_path, "nested")
    table = make_table(tmp_path, ".csv", split=True) if kind == "table" else None
    base = SourceOptions(kind, tmp_path, table)
    data, again = load_source(base), load_source(replace(base, resplit=2))
    assert again.manifest["image"].equals(data.manifest["image"])
    assert not again.manifest["split"].equals(data.manifest["split"])
    assert again.manifest.equals(resplit(data, 2).manifest)


def test_a_split_without_unseen_pairs_or_seen_images_is_refused() -> None:
    rows = frame_of({(s, o): 4 for s in range(3) for o in range(3)})
    numbers = rows["image"].str.extract(r"/(\d)\.jpg")[0].astype(int)
    all_seen = rows.assign(split=numbers.map({0: "train", 1: "train", 2: "val", 3: "test"}))
    only_unseen = rows.assign(split=rows["state"].map({"s0": "train", "s1": "val", "s2": "test"}))
    for manifest, lacking in ((all_seen, "without"), (only_unseen, "with")):
        data = from_rows(manifest, SplitOptions(), "here")
        with pytest.raises(UsageError, match=f"needs val images of pairs {lacking} training images; add some"):
            resplit(data, 1)


@pytest.mark.parametrize("seed", range(20))
def test_few_pairs_leave_each_word_two_training_pairs_where_possible(seed: int) -> None:
    grid = {(s, o): 5 for s in range(3) for o in range(3)}
    training = pairs_of(frame_of(grid).assign(split=split_at_random(frame_of(grid), SplitOptions(seed)).split))["train"]
    for place in (0, 1):
        counts = pd.Series([pair[place] for pair in training]).value_counts()
        assert len(counts) == 3 and counts.min() == 2
    corner = {(0, 0): 5, (0, 1): 5, (1, 0): 5, (1, 1): 5, (2, 1): 5}  # two of the four pairs of a square
    assert split_at_random(frame_of(corner), SplitOptions(seed)).short == 0
