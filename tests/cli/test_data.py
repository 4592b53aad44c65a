"""`duplex data list, stats, check, download`, in a project's folder."""

import dataclasses
import json
import os
import shutil
from itertools import product
from pathlib import Path

import pytest

from duplex.data.download import BENCHMARKS
from tests.commands import Command
from tests.data.makers import OBJECTS, STATES, make_folder, make_standard, rows, save, write_lists
from tests.data.web import serving


def test_statistics_of_a_folder_outside_of_params(project: Path, command: Command) -> None:
    make_standard(project / "data set", "archive")
    result = command("data", "stats", "whatever", "--root", "data set", "--json")
    record = json.loads(result.out)
    assert result.code == 0 and list(record) == ["states", "objects", "train", "val", "test", "shares"]
    assert record["train"] == {"seen": 12, "images": 24}
    assert record["test"] == {"seen": 12, "unseen": 2, "images": 20}
    assert sum(record["shares"].values()) == pytest.approx(1)


def test_pair_lists_without_images_are_counted_and_checked(project: Path, command: Command) -> None:
    write_lists(project / "lists", rows())
    result = command("data", "stats", "cgqa", "--root", "lists", "--json")
    assert result.code == 0 and json.loads(result.out)["val"] == {"seen": 12, "unseen": 2, "images": None}
    result = command("data", "check", "cgqa", "--root", "lists")
    assert result.code == 1 and "states: 4, published 413" in result.out and "only the pair lists" in result.err


def test_check_names_a_damaged_image_and_exits_with_1(project: Path, command: Command) -> None:
    make_folder(project / "mine", "flat")
    assert command("data", "check", "mine", "--root", "mine").out == "mine: no problems found\n"
    (project / "mine/red circle/0001.png").write_bytes(b"")
    result = command("data", "check", "mine", "--root", "mine", "--json")
    assert result.code == 1
    assert json.loads(result.out)["findings"][0]["examples"] == ["red circle/0001.png (empty)"]


def test_check_counts_the_files_that_it_skips(project: Path, command: Command) -> None:
    make_folder(project / "mine", "nested")
    folder = project / "mine" / "red" / "star"
    for name in ("a.raw", "b.xcf", "c.XCF"):
        (folder / name).write_bytes(b"x")
    (folder / "folder.jpg").mkdir()
    (folder / "gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(folder / "pipe.png")
    findings = json.loads(command("data", "check", "mine", "--root", "mine", "--json").out)["findings"]
    (skipped,) = (finding for finding in findings if "skipped" in finding["what"])
    kinds = "3 that are not files, 2 .xcf, 1 .raw"
    assert skipped["count"] == len(skipped["examples"]) == 6 and f"({kinds})" in skipped["what"]
    assert command("data", "add", "mine", "mine", "--encoder", "tiny").code == 0


def test_check_names_both_files_of_a_leak_and_lists_all_in_json(project: Path, command: Command) -> None:
    lines = ["image,state,object,split"]
    splits = enumerate(("train", "train", "val", "test"))
    for state, kind, (number, split) in product(STATES[:2], OBJECTS, splits):
        image = f"{state}_{kind}/{number:04d}.png"
        save(image if split != "test" else f"{state}_{kind}/0000.png", project / "mine" / image)
        lines.append(f"{image},{state},{kind},{split}")
    table = project / "mine" / "t.csv"
    table.write_text("\n".join(lines) + "\n")
    findings = json.loads(command("data", "check", "mine", "--root", table, "--json").out)["findings"]
    leak = next(finding for finding in findings if "in two splits" in finding["what"])
    assert leak["count"] == len(leak["examples"]) == 8
    assert leak["examples"][0] == "red_circle/0000.png (train) = red_circle/0003.png (test)"
    assert ", ..." in command("data", "check", "mine", "--root", table).out


def test_list_shows_which_data_sets_are_on_disk(project: Path, command: Command) -> None:
    (project / "table.csv").write_text("image,state,object\n")  # a table without its images
    source = "source: {kind: table, root: nowhere, table: table.csv}"
    training = "training: {learning_rate: 0.1, batch_size: 2, epochs: 1}"
    text = (project / "params.yaml").read_text()
    entry = f"  absent: {{{source}, encoder: {{name: tiny}}, {training}}}\n"
    (project / "params.yaml").write_text(text.replace("\ndatasets:\n", "\ndatasets:\n" + entry))
    on_disk = {row["name"]: row["on_disk"] for row in json.loads(command("data", "list", "--json").out)}
    assert {name for name, is_there in on_disk.items() if is_there} == {"shapes"}
    assert {"absent", "mit-states"} < on_disk.keys()
    assert "duplex data download cgqa" in command("data", "list").out


def test_an_interrupted_download_is_continued_and_the_result_loads(project, command, monkeypatch) -> None:
    make_standard(project / "published", "flat")
    bundle = Path(shutil.make_archive(str(project / "cgqa"), "zip", project / "published")).read_bytes()
    with serving() as server:
        server.files["/cgqa.zip"] = bundle
        server.cut = len(bundle) // 3
        benchmark = BENCHMARKS["cgqa"]
        archive = dataclasses.replace(benchmark.archives[0], urls=(server.url("/gone.zip"), server.url("/cgqa.zip")))
        monkeypatch.setitem(BENCHMARKS, "cgqa", dataclasses.replace(benchmark, archives=(archive,)))
        result = command("data", "download", "cgqa")
        assert (result.code, result.out) == (0, "")
        assert all(part in result.err for part in ("CC BY 4.0", "CVPR 2021", "404"))
        assert len(server.asked) >= 4 and server.asked[-1] is not None
    downloaded = command("data", "stats", "cgqa", "--json").out
    assert downloaded == command("data", "stats", "cgqa", "--root", "published", "--json").out
    assert sorted(path.name for path in (project / "data/cgqa").iterdir()) == sorted(
        [".archives", *(path.name for path in (project / "published").iterdir())]
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(["stats", "nope"], 2, "no data set 'nope'"), (["stats", "cgqa"], 2, "there is no folder"),
     (["download", "imagenet"], 2, "unknown benchmark"),
     (["download", "vaw-czsl"], 2, "get it by hand from https://drive.google.com"),
     (["add", "x", "nowhere"], 2, "nowhere"), (["add", "x", ".", "--val-unseen", "0.9"], 2, "a sum below 1"),
     (["remove", "shapes"], 2, "; delete datasets.shapes in params.yaml by hand")],
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_params_unchanged(project, command, words, code, message) -> None:
    before = (project / "params.yaml").read_bytes()
    result = command("data", *words)
    assert result.code == code and result.refused(message)
    assert (project / "params.yaml").read_bytes() == before
