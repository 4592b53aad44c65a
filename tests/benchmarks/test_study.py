import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import study
from benchmarks.study import Bench, difference, margins, measured, results, run_all, table, tune, with_rows
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import load_params
from duplex.errors import UsageError
from duplex.evaluation.intervals import compare_splits
from tests.subprocesses import ROOT

GAINS = {"clip": 0.0, "duplex": 0.4, "duplex_open": 0.2, "dual": 1.0, "cso": 0.5, "dual*cso": 0.5, "clip*dual": 0.5}
ROWS = ["clip", "duplex", "duplex_open", "dual"]
DATASETS = ["shapes-split1", "shapes-split2"]


def write(out: RunPaths, gain: float, number: int, worlds, parameters: int) -> None:
    """Write random margins, those of seen pairs raised by `gain`."""
    random = np.random.default_rng(number)
    rows = pd.DataFrame({"row": range(60), "seen": [1, 0] * 30, "margin": random.normal(size=60)})
    rows.loc[rows["seen"] == 1, "margin"] += gain
    out.root.mkdir(parents=True)
    pd.concat([rows.assign(world=world) for world in worlds]).to_csv(out.predictions, index=False)
    metrics: dict[str, dict[str, Any]] = {
        world: {"seen": 1.0, "unseen": 2.0, "hm": 1.5, "auc": 10 * gain + number} for world in worlds
    }
    if "open" in worlds:
        metrics["open"] |= {"auc_all": 8.0 + number, "words": {"auc": 6.0 + number}}
    out.metrics.write_text(json.dumps(metrics))
    out.timing.write_text(json.dumps({"parameters": parameters, "seconds_per_epoch": 0.5}))


@pytest.fixture
def params():
    shipped = load_params(ROOT / "params.yaml")
    splits = dict.fromkeys(DATASETS, shipped.dataset("shapes"))
    return shipped.model_copy(update={"datasets": {**shipped.datasets, **splits}})


@pytest.fixture
def done(monkeypatch) -> list[tuple[str, str, int]]:
    """Replace training by writing results; the runs in their order."""
    order: list[tuple[str, str, int]] = []

    def run(self, name, seed, tested, rate=None):
        if name == "troika":
            raise UsageError("it needs patch tokens")
        order.append((self.dataset, name, seed))
        out = RunPaths(self.folder / self.dataset / name / str(seed))
        parameters = 0 if name == "clip" or "*" in name else 10
        write(out, GAINS[name], len(order), self.params.entry(name).worlds, parameters)
        return out

    def record(checkpoint):
        auc = 0.2 + 0.02 * GAINS[checkpoint.parent.parent.name] * (1 + int(checkpoint.parent.name))
        return SimpleNamespace(val_auc=auc, val_auc_all=0.1)

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(study, "read_record", record)
    monkeypatch.setattr(study, "compare_splits", partial(compare_splits, rounds=100))
    return order


@pytest.fixture
def benches(params, tmp_path):
    rows = ["dual*cso", "clip*dual"]
    return [Bench(with_rows(params, rows, 1e-3, None), dataset, tmp_path) for dataset in DATASETS]


def test_runs_go_seed_by_seed_and_methods_without_training_run_once(done, benches, tmp_path):
    runs, left_out = run_all(benches, [*ROWS, "troika"], [0, 1])
    assert left_out == {"troika": "it needs patch tokens"} and list(runs) == ROWS
    assert [seed for _, _, seed in done] == [0] * 8 + [1] * 6
    assert [name for _, name, seed in done if seed] == ["duplex", "duplex_open", "dual"] * 2
    assert runs["clip"][1][0] is runs["clip"][1][1]
    assert runs["duplex"][1][1].root == tmp_path / "shapes-split2" / "duplex" / "1"


def test_numbers_are_means_over_splits_of_means_over_seeds(done, benches):
    runs = run_all(benches, ["dual"], [0, 1])[0]["dual"]
    found = measured(runs, "closed")
    assert (found["auc"], found["auc_error"]) == pytest.approx((12.5, 0.5**0.5))
    assert measured(runs[:1], "closed")["auc_error"] == pytest.approx(1)  # of one split: over seeds
    found = measured(runs, "open")
    assert (found["auc_all"], found["auc_by_words"]) == (10.5, 8.5)


def test_differences_equal_those_of_the_margins_in_common_worlds(done, benches):
    runs, _ = run_all(benches, ROWS, [0, 1])
    records = results(benches, runs, ["dual"], tested=True)
    named = {(record["method"], record["world"]): record for record in records}
    assert {name for name, _ in named} == {"clip", "duplex", "dual"}
    assert not named["dual", "closed"]["differences"]
    own, other = ([[margins(run, "open") for run in split] for split in runs[row]] for row in ("duplex_open", "dual"))
    expected = compare_splits(other, own, rounds=100).difference["auc"]
    gain = named["duplex", "open"]["differences"]["dual"]
    assert [gain["auc"], gain["low"], gain["high"]] == pytest.approx(
        [100 * value for value in (expected.value, *expected.interval)]
    )
    back = difference(runs["duplex_open"], runs["dual"], "open")
    assert back["auc"] == pytest.approx(-gain["auc"])
    one = difference(runs["dual"][:1], runs["duplex"][:1], "closed")
    assert one["low"] < one["auc"] < one["high"]
    row = table(records, ["dual"])[1]
    assert (row["method"], row["over dual"]) == (
        "duplex",
        f"{named['duplex', 'closed']['differences']['dual']['auc']:+.1f}",
    )


def test_validation_tables_have_means_and_paired_differences(done, benches):
    runs, _ = run_all(benches, ["cso", "dual"], [0, 1], tested=False)
    cso, dual, cso_open, _ = table(results(benches, runs, ["dual"], tested=False), ["dual"])
    assert (cso["validation AUC"], cso["over dual"], cso["over dual ±"]) == ("21.5", "-1.5", "0.3")
    assert (dual["validation AUC"], dual["over dual"]) == ("23.0", "")
    assert (cso_open["validation AUC"], cso_open["over dual"]) == ("10.0", "+0.0")
    assert "S" not in cso and "AUC" not in cso


def test_rows_change_options_and_blocks(params):
    names = ["cso@4", "cso@2:lora", "duplex{graph: false, momentum: 0.5}@1", "dual{weights: [0, 0, 1]}"]
    nested = "duplex{reading: {edges: label, diagonal: false}, graph: true}"
    assert study.split_rows(",".join([*names, nested])) == [*names, nested]
    more = with_rows(params, names, 3e-4, 6)
    assert more.entry("cso@4").finetune == {"blocks": 4, "adapter": "full", "learning_rate": 3e-4}
    assert more.training("shapes", "cso@4").epochs == 6
    assert more.training("shapes", "cso@4").schedule == "cosine"
    assert more.entry("cso@2:lora").finetune["adapter"] == "lora"
    changed = more.method("duplex{graph: false, momentum: 0.5}@1")
    assert (changed.graph, changed.momentum) == (False, 0.5)
    assert more.method("dual{weights: [0, 0, 1]}").weights == (0, 0, 1)
    assert more.entry("cso") == params.entry("cso")
    assert with_rows(params, ["cso@2"], 1e-3, None).training("shapes", "cso@2") == params.training("shapes", "cso")


def test_a_published_form_keeps_rate_batch_epochs_and_schedule_and_frozen_towers(params):
    more = with_rows(params, ["csp:published", "gipcol:published", "troika:published{heads: 2}"], 1e-3, None)
    form = {"weight_decay": 1e-5, "word_dropout": 0.2, "select": "last"}
    assert more.training("shapes", "csp:published") == replace(params.training("shapes", "csp"), **form)
    gipcol, troika = more.method("gipcol:published"), more.method("troika:published{heads: 2}")
    assert (gipcol.words, gipcol.width, gipcol.network_rate) == ("replaced", 4096, None)
    assert (troika.disentangler, troika.heads, troika.adapter) == ("batch_norm", 2, params.method("troika").adapter)
    assert more.finetune("troika:published{heads: 2}", "shapes") is None


def test_a_rate_replaces_that_of_the_blocks_or_else_of_training(params, tmp_path):
    bench = Bench(with_rows(params, ["cso@2"], 1e-3, None), "shapes", tmp_path)
    usual = params.training("shapes", "cso")
    changed = bench.at("cso", 0.25).training("shapes", "cso")
    assert (changed.learning_rate, changed.epochs) == (0.25, usual.epochs)
    deep = bench.at("cso@2", 0.25)
    assert deep.training("shapes", "cso@2").learning_rate == usual.learning_rate
    assert deep.finetune("cso@2", "shapes").learning_rate == 0.25
    assert (bench.rate("cso"), bench.rate("cso@2")) == (usual.learning_rate, 1e-3)
    assert Bench(params, "shapes", tmp_path, epochs=2).at("cso", 0.1).training("shapes", "cso").epochs == 2


def test_the_rate_with_the_best_mean_is_chosen(params, tmp_path, monkeypatch):
    auc = {(1e-3, 1): 0.2, (1e-3, 2): 0.4, (1e-2, 1): 0.35, (1e-2, 2): 0.35}

    def run(self, name, seed, tested, rate):
        out = RunPaths(tmp_path / f"{rate:g}" / str(seed))
        out.root.mkdir(parents=True)
        out.timing.write_text('{"parameters": 3}')
        return out

    def record(path):
        return SimpleNamespace(val_auc=auc[float(path.parent.parent.name), int(path.parent.name)])

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(study, "read_record", record)
    assert tune([Bench(params, "shapes", tmp_path)], "cso", [1e-3, 1e-2], [1, 2]) == 1e-2


def test_stored_runs_are_not_repeated(params, tmp_path, monkeypatch):
    done = []

    def trained(run):
        done.append("train")
        run.files.checkpoint.write_text("")

    def tested(run):
        done.append("evaluate")
        run.files.metrics.write_text("{}")

    monkeypatch.setattr(study, "train_stage", trained)
    monkeypatch.setattr(study, "evaluate_stage", tested)
    bench = Bench(params, "shapes", tmp_path)
    for is_tested in (False, False, True, True):
        bench.run("cso", 0, tested=is_tested, rate=1e-3)
    assert done == ["train", "evaluate"]
    (tmp_path / "shapes" / "cso" / "0.001" / "0" / "key.json").write_text("of other code")
    bench.run("cso", 0, tested=True, rate=1e-3)
    assert done == ["train", "evaluate"] * 2


def test_a_product_combines_the_runs_of_the_study(done, benches):
    bench = benches[0]
    assert bench.params.entry("dual*cso").members == ("dual", "cso")
    runs, _ = run_all(benches, ["clip", "dual", "clip*dual"], [0, 1])
    assert [seed for dataset, name, seed in done if name == "clip" and dataset == DATASETS[0]] == [0, 1]
    assert runs["clip*dual"][0][0].root != runs["clip*dual"][0][1].root  # the seeds have members of their own
    places = study.StudyPaths(bench, "dual", 0.5)
    assert places.run(DATASETS[0], "dual", 1).root == bench.place("dual", 0.5, 1).root
    assert places.run(DATASETS[0], "cso", 1).root == bench.place("cso", bench.rate("cso"), 1).root
    assert places.features(DATASETS[0]) == ArtifactPaths().features(DATASETS[0])
