"""The comparison of methods: tuned rates, paired differences, worlds, and stored runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks import methods
from benchmarks.methods import Bench, compared, difference, shown_in, tune
from duplex.artifacts import RunPaths
from duplex.config.params import load_params
from tests.subprocesses import ROOT


@pytest.fixture
def bench(tmp_path):
    return Bench(load_params(ROOT / "params.yaml"), "shapes", tmp_path)


def predictions(run: RunPaths, gain: float, worlds=("closed", "open"), images=40, seed=0) -> RunPaths:
    """Write random margins, those of seen pairs raised by `gain`."""
    random = np.random.default_rng(seed)
    table = pd.DataFrame({"row": range(images), "seen": [1, 0] * (images // 2), "margin": random.normal(size=images)})
    table.loc[table["seen"] == 1, "margin"] += gain
    run.root.mkdir(parents=True)
    pd.concat([table.assign(world=world) for world in worlds]).to_csv(run.predictions, index=False)
    return run


def test_a_rate_replaces_every_other_learning_rate(bench):
    settings = bench.at("cso", 0.25).training("shapes", "cso")
    assert settings.learning_rate == 0.25
    assert settings.epochs == bench.params.training("shapes", "cso").epochs
    assert Bench(bench.params, "shapes", bench.folder, epochs=2).at("cso", 0.1).training("shapes", "cso").epochs == 2


def test_the_rate_with_the_best_mean_is_chosen(bench, monkeypatch):
    auc = {(1e-3, 1): 0.2, (1e-3, 2): 0.4, (1e-2, 1): 0.35, (1e-2, 2): 0.35}
    for rate, seed in auc:
        run = RunPaths(bench.folder / f"{rate:g}" / str(seed))
        run.root.mkdir(parents=True)
        run.timing.write_text('{"parameters": 3}')
    monkeypatch.setattr(
        Bench, "run", lambda self, name, rate, seed, tested: RunPaths(self.folder / f"{rate:g}" / f"{seed}")
    )
    monkeypatch.setattr(
        methods,
        "read_record",
        lambda path: type("R", (), {"val_auc": auc[float(path.parent.parent.name), int(path.parent.name)]}),
    )
    rate, found = tune(bench, "cso", [1e-3, 1e-2], [1, 2])
    assert rate == 1e-2
    assert found == pytest.approx({"0.001": 30.0, "0.01": 35.0})


def test_stored_runs_are_not_repeated(bench, monkeypatch):
    done = []

    def trained(params, dataset, name, seed, out):
        done.append("train")
        out.checkpoint.write_text("")

    def tested(params, dataset, name, seed, out):
        done.append("evaluate")
        out.metrics.write_text("{}")

    monkeypatch.setattr(methods.train, "run", trained)
    monkeypatch.setattr(methods.evaluate, "run", tested)
    bench.run("cso", 1e-3, 0, tested=False)
    bench.run("cso", 1e-3, 0, tested=False)
    bench.run("cso", 1e-3, 0, tested=True)
    bench.run("cso", 1e-3, 0, tested=True)
    assert done == ["train", "evaluate"]
    (bench.folder / "shapes" / "cso" / "0.001" / "0" / "key.json").write_text("of other code")
    bench.run("cso", 1e-3, 0, tested=True)
    assert done == ["train", "evaluate"] * 2


def test_differences_are_paired_and_in_common_worlds_only(bench, tmp_path):
    better = [predictions(RunPaths(tmp_path / f"a{k}"), 1.0) for k in range(2)]
    closed = [predictions(RunPaths(tmp_path / f"b{k}"), 0.0, worlds=("closed",)) for k in range(2)]
    opened = [predictions(RunPaths(tmp_path / f"c{k}"), 0.5, worlds=("open",)) for k in range(2)]
    assert difference(closed, better, "open") is None
    gain = difference(closed, better, "closed")
    assert gain["auc"] > 0 and gain["low"] < gain["auc"] < gain["high"]
    runs = {"cso": better, "duplex": closed, "duplex_open": opened}
    found = compared(bench, runs, "cso", ["cso", "duplex"])
    assert found.keys() == {"duplex"}  # not with itself; in the open world duplex_open stands for it
    assert found["duplex"].keys() == {"closed", "open"}
    assert found["duplex"]["closed"] == gain
    assert shown_in(bench.params, "duplex", "open") is None
