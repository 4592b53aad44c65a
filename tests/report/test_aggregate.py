"""The aggregate over seeds: means, errors, score terms and frequency groups; undefined numbers are left out."""

import json
from pathlib import Path

import numpy as np
import pytest

from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.project.report import read_metrics_of
from duplex.project.run import ProjectData
from duplex.report.aggregate import aggregate, headline_numbers, read_table
from duplex.report.tables import metrics_as_text
from tests.projects import SHIPPED, edited_params

NUMBERS = ("seen", "unseen", "hm", "auc", "state_accuracy", "object_accuracy")


def record(value: float, *, without: tuple[str, ...] = (), head: float | None = None) -> dict:
    world = {name: value for name in NUMBERS if name not in without}
    groups = {
        "head": {"compositions": 3.0, **({} if head is None else {"accuracy": head})},
        "tail": {"compositions": 1},
    }
    return {"closed": {**world, "auc_low": value - 1, "auc_high": value + 1}, "groups": groups}


def test_an_epoch_that_was_not_validated_has_no_number(tmp_path: Path) -> None:
    (tmp_path / "history.csv").write_text("epoch,loss,val_auc\n0,,0.25\n1,2.5,\n2,2.0,0.5\n")
    history = read_table(tmp_path / "history.csv")
    assert history is not None
    np.testing.assert_array_equal(100 * history["val_auc"], [25.0, np.nan, 50.0])


def test_runs_of_two_worlds_share_a_row_also_while_they_adapt(tmp_path: Path) -> None:
    """`duplex_open` is shown as duplex, in the open world; its numbers of the closed world appear nowhere."""
    paths = ArtifactPaths(tmp_path)
    for name, value in (("duplex", 1.0), ("duplex_open", 2.0)):
        numbers = {world: {"auc": value} for world in ("closed", "open")}
        adapted = {world: {"auc": 10 * value} for world in numbers}
        file = paths.run("shapes", name, 0).metrics
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({**numbers, "stream": adapted}))
    found, _ = read_metrics_of(ProjectData(load_params(SHIPPED), "shapes", paths))
    assert sorted(found) == ["duplex", "duplex+stream"]
    for name, factor in (("duplex", 1.0), ("duplex+stream", 10.0)):
        [shown] = found[name]
        assert (shown["closed"]["auc"], shown["open"]["auc"]) == (factor, 2 * factor)


def test_a_row_of_both_worlds_keeps_its_numbers_under_another_name(tmp_path: Path) -> None:
    with edited_params(SHIPPED, tmp_path / "params.yaml") as content:
        content["methods"]["csp"]["shown_as"] = "soft"
    numbers = {**record(1.0, head=2.0), "open": {"auc": 1.0}, "score_terms": {"semantic": {"auc": 1.0}}}
    file = ArtifactPaths(tmp_path).run("shapes", "csp", 0).metrics
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(numbers))
    found, _ = read_metrics_of(ProjectData(load_params(tmp_path / "params.yaml"), "shapes", ArtifactPaths(tmp_path)))
    assert found == {"soft": [numbers]}


def test_means_and_standard_errors_over_seeds():
    found = aggregate({("a", "m"): [record(1.0), record(3.0)]})["a"]["m"]["closed"]
    assert found["auc"] == 2.0 and found["auc_se"] == pytest.approx(1.0) and found["seeds"] == 2
    assert (found["auc_low"], found["auc_high"], found["object_accuracy"]) == (1.0, 3.0, 2.0)


@pytest.mark.parametrize("records", [2, 1])
def test_undefined_numbers_are_left_out(records):
    """A data set without unseen test images has no U, HM and AUC, be they null or missing."""
    gone = ("unseen", "hm", "auc", "state_accuracy")
    runs = [record(1.0, without=gone), {"closed": {**record(1.0)["closed"], **dict.fromkeys(gone)}}][:records]
    found = aggregate({("a", "m"): runs})
    assert not {*gone, "auc_se", "hm_se"} & set(found["a"]["m"]["closed"])
    assert found["a"]["m"]["closed"]["seen"] == 1.0 and found["a"]["m"]["closed"]["object_accuracy"] == 1.0
    assert metrics_as_text(found)[1][3:7] == [f"1.0 ± {'0.0' if records == 2 else '–'}", "–", "–", "–"]


@pytest.mark.parametrize("is_used", [True, False])
def test_auc_over_all_pairs_and_at_the_threshold_by_words_are_averaged(is_used):
    by_words = {"auc": 2.0, "hm": 3.0, "threshold": 0.5}
    own = {**record(1.0)["closed"], "false_seen": 4.0, **(by_words if is_used else {"words": by_words})}
    runs = [{"open": {**own, "auc_all": value}} for value in (6.0, 8.0)]
    table = aggregate({("a", "m"): runs})
    found = table["a"]["m"]["open"]
    assert (found["auc_all"], found["auc_all_se"]) == (7.0, pytest.approx(1.0))
    assert (found["auc_by_words"], found["hm_by_words"]) == (2.0, 3.0)
    assert headline_numbers(table)["a"]["m"]["open"]["auc_all"] == 7.0
    header, row = metrics_as_text(table)
    assert dict(zip(header, row, strict=True))["all pairs"] == "7.0 ± 1.0"
    assert dict(zip(header, row, strict=True))["by words"] == "2.0 ± 0.0"
    assert dict(zip(header, row, strict=True))["false seen"] == "4.0 ± 0.0"


def test_metrics_for_dvc_begin_with_validation_and_have_at_most_fourteen_numbers_per_method():
    """Details such as intervals, thresholds that are not used and score terms are in the summary alone."""
    detailed = {**record(1.0), "terms_visual": {"auc": 2.0}, "val_auc": 5.0, "val_auc_all": 3.0}
    opened = {**detailed["closed"], "auc_all": 2.0, "words": {"auc": 4.0}}
    table = aggregate({("a", "m"): [{**detailed, "open": opened}, {**detailed, "open": opened, "val_auc": 7.0}]})
    found = headline_numbers(table)["a"]["m"]
    assert list(found) == ["validation", "closed", "open"] and found["validation"] == {"auc": 6.0, "auc_all": 3.0}
    assert list(found["closed"]) == ["auc", "auc_se", "hm", "seen", "unseen"]
    assert list(found["open"]) == ["auc", "auc_se", "hm", "seen", "unseen", "auc_all"]
    assert sum(map(len, found.values())) <= 14
    assert table["a"]["m"]["validation"]["auc_se"] == pytest.approx(1.0)


def test_score_terms_of_every_seed_are_averaged():
    runs = [{**record(1.0), "terms_visual": {"seen": value, "auc": value}} for value in (2.0, 4.0)]
    runs[0]["terms_semantic"] = {"auc": 3.0}
    table = aggregate({("a", "m"): runs})
    assert table["a"]["m"]["terms_visual"] == {"seen": 3.0, "seen_se": 1.0, "auc": 3.0, "auc_se": 1.0, "seeds": 2}
    assert "terms_semantic" not in table["a"]["m"]
    assert {row[1] for row in metrics_as_text(table)[1:]} == set(headline_numbers(table)["a"]["m"]) == {"closed"}


def test_frequency_groups_are_mean_accuracies():
    runs = [record(1.0, head=40.0), record(1.0, head=50.0)]
    table = aggregate({("a", "m"): runs, ("a", "n"): [record(1.0)], ("a", "o"): [runs[0], record(1.0)]})
    assert table["a"]["m"]["groups"] == {"head": 45.0, "head_se": 5.0}
    assert "groups" not in table["a"]["n"] and "groups" not in table["a"]["o"]  # one seed lacks it
    assert {row[1] for row in metrics_as_text(table)[1:]} == {"closed"}


def test_groups_at_the_ends_of_the_curve_are_a_table():
    ends = {**record(1.0, head=40.0), "groups": {"head": {"accuracy": 40.0, "accuracy_at_ends": 60.0}}}
    found = aggregate({("a", "m"): [ends, ends]})["a"]["m"]
    assert (found["groups"], found["groups_at_ends"]) == (
        {"head": 40.0, "head_se": 0.0},
        {"head": 60.0, "head_se": 0.0},
    )


def test_seeds_whose_best_epoch_is_the_first_are_counted():
    runs = [{**record(1.0), "val_auc": 5.0, "epoch": epoch} for epoch in (0, 3, 0)]
    assert aggregate({("a", "m"): runs})["a"]["m"]["validation"]["untrained"] == 2
    assert "untrained" not in aggregate({("a", "m"): [{**record(1.0), "val_auc": 5.0}]})["a"]["m"]["validation"]
