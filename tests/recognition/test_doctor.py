"""`duplex doctor` finds what is missing and says what mends it."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.projects import inside
from tests.subprocesses import duplex


def findings(done) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for one in json.loads(done.stdout):
        found.setdefault(one["topic"], []).append(one)
    return found


def test_a_sound_project(project):
    done = duplex("doctor", "--json")
    assert done.returncode == 0, done.stdout
    found = findings(done)
    assert {"duplex", "packages", "device", "formats", "disk", "own"} <= set(found)
    assert any("rows, 0 bad" in one["says"] for one in found["own"])
    assert "times as fast as fp32" in found["formats"][0]["says"]


@pytest.mark.slow
def test_problems_come_with_what_mends_them(trained, tmp_path):
    with inside(tmp_path):
        empty = findings(duplex("doctor", "--json"))
        assert "duplex init" in empty["project"][0]["mend"]
        shutil.copy(trained.folder / "params.yaml", tmp_path)
        bare = duplex("doctor", "--json")
        mends = [one["mend"] for one in findings(bare)["own"] if one["mend"]]
        assert (
            bare.returncode == 1
            and "`dvc repro extract@own`" in mends
            and any("bring them, or correct its root" in mend for mend in mends)
        )
        cache = tmp_path / "artifacts" / "own" / "features.h5"
        cache.parent.mkdir(parents=True)
        cache.write_bytes(b"damaged")
        assert any(
            "cannot be used" in one["says"] and one["mend"] for one in findings(duplex("doctor", "--json"))["own"]
        )
        assert "->" in duplex("doctor").stdout
        text = (tmp_path / "params.yaml").read_text()
        (tmp_path / "params.yaml").write_text(text.replace("views: 0", "views: 2"))
        of_views = [one for one in findings(duplex("doctor", "--json"))["own"] if "views/own" in one["says"]]
        assert [one["mend"] for one in of_views] == ["`dvc repro views@own`"]
        (tmp_path / "params.yaml").write_text("run: 3\n")
        broken = findings(duplex("doctor", "--json"))
        assert broken["project"][0]["mend"] == "correct params.yaml"
