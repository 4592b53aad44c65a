"""The table over splits: what trains nothing is run once, rows stand for others in their worlds, runs are kept."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest

from benchmarks import splits
from benchmarks.methods import Bench, margins
from benchmarks.splits import difference, markdown, measured, run_all, table
from duplex.config.artifacts import RunPaths
from duplex.config.params import load_params
from duplex.evaluation.splits import compare_splits
from tests.subprocesses import ROOT

GAINS = {"clip": 0.0, "duplex": 0.4, "duplex_open": 0.2, "duplex_plus": 1.0}
ROWS = list(GAINS)
DATASETS = ["shapes-split1", "shapes-split2"]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    monkeypatch.setattr(splits, "compare_splits", partial(compare_splits, rounds=100))


@pytest.fixture
def params():
    shipped = load_params(ROOT / "params.yaml")
    return shipped.model_copy(
        update={"datasets": {**shipped.datasets, **dict.fromkeys(DATASETS, shipped.dataset("shapes"))}}
    )


@pytest.fixture
def done(monkeypatch, params) -> list[tuple[str, str, int]]:
    """Runs that are written instead of trained, in their order."""
    order: list[tuple[str, str, int]] = []

    def run(self, name, rate, seed, tested):
        assert tested and rate == params.dataset("shapes").training.learning_rate
        order.append((self.dataset, name, seed))
        out = RunPaths(self.folder / self.dataset / name / str(seed))
        write(out, GAINS[name], len(order), params.row(name).worlds, 0 if name == "clip" else 10)
        return out

    monkeypatch.setattr(Bench, "run", run)
    return order


def write(out: RunPaths, gain: float, number: int, worlds, parameters: int) -> None:
    out.root.mkdir(parents=True)
    random = np.random.default_rng(number)
    rows = pd.DataFrame({"row": range(60), "seen": [1, 0] * 30, "margin": random.normal(size=60)})
    rows.loc[rows["seen"] == 1, "margin"] += gain
    pd.concat([rows.assign(world=world) for world in worlds]).to_csv(out.predictions, index=False)
    metrics = {world: {"seen": 1.0, "unseen": 2.0, "hm": 1.5, "auc": 10 * gain + number} for world in worlds}
    out.metrics.write_text(json.dumps(metrics))
    out.timing.write_text(json.dumps({"parameters": parameters}))


def test_seeds_come_one_after_the_other_and_what_trains_nothing_is_run_once(done, params, tmp_path):
    runs = run_all(params, DATASETS, ROWS, [0, 1], tmp_path)
    assert [seed for _, _, seed in done] == [0] * 8 + [1] * 6
    assert [name for _, name, seed in done if seed] == ["duplex", "duplex_open", "duplex_plus"] * 2
    assert all(len(split) == 2 for row in runs.values() for split in row)
    assert runs["clip"][1][0] is runs["clip"][1][1]
    assert runs["duplex"][1][1].root == tmp_path / "shapes-split2" / "duplex" / "1"


def test_numbers_are_means_over_splits_of_means_over_seeds(done, params, tmp_path):
    runs = run_all(params, DATASETS, ["duplex_plus"], [0, 1], tmp_path)["duplex_plus"]
    found = measured(runs, "closed")
    assert found["auc_by_split"] == pytest.approx([10 + (1 + 3) / 2, 10 + (2 + 4) / 2])
    assert (found["auc"], found["auc_deviation"]) == pytest.approx((12.5, 0.5**0.5))
    assert (found["seen"], found["unseen"]) == (1.0, 2.0)


def test_differences_are_those_of_the_margins_in_the_worlds_of_both(done, params, tmp_path):
    runs = run_all(params, DATASETS, ROWS, [0, 1], tmp_path)
    found = table(params, runs, "duplex_plus")
    assert set(found["closed"]) == set(found["open"]) == {"clip", "duplex", "duplex_plus"}
    assert "difference" not in found["closed"]["duplex_plus"]
    sides = [[[margins(run, "open") for run in split] for split in runs[row]] for row in ("duplex_open", "duplex_plus")]
    expected = compare_splits(*sides, rounds=100)  # type: ignore[arg-type]
    gain = found["open"]["duplex"]["difference"]
    assert (gain["auc"], gain["low"], gain["high"]) == pytest.approx(
        tuple(100 * value for value in (expected.difference["auc"].value, *expected.difference["auc"].interval))
    )
    assert gain["low"] < gain["auc"] < gain["high"]
    back = difference(runs["duplex_plus"], runs["duplex_open"], "open")
    assert back["auc"] == pytest.approx(-gain["auc"])
    assert back["by_split"] == pytest.approx([-one for one in gain["by_split"]])


def test_the_table_has_a_line_a_method(done, params, tmp_path):
    found = table(params, run_all(params, DATASETS, ROWS, [0], tmp_path), "duplex_plus")
    lines = markdown(found, "duplex_plus").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| `clip`", "| `duplex`", "| `duplex_plus`"]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].count(" to ") == 2 and lines[4].count(" to ") == 0


def test_the_rows_that_are_run_by_default_are_there(params):
    assert all(params.row(name) for name in splits.ROWS.split(","))
