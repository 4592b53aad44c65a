"""Random re-splits: no leak, every primitive stays in training, the shares of the data set's own split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from duplex.data.dataset import LabelledImages, from_rows, resplit, shares, split_name
from duplex.data.dataset_source import load_source
from duplex.data.source_options import SourceOptions, SplitOptions
from duplex.errors import DuplexError, UsageError
from tests.data.makers import make_folder, make_standard, make_table
from tests.data.test_split import LARGE, frame_of

GRIDS = st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.integers(2, 9), min_size=9, max_size=49)


def whole(grid: dict[tuple[int, int], int], seed: int = 0) -> LabelledImages:
    return from_rows(frame_of(grid), SplitOptions(seed), "here")


def parts(data: LabelledImages) -> dict[str, set[tuple[str, str]]]:
    rows = data.manifest
    return {split: set(zip(part["state"], part["object"], strict=True)) for split, part in rows.groupby("split")}


@settings(max_examples=60, deadline=None)
@given(GRIDS, st.integers(1, 10_000), st.integers(0, 5))
def test_resplits_keep_shares_and_primitives(grid: dict[tuple[int, int], int], number: int, seed: int) -> None:
    try:
        data = whole(grid, seed)
        shares(data.manifest, 0)
        again = resplit(data, number)
    except (DuplexError, UsageError) as error:
        assume("held out" not in str(error) and "this data set lacks some" not in str(error))
        raise
    assert again.manifest[["image", "state", "object"]].equals(data.manifest[["image", "state", "object"]])
    pairs, before = parts(again), parts(data)
    unseen = {split: pairs[split] - pairs["train"] for split in ("val", "test")}
    for split, other in (("val", "test"), ("test", "val")):
        assert unseen[split] and not unseen[split] & pairs["train"] and not unseen[split] & pairs[other]
    for state, thing in unseen["val"] | unseen["test"]:
        assert any(state == known for known, _ in pairs["train"]) and any(thing == known for _, known in pairs["train"])
    held = sum(len(unseen[split]) for split in ("val", "test"))
    short = again.notes.get("unseen pairs fewer than in the data set's own split", 0)
    assert held + short == sum(len(before[split] - before["train"]) for split in ("val", "test"))
    assert resplit(data, number).manifest.equals(again.manifest)
    divided = (divmod(c, len(again.labels.objects)) for c in again.labels.pairs["train"].tolist())
    assert pairs["train"] == {(again.labels.states[m], again.labels.objects[n]) for m, n in divided}


def test_numbers_are_different_splits_with_the_shares_of_the_first() -> None:
    data = from_rows(frame_of(LARGE), SplitOptions(3, 0.1, 0.2, 0.15, 0.25), "here")
    drawn = [resplit(data, number) for number in (1, 2, 3)]
    unseen = [frozenset(parts(one)["test"] - parts(one)["train"]) for one in (data, *drawn)]
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
    for manifest in (all_seen, only_unseen):
        data = from_rows(manifest, SplitOptions(), "here")
        with pytest.raises(UsageError, match="this data set lacks some"):
            resplit(data, 1)


def test_params_take_whole_numbers_from_one() -> None:
    assert split_name("shapes", 3) == "shapes-split3"
    source = TypeAdapter(SourceOptions)
    assert source.validate_json('{"kind": "shapes", "root": "x", "resplit": 3}').resplit == 3
    for wrong in ("0", "-1", "1.5", "true"):
        with pytest.raises(ValidationError, match="resplit"):
            source.validate_json(f'{{"kind": "shapes", "root": "x", "resplit": {wrong}}}')
