"""The comparison over re-splits: order of runs, means, paired differences and the table."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks import splits
from benchmarks.methods import Bench, margins
from benchmarks.splits import difference, measured, run_all, table, validation_table, with_blocks
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import load_params
from duplex.evaluation.uncertainty import compare_splits
from tests.benchmarks.test_methods import predictions
from tests.subprocesses import ROOT

GAINS = {"clip": 0.0, "duplex": 0.4, "duplex_open": 0.2, "dual": 1.0, "cso": 0.5, "dual*cso": 0.5, "clip*dual": 0.5}
ROWS = ["clip", "duplex", "duplex_open", "dual"]
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
    """Replace training by writing results; return the runs in their order."""
    order: list[tuple[str, str, int]] = []

    def run(self, name, rate, seed, tested):
        assert tested and rate == params.dataset("shapes").training.learning_rate
        order.append((self.dataset, name, seed))
        out = RunPaths(self.folder / self.dataset / name / str(seed))
        parameters = 0 if name == "clip" or "*" in name else 10
        write(out, GAINS[name], len(order), self.params.entry(name).worlds, parameters)
        return out

    monkeypatch.setattr(Bench, "run", run)
    return order


def write(out: RunPaths, gain: float, number: int, worlds, parameters: int) -> None:
    predictions(out, gain, worlds, images=60, seed=number)
    metrics = {world: {"seen": 1.0, "unseen": 2.0, "hm": 1.5, "auc": 10 * gain + number} for world in worlds}
    out.metrics.write_text(json.dumps(metrics))
    out.timing.write_text(json.dumps({"parameters": parameters}))


def test_runs_go_seed_by_seed_and_methods_without_training_run_once(done, params, tmp_path):
    runs = run_all(params, DATASETS, ROWS, [0, 1], tmp_path)
    assert [seed for _, _, seed in done] == [0] * 8 + [1] * 6
    assert [name for _, name, seed in done if seed] == ["duplex", "duplex_open", "dual"] * 2
    assert all(len(split) == 2 for row in runs.values() for split in row)
    assert runs["clip"][1][0] is runs["clip"][1][1]
    assert runs["duplex"][1][1].root == tmp_path / "shapes-split2" / "duplex" / "1"


def test_numbers_are_means_over_splits_of_means_over_seeds(done, params, tmp_path):
    runs = run_all(params, DATASETS, ["dual"], [0, 1], tmp_path)["dual"]
    found = measured(runs, "closed")
    assert found["auc_by_split"] == pytest.approx([10 + (1 + 3) / 2, 10 + (2 + 4) / 2])
    assert (found["auc"], found["auc_deviation"]) == pytest.approx((12.5, 0.5**0.5))
    assert (found["seen"], found["unseen"]) == (1.0, 2.0)


def test_differences_equal_those_of_the_margins_in_common_worlds(done, params, tmp_path):
    runs = run_all(params, DATASETS, ROWS, [0, 1], tmp_path)
    found = table(params, runs, "dual")
    assert set(found["closed"]) == set(found["open"]) == {"clip", "duplex", "dual"}
    assert "difference" not in found["closed"]["dual"]
    sides = [[[margins(run, "open") for run in split] for split in runs[row]] for row in ("duplex_open", "dual")]
    expected = compare_splits(*sides, rounds=100)  # type: ignore[arg-type]
    gain = found["open"]["duplex"]["difference"]
    assert (gain["auc"], gain["low"], gain["high"]) == pytest.approx(
        tuple(100 * value for value in (expected.difference["auc"].value, *expected.difference["auc"].interval))
    )
    assert gain["low"] < gain["auc"] < gain["high"]
    back = difference(runs["dual"], runs["duplex_open"], "open")
    assert back["auc"] == pytest.approx(-gain["auc"])
    assert back["by_split"] == pytest.approx([-one for one in gain["by_split"]])


def test_the_default_methods_exist(params):
    assert all(params.entry(name) for name in splits.METHODS.split(","))


def test_a_method_with_blocks_is_an_entry_of_its_own(params):
    more = with_blocks(params, ["cso", "cso@4"], 3e-4, 6)
    assert more.entry("cso@4").finetune == {"blocks": 4, "adapter": "full", "learning_rate": 3e-4}
    assert more.training("shapes", "cso@4").epochs == 6
    assert more.training("shapes", "cso@4").schedule == "cosine"
    assert more.entry("cso") == params.entry("cso")
    assert with_blocks(params, ["cso@2"], 1e-3, None).training("shapes", "cso@2") == params.training("shapes", "cso")


def test_the_open_world_has_its_numbers_by_rule(done, params, tmp_path):
    runs = run_all(params, DATASETS, ["clip", "dual"], [0], tmp_path)
    for number, split in enumerate(runs["dual"]):
        found = json.loads(split[0].metrics.read_text())
        found["open"] |= {"auc_all": 8.0 + number, "words": {"auc": 6.0 + number}}
        split[0].metrics.write_text(json.dumps(found))
    rows = table(params, runs, "dual")["open"]
    assert (rows["dual"]["auc_all"], rows["dual"]["auc_by_words"]) == (8.5, 6.5)
    assert "auc_all" not in rows["clip"]
    lines = splits.markdown({"closed": {}, "open": rows}, "dual").splitlines()
    assert lines[0].endswith("| open AUC all pairs | open AUC by words |")
    assert lines[2].endswith("| – | – |") and lines[3].endswith("| 8.5 | 6.5 |")


def test_a_product_combines_the_runs_of_the_study(done, params, tmp_path):
    rows = ["dual", "cso", "dual*cso"]
    more = with_blocks(params, rows, 3e-4, None)
    assert more.entry("dual*cso").kind == "product" and more.entry("dual*cso").members == ("dual", "cso")
    runs = run_all(more, DATASETS, rows, [0, 1], tmp_path)
    assert [name for _, name, _ in done[:3]] == rows
    assert runs["dual*cso"][0][0].root != runs["dual*cso"][0][1].root  # the seeds have members of their own
    places = splits.StudyPaths(more, tmp_path)
    bench = Bench(more, DATASETS[0], tmp_path)
    assert (
        places.run(DATASETS[0], "cso", 1).root
        == bench.place("cso", more.training("shapes", "cso").learning_rate, 1).root
    )
    assert places.features(DATASETS[0]) == ArtifactPaths().features(DATASETS[0])


def test_a_member_of_a_product_that_trains_nothing_runs_once_per_seed(done, params, tmp_path):
    rows = ["clip", "dual", "clip*dual"]
    run_all(with_blocks(params, rows, 3e-4, None), DATASETS, rows, [0, 1], tmp_path)
    assert [seed for dataset, name, seed in done if name == "clip" and dataset == DATASETS[0]] == [0, 1]


def test_validation_tables_have_means_and_paired_differences(monkeypatch, tmp_path):
    def read(checkpoint):
        _, method, seed = checkpoint.parent.parts[-3:]
        gain = {"cso": 0.0, "dual": 0.02, "clip": 0.01}[method] * (1 + int(seed))
        return SimpleNamespace(val_auc=0.2 + gain, val_auc_all=0.1)

    monkeypatch.setattr(splits, "read_record", read)
    runs = {
        row: [[RunPaths(tmp_path / name / row / seed) for seed in "01"] for name in DATASETS] for row in ("cso", "dual")
    }
    lines = validation_table(runs, "dual").splitlines()
    assert lines[2] == "| `cso` | 20.0 | +3.0 ± 0.6 | 10.0 | +0.0 ± 0.0 |"
    assert lines[3] == "| `dual` | 23.0 |  | 10.0 |  |"
    monkeypatch.setattr(splits, "read_record", lambda _: SimpleNamespace(val_auc=0.2, val_auc_all=None))
    assert validation_table(runs, "dual").splitlines()[2] == "| `cso` | 20.0 | +0.0 ± 0.0 | – |  |"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--methods", "cso", "--of", "dual"], "--of is dual, which is not among --methods"),
        (["--validation", "--json"], "--validation prints its own table"),
        (["--validation", "--csv", "a.csv"], "--validation prints its own table"),
        (["--splits", "1"], "a deviation between splits needs two"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_trained(monkeypatch, capsys, words, says):
    monkeypatch.setattr("sys.argv", ["splits", *words])
    with pytest.raises(SystemExit):
        splits.main()
    assert says in capsys.readouterr().err


def test_without_a_test_no_run_is_evaluated(monkeypatch, params, tmp_path, capsys):
    tested_runs: list[bool] = []

    def run(self, name, rate, seed, tested):
        tested_runs.append(tested)
        out = RunPaths(self.folder / self.dataset / name / str(seed))
        out.root.mkdir(parents=True)
        out.timing.write_text(json.dumps({"parameters": 1}))
        return out

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(splits, "read_record", lambda path: SimpleNamespace(val_auc=0.25, val_auc_all=None))
    run_all(params, DATASETS, ["dual"], [0], tmp_path, tested=False)
    assert tested_runs == [False, False]
    assert "shapes-split1 dual seed 0: validation: closed 25.00  all pairs –" in capsys.readouterr().err


def test_a_single_split_is_refused_before_anything_is_trained(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["splits", "--splits", "1", "--methods", "dual"])
    with pytest.raises(SystemExit):
        splits.main()
    assert "a deviation between splits needs two of them" in capsys.readouterr().err
