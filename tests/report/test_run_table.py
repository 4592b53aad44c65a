import json

import pandas as pd
import pytest

from duplex.project.report import read_results
from duplex.report.tables import RUN_COLUMNS, run_table


@pytest.fixture
def table(project) -> pd.DataFrame:
    return pd.read_csv(project.paths.runs)


def test_there_is_one_line_per_run_and_world(project, table):
    assert tuple(table.columns) == RUN_COLUMNS
    found = list(table[["dataset", "method", "seed", "world"]].itertuples(index=False, name=None))
    worlds = {"clip": ("closed", "open"), "duplex": ("closed",), "duplex_open": ("open",)}
    assert found == [("own", name, seed, world) for name, both in worlds.items() for seed in (0, 1) for world in both]


def test_numbers_are_those_of_the_run(project, table):
    for line in table.itertuples():
        files = project.paths.run("own", line.method, line.seed)
        metrics, timing = json.loads(files.metrics.read_text()), json.loads(files.timing.read_text())
        assert [line.auc, line.hm, line.seen, line.unseen] == pytest.approx(
            [metrics[line.world][name] for name in ("auc", "hm", "seen", "unseen")]
        )
        assert (line.val_auc, line.epoch) == pytest.approx((metrics["val_auc"], metrics["epoch"]))
        assert pd.isna(line.val_auc_all) == (line.method == "duplex"), "which is not scored over all pairs"
        epochs = len(pd.read_csv(files.history)) - 1
        assert line.seconds == pytest.approx(epochs * timing["seconds_per_epoch"])


def test_options_are_those_that_params_changes(table):
    options = {name: json.loads(lines.iloc[0]) for name, lines in table.groupby("method")["options"]}
    assert options["duplex"] == {"kind": "duplex", "world": "closed", "momentum": 0.9}
    assert options["clip"]["paths"] == "composition" and options["clip"]["losses"] == []


def test_runs_without_files_are_left_out(project):
    params = project.params.model_copy(update={"run": project.params.run.model_copy(update={"seeds": (7,)})})
    assert run_table(read_results(params, {}, project.paths), {}).empty


def test_validation_comes_first_in_the_metrics_that_dvc_shows(project, table):
    metrics = json.loads(project.paths.metrics.read_text())["own"]
    means = table.groupby("method")[["val_auc", "val_auc_all"]].mean()
    for name, tables in metrics.items():
        assert next(iter(tables)) == "validation" and sum(map(len, tables.values())) <= 14
        assert tables["validation"]["auc"] == pytest.approx(means.loc[name, "val_auc"])
    assert set(metrics) == {"clip", "duplex"}
    shown = metrics["duplex"]["validation"]["auc_all"]
    assert shown == pytest.approx(means.loc["duplex_open", "val_auc_all"]), "of the model of the open world"
