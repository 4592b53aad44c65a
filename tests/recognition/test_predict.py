"""`duplex predict`, as a shell runs it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from duplex.config.artifacts import ArtifactPaths
from duplex.errors import UsageError
from tests.recognition.test_recognizer import damaged
from tests.subprocesses import duplex


def predict(*words: object, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return duplex("predict", *words, given=given)


@pytest.mark.slow
def test_a_folder_a_pattern_and_stdin_name_the_same_files(project):
    folder = project.pictures()[0].parent
    model = ("--model", project.run(), "--num-workers", 0, "--format", "jsonl")
    given = "\n".join(sorted(map(str, folder.rglob("*.png"))))
    ways = [predict(folder, *model), predict(f"{folder}/*.png", *model), predict("-", *model, given=given)]
    assert [way.returncode for way in ways] == [0, 0, 0], ways[0].stderr
    assert ways[0].stdout == ways[1].stdout == ways[2].stdout
    records = [json.loads(line) for line in ways[0].stdout.splitlines()]
    assert [record["image"] for record in records] == given.splitlines()
    for record in records:
        assert len(record["top"]) == len(record["states"]) == len(record["objects"]) == 3
        assert {"state", "object", "score", "probability"} <= set(record["top"][0])


@pytest.mark.slow
def test_without_a_model_the_best_run_answers(project):
    from duplex.training.checkpoint import read_record

    closed = ("clip", "duplex", "closed_form", "duplex_plus")
    best = max(closed, key=lambda name: read_record(project.run(name) / "checkpoint.safetensors").val_auc)
    found = predict(project.pictures()[0], "--num-workers", 0)
    assert found.returncode == 0
    assert f"model: artifacts/own/{best}/0 (validation AUC" in found.stderr
    assert "model: artifacts/own/" in predict(project.pictures()[0], "--world", "open").stderr


def test_names_on_stdin_need_not_be_text(project, tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9\x0c.png"
    shutil.copy(project.pictures()[0], name)
    program = "from duplex.cli import main; main()"
    line = [sys.executable, "-c", program, "predict", "-", "--model", project.run(), "--num-workers", "0"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    found = subprocess.run(line, input=name + b"\n", capture_output=True, env=env, check=False)
    assert found.returncode == 0 and rb"caf\udce9" in found.stdout, found.stderr


@pytest.mark.parametrize("bias", ["nan", "inf"])
def test_a_bias_is_a_number(project, bias):
    found = predict(project.pictures()[0], "--bias", bias)
    assert found.returncode == 2 and f"--bias is {bias}; give a number" in found.stderr


def test_where_only_the_open_world_was_trained_for_its_run_answers(project, tmp_path):
    from duplex.stages.trained_runs import best_run

    paths = ArtifactPaths(tmp_path)
    with pytest.raises(UsageError, match=r"holds no trained run for this; .* or name one with --run"):
        best_run(paths=paths, hint="name one with --run")
    for method, world in (("open", "open"), ("closed", "closed")):
        run = paths.run("own", method, 0)
        run.root.mkdir(parents=True)
        source = project.run("duplex") / "checkpoint.safetensors"
        with safe_open(source, "pt") as file:
            record = json.loads(file.metadata()["duplex"])
        record["calibration"] = {world: record["calibration"]["closed"]}
        record["val_auc"] += world == "open"
        save_file(load_file(source), run.checkpoint, {"duplex": json.dumps(record)})
        assert best_run(paths=paths).files.root == run.root, "the closed world's before any other, whatever its AUC"
        assert best_run(world, paths).files.root == run.root


def test_bad_files_get_a_line_and_exit_code_3(project, tmp_path):
    (tmp_path / "bad.png").write_text("nothing")
    out = tmp_path / "answers.csv"
    found = predict(
        project.pictures()[0], tmp_path, "--model", project.run(), "--format", "csv", "--out", out, "--top", 2
    )
    assert found.returncode == 3 and "1 of 2 files gave no picture" in found.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["rank"] for row in rows] == ["1", "2", ""]
    assert rows[2]["error"] == "not a picture"
    assert not list(tmp_path.glob("*.partial"))


def test_words_from_the_command_line_and_a_file(project, tmp_path):
    words = tmp_path / "words.csv"
    words.write_text("state,object\ndark,picture\n")
    found = predict(
        project.pictures()[0], "--model", project.run(), "--words", words, "--add", "striped,photo", "--top", 200
    )
    assert found.returncode == 0, found.stderr
    assert "dark picture" in found.stdout and "(new object)" in found.stdout and "striped photo" in found.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{picture}", "--model", "nowhere"], "nowhere does not exist"),
        (["{empty}", "--model", "{run}"], "holds no pictures"),
        (["{picture}", "--model", "{run}", "--world", "half"], "unknown world 'half'"),
        (["{picture}", "--model", "{run}", "--world", "open"], "was not trained for the open world"),
        (["{picture}", "--model", "{run}", "--words", "{list}"], "has the columns state, thing"),
        (["{picture}", "--model", "{run}", "--add", "one"], "does not say what is the state"),
        (["{picture}", "--model", "{run}", "--add", "rusty kettle"], "without the word 'rusty'"),
        (["{picture}", "--model", "{run}", "--format", "xml"], "unknown format 'xml'"),
        (["{picture}", "--model", "{run}", "--out", "/no/where"], "cannot be written"),
        (["nothing*", "--model", "{run}"], "nothing matches"),
    ],
)
def test_a_mistake_is_one_sentence(project, tmp_path, words, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.csv").write_text("state,thing\nred,star\n")
    places = {
        "picture": project.pictures()[0],
        "run": project.run(),
        "empty": tmp_path / "empty",
        "list": tmp_path / "list.csv",
    }
    found = predict(*(word.format(**places) for word in words))
    assert found.returncode == 2 and said in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1 and found.stderr.startswith("duplex: ")


def twisted(tensors, meta):
    tensors["codebook.rows"][0] += 1


def elsewhere(tensors, meta):
    meta["duplex"] = meta["duplex"].replace('"name": "tiny"', '"name": "local-dir:/nowhere"')


def of_another_encoder(tensors, meta):
    record = json.loads(meta["duplex"])
    record["encoder"]["weights"] = "0" * 64
    meta["duplex"] = json.dumps(record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (twisted, "is damaged"),
        (elsewhere, "/nowhere"),
        (of_another_encoder, "was trained on features of weights '0000"),
    ],
)
def test_a_model_that_cannot_be_used(project, tmp_path, change, said):
    run = damaged(project, tmp_path, change)
    for words in (["predict", project.pictures()[0], "--model", run], ["export", run, tmp_path / "out"]):
        found = duplex(*words)
        assert found.returncode == 2 and said in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1 and found.stderr.startswith("duplex: ")


def test_missing_files_are_answered_for(project):
    found = predict("absent.png", project.pictures()[0], "--model", project.run(), "--format", "jsonl")
    first = json.loads(found.stdout.splitlines()[0])
    assert first == {"image": "absent.png", "error": "missing"} and found.returncode == 3
    assert Path(json.loads(found.stdout.splitlines()[1])["image"]) == project.pictures()[0]
