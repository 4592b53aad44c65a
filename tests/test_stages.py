"""The stages one after another on a small data set: what they write, and that they never use test images."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest

from duplex import Recognizer
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params, load_params
from duplex.data.tables import read_manifest
from duplex.errors import DuplexError, UsageError
from duplex.features.file import IMPORTED
from duplex.labels import LabelSpace
from duplex.project.evaluate import evaluate_stage
from duplex.project.extract import extract
from duplex.project.prepare import prepare
from duplex.project.run import ProjectData, ProjectRun
from duplex.project.train import train_stage
from duplex.training.checkpoint import read_checkpoint_header
from tests.commands import command
from tests.features.conftest import update_checksums
from tests.projects import edited_params, encoded_project, interrupt, kill_and_resume_training, with_evaluation

pytestmark = pytest.mark.slow

__all__ = ["command"]
METHODS = ("clip", "csp", "cso", "duplex")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with params.yaml, few of the images of `shapes` as a table, and their features."""
    folder = tmp_path_factory.mktemp("project")
    encoded_project(folder, METHODS)
    return folder


@pytest.fixture(scope="module")
def params(folder: Path) -> Params:
    return load_params(folder / "params.yaml")


@pytest.fixture(scope="module")
def paths(folder: Path) -> ArtifactPaths:
    return ArtifactPaths(folder / "artifacts")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_from_features_to_metrics(params, paths, method):
    outcome = train_stage(ProjectRun("own", method, 0, params, paths))
    found = evaluate_stage(ProjectRun("own", method, 0, params, paths))
    run = paths.run("own", method, 0)
    assert json.loads(run.metrics.read_text()) == found
    assert 0 < found["closed"]["auc"] <= 100
    assert found["closed"]["auc_low"] <= found["closed"]["auc"] <= found["closed"]["auc_high"]
    assert found["val_auc"] == pytest.approx(100 * outcome.best_auc)
    assert ("open" in found) == (method != "duplex"), "duplex has another model for the open world, duplex_open"
    if "open" in found:
        assert found["open"]["unseen"] <= found["closed"]["unseen"]
    assert found["closed"]["hm_at_val_bias"] <= found["closed"]["hm"]
    assert (
        sum(group["test_images"] for group in found["groups"].values())
        == found["closed"]["images_seen"] + (found["closed"]["images_unseen"])
    )
    sums = {name for name in found if name.startswith("terms_")}
    assert len(sums) == {"cso": 2, "duplex": 6}.get(method, 0), "sums of the score terms of the method"
    assert all(0 <= found[name]["auc"] <= 100 for name in sums)
    at_ends = {name: group["accuracy_at_ends"] for name, group in found["groups"].items()}
    counts = {name: group["test_images"] for name, group in found["groups"].items()}
    assert at_ends["unseen"] == pytest.approx(found["closed"]["unseen"])
    seen = sum(at_ends[name] * count for name, count in counts.items() if name != "unseen" and count)
    assert seen / found["closed"]["images_seen"] == pytest.approx(found["closed"]["seen"])
    predictions = pd.read_csv(run.predictions)
    closed = predictions[predictions["world"] == "closed"]
    assert (closed["right"] == (closed["top1"] == closed["label"])).mean() > 0.99  # ties count as wrong
    assert not list(run.root.glob("*.partial"))
    assert not list(run.root.glob("*.writing"))


@pytest.mark.slow
def test_a_resplit_copies_the_features_of_its_data_set(params, paths, tmp_path):
    """The first of both is encoded; the other's cache has the same bytes as if it had been encoded."""
    params, alone = with_resplit(params, 0), ArtifactPaths(tmp_path / "alone")
    for where in (paths, alone):
        prepare(ProjectData(params, "own-split1", where))
        report = extract(ProjectData(params, "own-split1", where))
        assert report.resumed == (report.rows if where is paths else 0)
    copied = paths.features("own-split1")
    assert copied.read_bytes() == alone.features("own-split1").read_bytes()
    assert copied.read_bytes() != paths.features("own").read_bytes()
    prepare(ProjectData(params, "own", alone))
    report = extract(ProjectData(params, "own", alone))
    assert alone.features("own").read_bytes() == paths.features("own").read_bytes()
    assert report.resumed == report.rows
    train_stage(ProjectRun("own-split1", "cso", 0, params, paths))
    found = evaluate_stage(ProjectRun("own-split1", "cso", 0, params, paths))
    assert 0 < found["closed"]["auc"] <= 100
    with_blocks, elsewhere = with_resplit(params, 1), ArtifactPaths(tmp_path / "block inputs")
    for name in ("own", "own-split1"):
        prepare(ProjectData(with_blocks, name, elsewhere))
        report = extract(ProjectData(with_blocks, name, elsewhere))
    assert report.resumed == report.rows


def with_resplit(params: Params, block_inputs: int) -> Params:
    own = params.dataset("own")
    whole = own.model_copy(update={"encoder": own.encoder.model_copy(update={"block_inputs": block_inputs})})
    split = whole.model_copy(update={"source": replace(own.source, resplit=1)})
    return params.model_copy(update={"datasets": {**params.datasets, "own": whole, "own-split1": split}})


def test_the_same_seed_gives_the_same_bytes(params, paths):
    found = []
    for _ in range(2):
        train_stage(ProjectRun("own", "duplex", 3, params, paths))
        evaluate_stage(ProjectRun("own", "duplex", 3, params, paths))
        run = paths.run("own", "duplex", 3)
        found.append([path.read_bytes() for path in (run.checkpoint, run.history, run.metrics, run.curve)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_training_again_deletes_the_results_of_another_checkpoint_alone(folder, params, paths, tmp_path):
    train_stage(ProjectRun("own", "csp", 5, params, paths))
    evaluate_stage(ProjectRun("own", "csp", 5, params, paths))
    changed = tmp_path / "params.yaml"
    with edited_params(folder / "params.yaml", changed) as record:
        record["datasets"]["own"]["training"]["epochs"] = 1
    run = paths.run("own", "csp", 5)
    train_stage(ProjectRun("own", "csp", 5, params, paths))
    assert run.metrics.exists() and run.predictions.exists(), "the same checkpoint"
    train_stage(ProjectRun("own", "csp", 5, load_params(changed), paths))
    assert not run.metrics.exists() and not run.curve.exists() and not run.predictions.exists()


@pytest.mark.slow
def test_killed_and_resumed_training_ends_with_the_same_bytes(folder, paths):
    shipped = (folder / "params.yaml").read_text()
    with edited_params(folder / "params.yaml") as record:
        record["datasets"]["own"]["training"]["epochs"] = 12
    try:
        kill_and_resume_training(SimpleNamespace(folder=folder, paths=paths), "duplex")
    finally:
        (folder / "params.yaml").write_text(shipped)


def trained_content(run: RunPaths) -> list[Any]:
    """Return a run's history, and its checkpoint with the digest of its tensors but without that of all features."""
    header = read_checkpoint_header(run.checkpoint)
    training = {name: value for name, value in header.fields["training"].items() if name != "features"}
    return [run.history.read_bytes(), header.digest, {**header.fields, "training": training}]


def test_training_and_selection_do_not_use_test_images(params, paths):
    """Scramble every test row: checkpoint, its bias and threshold, and history stay the same, test metrics do not."""
    run = paths.run("own", "duplex_open", 5)
    train_stage(ProjectRun("own", "duplex_open", 5, params, paths))
    clean = trained_content(run)
    auc = evaluate_stage(ProjectRun("own", "duplex_open", 5, params, paths))["open"]["auc"]
    rows = np.flatnonzero(read_manifest(paths.manifest("own"))["split"] == "test")
    with h5py.File(paths.features("own"), "r+") as file:
        healthy = file["cls"][...]
        poisoned = healthy.copy()
        poisoned[rows] = healthy[rows][::-1] * 3
        file["cls"][...] = poisoned
        update_checksums(file)
    try:
        train_stage(ProjectRun("own", "duplex_open", 5, params, paths))
        assert trained_content(run) == clean
        assert evaluate_stage(ProjectRun("own", "duplex_open", 5, params, paths))["open"]["auc"] != auc
    finally:
        with h5py.File(paths.features("own"), "r+") as file:
            file["cls"][...] = healthy
            update_checksums(file)


def test_score_terms_are_measured_if_evaluation_terms_is_true(params, paths):
    train_stage(ProjectRun("own", "cso", 0, params, paths))
    found, plain = (
        evaluate_stage(ProjectRun("own", "cso", 0, with_evaluation(params, terms=terms), paths))
        for terms in (True, False)
    )
    assert set(found) - set(plain) == {"terms_semantic", "terms_factors"}
    assert (found.pop("terms"), plain.pop("terms")) == (True, False)
    assert {name: found[name] for name in plain} == plain
    assert set(found["terms_factors"]) == {"seen", "unseen", "hm", "auc"}


def write_vectors(path: Path, paths: ArtifactPaths, width: int, seed: int) -> Path:
    labels, rng = LabelSpace.load(paths.labels("own")), np.random.default_rng(seed)
    rows = {word: rng.normal(size=width) for word in (*labels.states, *labels.objects)}
    path.write_text("".join(f"{word} {' '.join(f'{v:.4f}' for v in row)}\n" for word, row in rows.items()))
    return path


def test_feasibility_uses_the_word_vectors_of_a_file(folder, params, paths):
    params = with_evaluation(params, feasibility="words")
    train_stage(ProjectRun("own", "clip", 0, params, paths))
    own = evaluate_stage(ProjectRun("own", "clip", 0, params, paths))["open"]["threshold"]
    words = write_vectors(folder / "words.txt", paths, 8, 0)
    changed = with_evaluation(params, word_vectors=words)
    train_stage(ProjectRun("own", "clip", 0, changed, paths))
    other = evaluate_stage(ProjectRun("own", "clip", 0, changed, paths))["open"]["threshold"]
    assert other != own
    with pytest.raises(DuplexError, match=r"calibration.word_vectors was .*words.txt"):
        evaluate_stage(ProjectRun("own", "clip", 0, params, paths))
    model = paths.run("own", "clip", 0).root
    wanted = Recognizer.load(model, device="cpu", word_vectors=str(words)).candidates("open")
    with pytest.raises(UsageError, match=r"word_vectors: absent\.txt does not exist; expected a text file"):
        Recognizer.load(model, device="cpu", word_vectors="absent.txt")
    assert wanted.feasible.sum() == json.loads(paths.run("own", "clip", 0).metrics.read_text())["open"]["feasible"]
    assert len(Recognizer.load(model, device="cpu").candidates("closed").pairs) > 0, "no word is compared there"
    with pytest.raises(UsageError, match="trained with other word vectors"):
        Recognizer.load(model, device="cpu").candidates("open")


@pytest.mark.slow
def test_interrupted_training_does_not_continue_with_other_word_vectors(folder, params, paths, capsys, monkeypatch):
    """Vectors of the same width would fit, and give other results."""
    first, *others = (write_vectors(folder / f"{n}.txt", paths, width, n) for n, width in enumerate((8, 8, 9)))
    for other in others:
        interrupt(monkeypatch, 2)
        with pytest.raises(KeyboardInterrupt):
            train_stage(ProjectRun("own", "compcos", 0, with_evaluation(params, word_vectors=first), paths))
        capsys.readouterr()
        found = train_stage(ProjectRun("own", "compcos", 0, with_evaluation(params, word_vectors=other), paths)).history
        assert "settings, data, code or hardware changed since" in capsys.readouterr().err
        again = train_stage(ProjectRun("own", "compcos", 0, with_evaluation(params, word_vectors=other), paths)).history
        assert found == again


def test_a_method_without_a_world_to_evaluate_is_refused(params, paths):
    train_stage(ProjectRun("own", "duplex", 4, params, paths))
    with pytest.raises(UsageError, match=r"evaluation.worlds is \['open'\], but duplex is for the closed world alone"):
        evaluate_stage(ProjectRun("own", "duplex", 4, with_evaluation(params, worlds=("open",)), paths))
    assert not paths.run("own", "duplex", 4).metrics.exists()


def test_imported_features_are_not_encoded(params, paths):
    own = params.dataset("own")
    theirs = own.model_copy(update={"encoder": own.encoder.model_copy(update={"name": IMPORTED})})
    with pytest.raises(UsageError, match="set `features` in params"):
        extract(ProjectData(params.model_copy(update={"datasets": {"own": theirs}}), "own", paths))


def open_metrics(params, paths, **changes):
    """Train and evaluate `closed_form` with some settings of the evaluation; return the metrics of the open world."""
    asked = with_evaluation(params, **changes)
    train_stage(ProjectRun("own", "closed_form", 0, asked, paths))
    return evaluate_stage(ProjectRun("own", "closed_form", 0, asked, paths))["open"]


@pytest.mark.slow
def test_every_rule_of_feasibility_has_the_auc_over_all_pairs_and_auto_that_at_the_threshold(params, paths):
    rules = ("auto", "words", "none")
    auto, words, none = (open_metrics(params, paths, feasibility=rule) for rule in rules)
    assert auto["auc_all"] == words["auc_all"] == none["auc_all"] == none["auc"]
    assert {"threshold", "feasible"} <= set(words)
    assert (auto["auc_all_low"], auto["auc_all_high"]) == (none["auc_low"], none["auc_high"])
    assert not {"threshold", "words", "feasible"} & set(none)
    assert auto["auc"] == none["auc"] and "threshold" not in auto  # no threshold pays here
    assert auto["words"]["val_auc_gain"] <= auto["words"]["val_auc_gain_se"]
    assert auto["words"] == {name: words[name] for name in auto["words"]}
