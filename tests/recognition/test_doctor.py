"""`duplex doctor` reports problems with the commands that fix them."""

import json
import shutil
from collections import defaultdict

import pytest

from tests.commands import Command
from tests.projects import inside


def findings(command: Command) -> tuple[int, dict[str, list[dict]]]:
    done = command("doctor", "--json")
    by_topic = defaultdict(list)
    for finding in json.loads(done.out):
        by_topic[finding["topic"]].append(finding)
    return done.code, by_topic


def test_a_complete_project_has_no_problem(project, command):
    code, by_topic = findings(command)
    assert code == 0, by_topic
    assert {"duplex", "packages", "device", "disk", "own"} <= set(by_topic)
    assert any("rows, 0 unreadable" in finding["message"] for finding in by_topic["own"])


def test_entries_of_other_encoders_say_what_they_lack(project, command):
    _, by_topic = findings(command)
    resnet, blip = (" ".join(one["message"] for one in by_topic[f"mit-states-{name}"]) for name in ("resnet18", "blip"))
    assert "word vectors: missing" in resnet and "images in data/mit-states: missing" in resnet
    assert "encoder timm:resnet18 tv_in1k: weights" in resnet
    assert "word vectors" not in blip and "encoder blip:Salesforce/blip-itm-base-coco: weights" in blip


@pytest.mark.parametrize(("missing", "status"), [(None, "on disk"), ("a file", "not on disk")])
def test_weights_on_disk_are_told_from_missing_ones(project, command, monkeypatch, missing, status):
    monkeypatch.setattr("duplex.project.doctor.missing_weights", lambda *encoder: missing)
    first = findings(command)[1]["own"][0]
    assert first["message"] == f"encoder tiny: weights {status}" and bool(first["remedy"]) == bool(missing)


def test_problems_come_with_remedies(trained, command, tmp_path):
    with inside(tmp_path):
        assert "duplex init" in findings(command)[1]["project"][0]["remedy"]
        shutil.copy(trained.folder / "params.yaml", tmp_path)
        code, bare = findings(command)
        remedies = [finding["remedy"] for finding in bare["own"] if finding["remedy"]]
        assert code == 1 and "`dvc repro extract@own`" in remedies
        assert any("or correct `root` of " in remedy for remedy in remedies)
        cache = tmp_path / "artifacts" / "own" / "features.h5"
        cache.parent.mkdir(parents=True)
        cache.write_bytes(b"damaged")
        of_cache = [one for one in findings(command)[1]["own"] if "cannot be used" in one["message"]]
        assert of_cache and of_cache[0]["remedy"]
        assert "->" in command("doctor").out
        (tmp_path / "params.yaml").write_text("run: 3\n")
        assert findings(command)[1]["project"][0]["remedy"] == "correct params.yaml"


def test_the_size_of_the_features_is_compared_with_the_free_space(trained, command, tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text((trained.folder / "params.yaml").read_text())
    shutil.copytree(trained.folder / "pictures", tmp_path / "pictures")
    shutil.copy(trained.folder / "pictures.csv", tmp_path)
    with inside(tmp_path):
        (enough,) = [one for one in findings(command)[1]["own"] if "extraction writes" in one["message"]]
        assert "MB for" in enough["message"] and not enough["remedy"]
        monkeypatch.setattr("duplex.project.doctor.free_bytes", lambda path: 100)
        (full,) = [one for one in findings(command)[1]["own"] if "extraction writes" in one["message"]]
        assert "make room" in full["remedy"]
