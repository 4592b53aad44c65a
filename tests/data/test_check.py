"""What check finds, the statistics row, and the published table."""

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import duplex
from duplex.data.check import DataIssue, check_dataset
from duplex.data.images import image_fault
from duplex.data.sources import is_on_disk, load_source, read_pair_lists
from duplex.data.tables import (
    LabelledImages,
    count_dataset,
    labels_of,
    published_differences,
    read_benchmarks,
    statistics_text,
)
from duplex.labels import LabelSpace
from duplex.options import SourceOptions
from tests.data.makers import make_standard, make_table


def frame(rows: list[tuple[str, str, str, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["image", "state", "object", "split"])


def found(dataset: LabelledImages, root: Path) -> dict[str, DataIssue]:
    return {finding.what: finding for finding in check_dataset(dataset, root)}


def test_a_correct_data_set_has_no_issues(tmp_path: Path) -> None:
    make_standard(tmp_path, "spaces")
    assert check_dataset(load_source(SourceOptions("standard", tmp_path)), tmp_path) == []


def test_check_finds_missing_unreadable_duplicate_unlisted_and_leaking_images(tmp_path: Path) -> None:
    dataset = load_source(SourceOptions("table", tmp_path, make_table(tmp_path, ".csv", split=True)))
    images = dataset.manifest["image"]
    by_split = {split: rows["image"].tolist() for split, rows in dataset.manifest.groupby("split")}
    missing, empty, cut, text, twin = by_split["train"][:5]
    (tmp_path / missing).unlink()
    (tmp_path / empty).write_bytes(b"")
    (tmp_path / cut).write_bytes((tmp_path / cut).read_bytes()[:-40])
    (tmp_path / text).write_text("not a picture")
    shutil.copy(tmp_path / by_split["test"][0], tmp_path / twin)  # the same content in two splits
    shutil.copy(tmp_path / by_split["val"][0], tmp_path / "stray.png")
    again = dataset.manifest[images == by_split["val"][1]].assign(split="test")
    manifest = pd.concat([dataset.manifest, again], ignore_index=True)
    findings = found(dataclasses.replace(dataset, manifest=manifest), tmp_path)
    assert findings["images are missing"].examples == (missing,)
    unreadable = findings["images cannot be read"]
    assert unreadable.count == 3 and [name.split(" (")[0] for name in unreadable.examples] == [empty, cut, text]
    assert "empty" in unreadable.examples[0]
    assert findings["images are listed more than once"].examples == (by_split["val"][1],)
    shared = by_split["val"][1]
    assert findings["images are in two splits (a leak)"].examples == (f"{shared} (val) = {shared} (test)",)
    assert findings["image contents are in two splits (a leak)"].count == 2
    assert findings["images have the same content as another image with another label"].count == 1
    assert findings["images are on disk but not listed"].examples == ("stray.png",)
    assert {what for what, finding in findings.items() if not finding.problem} == {
        "images have the same content as another image with another label",
        "images are on disk but not listed",
    }
    assert not any(finding.fatal for finding in findings.values())
    assert "train pairs without images" not in findings


def test_check_finds_pairs_without_images_and_primitives_only_in_test(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    manifest = frame([("a.png", "red", "car", "train")])
    lists = {"train": [("red", "car")], "val": [("red", "car"), ("red", "dog")], "test": [("old", "dog")]}
    findings = found(LabelledImages(manifest, LabelSpace.from_pairs(lists)), tmp_path)
    [(what, issue)] = [(what, issue) for what, issue in findings.items() if issue.fatal]
    assert what.startswith("splits that cannot be evaluated") and issue.problem and issue.count == 4
    assert findings["val pairs without images"].examples == ("red car", "red dog")
    assert findings["test pairs without images"].count == 1
    assert findings["states that training never shows (new words)"].examples == ("old",)
    assert findings["objects that training never shows (new words)"].examples == ("dog",)
    assert not findings["objects that training never shows (new words)"].problem


def test_labels_with_equal_prompts_are_a_problem(tmp_path: Path) -> None:
    pairs = [("Red", "caf\u00e9"), ("red", "cafe\u0301"), ("old", "bar")]
    manifest = frame([(f"{i}.png", state, thing, "train") for i, (state, thing) in enumerate(pairs)])
    findings = found(LabelledImages(manifest, labels_of(manifest)), tmp_path)
    states = findings["states have the same text in prompts"]
    assert states.problem and states.examples == ("Red", "red")
    assert findings["objects have the same text in prompts"].count == 2


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".gif", ".bmp"])
def test_truncated_images_are_reported(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    whole = path.read_bytes()
    assert image_fault(path) == ""
    for size in (0, 1, 20, len(whole) // 2, len(whole) * 9 // 10):
        path.write_bytes(whole[:size])
        assert image_fault(path), size


def test_published_statistics_hold_for_the_real_pair_lists() -> None:
    shared = os.environ.get("DUPLEX_SHARED")
    if not shared:
        pytest.skip("DUPLEX_SHARED does not name the folder with the real pair lists")
    for name in ("mit-states", "ut-zappos", "cgqa"):
        benchmark = read_benchmarks()[name]
        pairs, _ = read_pair_lists(Path(shared) / "splits" / name)
        counted = count_dataset(LabelSpace.from_pairs(pairs))
        assert published_differences(name, counted) == []
        assert counted.to_dict()["train"] == {"seen": benchmark["counts"]["train"][0], "images": None}
        assert counted.to_dict()["shares"] is None


def test_counts_are_compared_with_published_ones_of_known_data_sets(tmp_path: Path) -> None:
    make_standard(tmp_path, "flat")
    dataset = load_source(SourceOptions("standard", tmp_path))
    counted = count_dataset(dataset.labels, dataset.manifest)
    assert "train images: 24, published 26,920" in published_differences("cgqa", counted)
    assert published_differences("my-data", counted) == []
    assert published_differences("ao-clevr", counted) == ["states: 4, published 8", "objects: 4, published 3"]
    known = published_differences("vaw-czsl", counted)
    assert known[2:] == ["train seen pairs: 12, published 11,175"], "no number of images is known"


def test_statistics_row_and_shares() -> None:
    counts = [40, 30, 8, 8, 4, 2, 2, 2, 2, 2]
    rows = [(f"{i}/{j}", f"s{i}", "o", "train") for i, count in enumerate(counts) for j in range(count)]
    rows += [("v", "s0", "o", "val"), ("w", "s0", "p", "val"), ("t", "s9", "o", "test"), ("u", "s9", "p", "test")]
    manifest = frame(rows)
    counted = count_dataset(labels_of(manifest), manifest)
    assert counted.to_dict() == {
        "states": 10, "objects": 2, "train": {"seen": 10, "images": 100}, "val": {"seen": 1, "unseen": 1, "images": 2},
        "test": {"seen": 1, "unseen": 1, "images": 2}, "shares": {"head": 0.7, "medium": 0.2, "tail": 0.1},
    }  # fmt: skip
    assert counted.shares and counted.shares["test"] == {"head": 0, "medium": 0, "tail": 0.5, "unseen": 0.5}
    text = statistics_text("mine", counted)
    assert "70.0%" in text and " ".join(text.splitlines()[1].split()) == "mine 10 2 20 10 100 1 1 2 1 1 2"


def test_load_dataset_says_once_what_check_finds_about_equal_contents(tmp_path, capsys) -> None:
    path = make_table(tmp_path, ".csv", split=True)
    dataset = load_source(SourceOptions("table", tmp_path, path))
    by_split = {split: rows["image"].tolist() for split, rows in dataset.manifest.groupby("split")}
    shutil.copy(tmp_path / by_split["test"][0], tmp_path / by_split["train"][0])
    duplex.load_dataset(path, encoder="tiny", cache=tmp_path / "cache")
    said = [line for line in capsys.readouterr().err.splitlines() if "content" in line]
    expected = [str(finding) for what, finding in found(dataset, tmp_path).items() if "content" in what]
    assert len(expected) == 2 and sorted(said) == sorted(f"{path.name}: {line}" for line in expected)


def test_images_behind_a_link_that_leads_away_are_skipped(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    make_standard(root, "spaces")
    elsewhere.mkdir()
    (root / "linked").symlink_to(elsewhere)
    (issue,) = check_dataset(load_source(SourceOptions("standard", root)), root)
    assert issue.what.startswith("files are skipped") and not issue.fatal


def test_a_data_set_is_on_disk_with_its_folder_and_its_table(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    assert is_on_disk(SourceOptions("table", tmp_path)) and not is_on_disk(SourceOptions("table", tmp_path / "gone"))
    assert not is_on_disk(SourceOptions("table", tmp_path, table=table))
    table.touch()
    assert is_on_disk(SourceOptions("table", tmp_path, table=table))
