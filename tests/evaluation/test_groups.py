"""Frequency groups."""

import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.evaluation.groups import group_table
from duplex.labels import GROUPS, FrequencyGroups, frequency_groups

TRAIN = np.repeat(np.arange(10), [9, 8, 7, 6, 5, 1, 1, 1, 1, 1])  # ten seen compositions of twelve


def test_groups_are_shares_of_seen_compositions() -> None:
    groups = frequency_groups(np.random.default_rng(0).permutation(TRAIN), 12).of(np.arange(12))
    assert [GROUPS[g] for g in groups] == ["head"] * 2 + ["medium"] * 3 + ["tail"] * 5 + ["unseen"] * 2


def test_counts_shares_and_accuracy() -> None:
    test = np.array([0, 0, 1, 2, 10, 11, 11, 11])
    without = np.array([1, 0, 0, 1, 0, 0, 0, 1], bool)
    with_graph = np.array([1, 1, 0, 1, 1, 0, 0, 1], bool)
    table = group_table(frequency_groups(TRAIN, 12), TRAIN, test, {"without": without, "with": with_graph})
    assert table["group"].tolist() == list(GROUPS)
    assert table["compositions"].tolist() == [2, 3, 5, 2]
    assert table["train_images"].tolist() == [17, 18, 5, 0]
    assert table["train_percent"].tolist() == [42.5, 45, 12.5, 0]
    assert table["test_images"].tolist() == [3, 1, 0, 4]
    np.testing.assert_allclose(table["without"], [100 / 3, 100, np.nan, 25])
    np.testing.assert_allclose(table["with"], [200 / 3, 100, np.nan, 50])
    np.testing.assert_allclose(table["gain"], [100 / 3, 0, np.nan, 25])
    assert "gain" not in group_table(frequency_groups(TRAIN, 12), TRAIN, test, {"one": without})


def test_results_of_other_images_are_refused() -> None:
    with pytest.raises(DuplexError, match="3 images, the test split has 2"):
        group_table(frequency_groups(TRAIN, 12), TRAIN, np.array([0, 1]), {"run": np.ones(3, bool)})


def test_nothing_seen() -> None:
    groups = frequency_groups(np.array([], dtype=np.int64), 3).of(np.arange(3))
    assert (groups == GROUPS.index("unseen")).all()


def test_one_image_is_all_of_them() -> None:
    table = group_table(
        FrequencyGroups(2, np.array([0]), np.array([0])), np.array([0]), np.array([0]), {"run": np.array([True])}
    )
    assert table["train_percent"].tolist() == [100.0, 0.0, 0.0, 0.0]
    assert table["run"].tolist()[0] == 100.0 and table["run"].isna().tolist() == [False, True, True, True]
