"""`duplex doctor` reports problems with the commands that fix them."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.projects import inside
from tests.subprocesses import duplex


def findings(done) -> dict[str, list[dict]]:
    by_topic: dict[str, list[dict]] = {}
    for finding in json.loads(done.stdout):
        by_topic.setdefault(finding["topic"], []).append(finding)
    return by_topic


def test_a_complete_project_has_no_problem(project):
    done = duplex("doctor", "--json")
    assert done.returncode == 0, done.stdout
    by_topic = findings(done)
    assert {"duplex", "packages", "device", "formats", "disk", "own"} <= set(by_topic)
    assert any("rows, 0 unreadable" in finding["message"] for finding in by_topic["own"])
    assert "fp32" in by_topic["formats"][0]["message"]


@pytest.mark.slow
def test_problems_come_with_remedies(trained, tmp_path):
    with inside(tmp_path):
        empty = findings(duplex("doctor", "--json"))
        assert "duplex init" in empty["project"][0]["remedy"]
        shutil.copy(trained.folder / "params.yaml", tmp_path)
        bare = duplex("doctor", "--json")
        remedies = [finding["remedy"] for finding in findings(bare)["own"] if finding["remedy"]]
        assert bare.returncode == 1 and "`dvc repro extract@own`" in remedies
        assert any("or correct its root" in remedy for remedy in remedies)
        cache = tmp_path / "artifacts" / "own" / "features.h5"
        cache.parent.mkdir(parents=True)
        cache.write_bytes(b"damaged")
        of_cache = [one for one in findings(duplex("doctor", "--json"))["own"] if "cannot be used" in one["message"]]
        assert of_cache and of_cache[0]["remedy"]
        assert "->" in duplex("doctor").stdout
        (tmp_path / "params.yaml").write_text("run: 3\n")
        broken = findings(duplex("doctor", "--json"))
        assert broken["project"][0]["remedy"] == "correct params.yaml"
