"""`duplex predict` in a process of its own."""

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from duplex.artifacts import ArtifactPaths
from duplex.cli.answers import checked_format
from duplex.errors import UsageError
from duplex.training.checkpoint import read_record, with_checksum
from tests.recognition.test_recognizer import damaged
from tests.subprocesses import duplex


def predict(*arguments: object, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return duplex("predict", *arguments, given=given)


@pytest.mark.slow
def test_a_folder_a_pattern_and_stdin_name_the_same_files(project):
    folder = project.images()[0].parent
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


def test_the_suffix_of_the_file_names_the_format(tmp_path):
    assert [checked_format(None, path) for path in (None, Path("a.csv"), Path("a.JSONL"), Path("a.txt"))] == [
        "table", "csv", "jsonl", "table",
    ]  # fmt: skip
    assert checked_format("csv", Path("a.txt")) == "csv"
    with pytest.raises(UsageError, match=r"--format is table, but --out a\.csv ends in \.csv"):
        checked_format("table", Path("a.csv"))


@pytest.mark.slow
def test_answers_are_tasks_of_label_studio(project):
    from duplex.data.tables import read_table

    images = [str(image) for image in project.images()[:2]]
    asked = ("--model", project.run(), "--num-workers", 0)
    done = predict(*images, "absent.png", *asked, "--format", "label-studio")
    assert done.returncode == 3, done.stderr
    tasks = json.loads(done.stdout)
    assert [len(task["predictions"]) for task in tasks] == [1, 1, 0]
    accepted = [{**task, "annotations": task["predictions"]} for task in tasks]
    accepted[0]["data"]["image"] = "/data/local-files/?d=first.png"
    Path("export.json").write_text(json.dumps(accepted[:1]))
    best = json.loads(predict(images[0], *asked, "--format", "jsonl").stdout)["top"][0]
    assert read_table(Path("export.json")).to_numpy().tolist() == [["first.png", best["state"], best["object"]]]


@pytest.mark.slow
def test_the_default_model_is_the_best_run(project):
    from duplex.training.checkpoint import read_record

    closed = ("clip", "duplex", "closed_form", "dual")
    best = max(closed, key=lambda name: read_record(project.run(name) / "checkpoint.safetensors").val_auc)
    done = predict(project.images()[0], "--num-workers", 0)
    assert done.returncode == 0
    assert f"model: artifacts/own/{best}/0\n" in done.stderr
    assert "model: artifacts/own/" in predict(project.images()[0], "--world", "open").stderr


def test_an_open_world_run_is_the_default_only_if_there_is_no_other(project, tmp_path):
    from duplex.project.runs import best_run

    paths = ArtifactPaths(tmp_path)
    with pytest.raises(UsageError, match=r"no trained run; .* or name one with --run"):
        best_run(paths=paths, hint="name one with --run")
    for method, world in (("open", "open"), ("closed", "closed")):
        run = paths.run("own", method, 0)
        run.root.mkdir(parents=True)
        source = project.run("duplex") / "checkpoint.safetensors"
        with safe_open(source, "pt") as file:
            record = json.loads(file.metadata()["duplex"])
        record["calibration"] = {world: record["calibration"]["closed"]}
        record["val_auc"] += world == "open"
        save_file(load_file(source), run.checkpoint, {"duplex": json.dumps(with_checksum(record))})
        assert best_run(paths=paths).root == run.root, "the closed world's before any other, whatever its AUC"
        assert best_run(world, paths).root == run.root


def test_bad_files_get_a_line_and_exit_code_3(project, command, tmp_path):
    (tmp_path / "bad.png").write_text("nothing")
    out, model = tmp_path / "answers.csv", ("--model", project.run(), "--top", 2, "--num-workers", 0)
    done = command("predict", project.images()[0], tmp_path, *model, "--format", "csv", "--out", out)
    assert done.code == 3 and "1 of 2 files are not readable images" in done.err
    done = command("predict", "absent.png", *model, "--format", "jsonl")
    assert (json.loads(done.out), done.code) == ({"image": "absent.png", "error": "missing"}, 3)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["error"]) for row in rows] == [("1", ""), ("2", ""), ("", "not an image")]
    assert rows[0]["seen"] and rows[0]["in_distribution"] and not rows[2]["seen"]
    assert not list(tmp_path.glob("*.partial"))


def test_a_line_of_csv_has_the_values_of_the_answer_in_json(project, command):
    image, model = project.images()[0], ("--model", project.run(), "--top", 3, "--num-workers", 0)
    answer = json.loads(command("predict", image, *model, "--format", "jsonl").out)
    rows = list(csv.DictReader(command("predict", image, *model, "--format", "csv").out.splitlines()))
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    for row, guess in zip(rows, answer["top"], strict=True):
        for key in ("state", "object", "score", "probability", "seen"):
            assert row[key] == str(guess[key])
        assert (row["image"], row["in_distribution"]) == (answer["image"], str(answer["in_distribution"]))


def test_compositions_from_the_command_line_and_a_file(project, command, tmp_path):
    listed = tmp_path / "pairs.csv"
    listed.write_text("state,object\ndark,picture\n")
    added = ("--compositions", listed, "--add", "striped,photo", "--top", 200)
    done = command("predict", project.images()[0], "--model", project.run(), *added)
    assert done.code == 0, done.err
    for pair, state, name in (("dark picture", "dark", "picture"), ("striped photo", "striped", "photo")):
        said = f"added candidate {pair}: state {state!r} is trained, object {name!r} is new, described by text alone\n"
        assert said in done.err
    assert "dark picture" in done.out and "(new object)" in done.out and "striped photo" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{image}", "--model", "nowhere"], "nowhere does not exist"),
        (["{empty}", "--model", "{run}"], "holds no images"),
        (["{image}", "--model", "{run}", "--world", "open"], "was not trained for the open world"),
        (["{image}", "--model", "{run}", "--compositions", "{list}"], "has no column 'object'"),
        (["{image}", "--model", "{run}", "--add", "rusty kettle"], "without the word 'rusty'"),
        (["nothing*", "--model", "{run}"], "no file matches"),
    ],
)
def test_a_mistake_is_reported_in_one_line(project, command, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.csv").write_text("state,thing\nred,star\n")
    places = {"image": project.images()[0], "run": project.run()}
    places |= {"empty": tmp_path / "empty", "list": tmp_path / "list.csv"}
    assert command("predict", *(word.format(**places) for word in arguments)).refused(message)


def with_encoder(key: str, value: str) -> Callable[[dict, dict], None]:
    def change(tensors, meta):
        record = json.loads(meta["duplex"])
        record["encoder"][key] = value
        meta["duplex"] = json.dumps(with_checksum(record))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, _: tensors["codebook.rows"][0].add_(1), "is damaged"),
        (with_encoder("name", "local-dir:/nowhere"), "/nowhere"),
        (with_encoder("weights", "0" * 64), "differs from that of training (weights "),
    ],
)
def test_a_model_that_cannot_be_used_is_reported(project, tmp_path, change, message):
    run = damaged(project, tmp_path, change)
    for arguments in (["predict", project.images()[0], "--model", run], ["export", run, tmp_path / "out"]):
        done = duplex(*arguments)
        assert done.returncode == 2 and message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("duplex: ")


def test_an_image_of_something_else_is_marked_and_so_are_pairs_without_training_images(project, command, tmp_path):
    Image.effect_noise((64, 64), 200).convert("RGB").save(tmp_path / "noise.png")
    drawn = project.images("train")[0]
    noise, usual = command("predict", tmp_path / "noise.png", drawn, "--top", 200, "--new-share", 0.5).out.splitlines()
    assert noise.startswith(f"{tmp_path / 'noise.png'}  none of these?  ") and "none of these?" not in usual
    records = [
        json.loads(line) for line in command("predict", drawn, "--top", 200, "--format", "jsonl").out.splitlines()
    ]
    new = sum(not guess["seen"] for guess in records[0]["top"])
    assert records[0]["in_distribution"] is True and 0 < new == usual.count("(new)")


def test_the_estimated_share_is_printed_once_and_stored_with_the_answers(project, command):
    images = project.images()[:20]
    model = ("--model", project.run(), "--num-workers", 0)
    done = command("predict", *images, *model, "--new-share", "auto", "--format", "csv")
    rows = list(csv.DictReader(done.out.splitlines()))
    (line,) = [line for line in done.err.splitlines() if "share of new pairs" in line]
    share, error = float(rows[0]["new_share"]), float(rows[0]["new_share_error"])
    assert f"{100 * share:.1f} % ± {100 * error:.1f}, estimated from 20 images" in line
    assert {(row["new_share"], row["new_share_error"]) for row in rows} == {(str(share), str(error))}
    as_given = command("predict", *images, *model, "--new-share", share, "--format", "csv")
    answers = [[(row["rank"], row["state"], row["object"]) for row in csv.DictReader(each.out.splitlines())]
               for each in (done, as_given)]  # fmt: skip
    assert answers[0] == answers[1]
    assert "share of new pairs" not in as_given.err + command("predict", *images, *model).err
    stored = read_record(project.run() / "checkpoint.safetensors").confidence.new_share
    record = json.loads(command("predict", images[0], *model, "--format", "jsonl").out)
    assert (record["new_share"], record["new_share_error"]) == (stored, None)
    assert command("predict", images[0], *model, "--new-share", "half").refused("--new-share is 'half'; expected")
    assert command("predict", images[0], *model, "--new-share", 1.5).refused("(--new-share) is 1.5; expected")
