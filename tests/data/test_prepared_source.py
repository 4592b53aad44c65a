"""A source that changed after `prepare` is noticed."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data import contents
from duplex.data.sources import source_record
from duplex.data.tables import read_manifest, write_manifest
from duplex.errors import DuplexError, UsageError
from duplex.options import SourceOptions
from duplex.project import doctor
from duplex.project.doctor import DoctorFinding
from duplex.project.extract import extract
from duplex.project.prepare import prepare
from duplex.project.run import DATA_STAGES, ProjectData
from duplex.project.suspects import RelabelledTable, open_labelled, rank_suspects, relabelled
from tests.data.makers import make_folder, make_standard, make_table
from tests.projects import SHIPPED


@pytest.fixture(params=["table", "folder", "standard"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> SourceOptions:
    root = tmp_path / "pictures"
    if request.param == "table":
        return SourceOptions("table", root, make_table(root, ".csv", split=True))
    if request.param == "folder":
        make_folder(root, "nested")
    else:
        make_standard(root, "archive")
    return SourceOptions(request.param, root)


def edit(source: SourceOptions) -> None:
    """Change one label: in the table, in a folder's name, or in a pair list."""
    if source.kind == "folder":
        image = next(source.root.rglob("*.jpg"), None) or next(source.root.rglob("*.png"))
        image.rename(image.with_name(f"new{image.suffix}"))
        return
    file = source.table or next(source.root.rglob("val_pairs.txt"))
    file.write_text(file.read_text() + "\n")


@pytest.fixture
def prepared(source: SourceOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """Parameters with the source as the data set `own`, prepared; its project is the current folder."""
    monkeypatch.chdir(tmp_path)
    params = with_source(load_params(SHIPPED), source)
    prepare(ProjectData(params, "own"))
    return params


def with_source(params: Params, source: SourceOptions) -> Params:
    own = params.datasets.get("own") or params.dataset("shapes")
    return params.model_copy(update={"datasets": {"own": own.model_copy(update={"source": source})}})


def test_a_changed_source_is_refused_until_it_is_prepared_again(prepared: Params, source: SourceOptions) -> None:
    ProjectData(prepared, "own").require()
    edit(source)
    with pytest.raises(DuplexError, match=r"own has to be prepared again: .*`duplex prepare --dataset own`"):
        ProjectData(prepared, "own").require()
    prepare(ProjectData(prepared, "own"))
    ProjectData(prepared, "own").require()
    assert "source.resplit" in ProjectData(with_source(prepared, replace(source, resplit=1)), "own").difference()
    stamp = ArtifactPaths().stamp("own", "prepare")
    stamp.write_text("{")
    assert ProjectData(prepared, "own").difference()
    stamp.unlink()
    ProjectData(prepared, "own").require()  # a manifest from elsewhere


def test_a_source_on_another_machine_keeps_its_stamp(prepared: Params, source: SourceOptions) -> None:
    before = ProjectData(prepared, "own").settings("prepare")
    shutil.rmtree(source.root)
    ProjectData(prepared, "own").require()
    assert ProjectData(prepared, "own").settings("prepare") == before and before["source"]["content"] is not None


def test_a_changed_table_is_noticed_without_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, table = table_project(tmp_path, monkeypatch)
    prepare(ProjectData(params, "own"))
    source = SourceOptions("table", tmp_path / "images on another machine", table)
    before = ProjectData(with_source(params, source), "own").settings("prepare")
    edit(source)
    assert ProjectData(with_source(params, source), "own").settings("prepare") != before


def test_images_in_other_bytes_or_other_order_of_listing_are_no_other_names(tmp_path: Path) -> None:
    make_folder(tmp_path / "a", "nested")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for image in (tmp_path / "b").rglob("*.*"):
        image.write_bytes(b"")
    records = [source_record(SourceOptions("folder", tmp_path / name)) for name in "ab"]
    assert records[0]["content"] == records[1]["content"] and records[0]["images"] != records[1]["images"]


YESTERDAY = time.time() - 86_400


@pytest.fixture
def encoded(prepared: Params, source: SourceOptions) -> tuple[Params, list[Path]]:
    """The prepared project after extraction, its files of yesterday, and its images."""
    extract(ProjectData(prepared, "own"))
    images = [source.root / image for image in read_manifest(ArtifactPaths().manifest("own"))["image"]]
    for image in images:
        os.utime(image, (YESTERDAY, YESTERDAY))
    assert ProjectData(prepared, "own").difference() == ""
    return prepared, images


def differences(params: Params) -> list[str]:
    return [ProjectData(params, "own").difference(stage) for stage in DATA_STAGES]


def test_a_replaced_image_of_the_same_size_is_noticed(encoded) -> None:
    params, images = encoded
    data = images[0].read_bytes()
    images[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert all("its image files have changed" in found for found in differences(params))
    prepare(ProjectData(params, "own"))
    assert extract(ProjectData(params, "own")).resumed < len(images)
    assert differences(params) == ["", ""]
    images[0].write_bytes(data)
    assert all("its image files have changed" in found for found in differences(params))


def test_a_deleted_image_is_noticed(encoded) -> None:
    params, images = encoded
    images[-1].unlink()
    assert all(differences(params))


def test_another_time_or_place_of_the_same_images_is_no_change(encoded, source: SourceOptions) -> None:
    params, images = encoded
    plan = [ProjectData(params, "own").settings(stage) for stage in DATA_STAGES]
    images[0].touch()
    assert differences(params) == ["", ""]
    copied = source.root.with_name("copy")
    shutil.copytree(source.root, copied, copy_function=shutil.copyfile)
    shutil.rmtree(source.root)
    ProjectData(params, "own").require()  # the images are not on this machine
    copied.rename(source.root)
    assert differences(params) == ["", ""]
    ArtifactPaths().image_digests("own").unlink()
    assert [ProjectData(params, "own").settings(stage) for stage in DATA_STAGES] == plan


def test_only_images_of_another_size_or_time_are_read_again(encoded, monkeypatch: pytest.MonkeyPatch) -> None:
    params, images = encoded
    read: list[str] = []
    digests = contents.file_digests
    monkeypatch.setattr(contents, "file_digests", lambda root, names: read.extend(names) or digests(root, names))
    assert differences(params) == ["", ""] and read == []
    os.utime(images[2], (YESTERDAY + 1, YESTERDAY + 1))
    assert differences(params) == ["", ""] and len(read) == 1 and images[2].as_posix().endswith(read[0])
    images[2].touch()
    assert differences(params) == ["", ""] and len(read) == 3, "a file may change twice within a tick of the clock"


def test_digests_that_cannot_be_written_or_read_are_taken_again(encoded) -> None:
    params, _ = encoded
    memory = ArtifactPaths().image_digests("own")
    memory.write_text("{")
    assert differences(params) == ["", ""]
    memory.unlink()
    memory.mkdir()
    assert differences(params) == ["", ""]


def table_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Params, Path]:
    """Change to `folder`; return parameters with one data set `own`, and its table there."""
    monkeypatch.chdir(folder)
    table = make_table(folder / "csv", ".csv", split=True)
    return with_source(load_params(SHIPPED), SourceOptions("table", table.parent, table)), table


def test_every_reader_of_the_manifest_refuses_and_the_pipeline_runs_prepare_again(tmp_path, monkeypatch) -> None:
    params, table = table_project(tmp_path, monkeypatch)
    paths = ArtifactPaths()
    prepare(ProjectData(params, "own", paths))
    extract(ProjectData(params, "own", paths))
    assert "rows, 0 unreadable" in cache_finding(params).message
    edit(SourceOptions("table", table.parent, table))
    for read in (ProjectData.require, extract):
        with pytest.raises(DuplexError, match="has to be prepared again"):
            read(ProjectData(params, "own", paths))
    assert "has to be prepared again" in cache_finding(params).remedy
    assert ProjectData(params, "own").difference("extract") == ""
    prepare(ProjectData(params, "own", paths))
    ProjectData(params, "own", paths).require()
    table.write_text(table.read_text().replace("test", "val", 1))
    prepare(ProjectData(params, "own", paths))
    assert "cannot be used" in cache_finding(params).message, "the features are those of another manifest"


def test_images_of_another_folder_need_another_extraction(tmp_path, monkeypatch, capsys) -> None:
    params, table = table_project(tmp_path, monkeypatch)
    paths, other = ArtifactPaths(), tmp_path / "pics_v2"
    prepare(ProjectData(params, "own", paths))
    extract(ProjectData(params, "own", paths))
    shutil.copytree(table.parent, other)
    moved = with_source(params, SourceOptions("table", other, table))
    prepare(ProjectData(moved, "own", paths))
    with pytest.raises(DuplexError, match=r"own has to be extracted again: images.root was .*`duplex extract"):
        ProjectData(moved, "own", paths).require()
    assert "images.root" in cache_finding(moved).remedy
    report = extract(ProjectData(moved, "own", paths))
    assert report.resumed == report.rows, "the same images lie in both"
    assert f"another folder of images ({table.parent} → {other}); extracting again" in capsys.readouterr().err
    ProjectData(moved, "own", paths).require()


def cache_finding(params: Params) -> DoctorFinding:
    return list(doctor._dataset(params, "own"))[-1]


def corrections(params: Params, edited: Path) -> RelabelledTable:
    return relabelled(open_labelled("own", params=params, stages=["prepare"]), edited)


def test_lists_of_suspects_and_corrections_need_the_current_source(tmp_path, monkeypatch) -> None:
    params, table = table_project(tmp_path, monkeypatch)
    prepare(ProjectData(params, "own"))
    manifest = read_manifest(ArtifactPaths().manifest("own"))
    first = manifest.iloc[:1][["image", "state", "object"]]
    first.assign(state="misspelt").to_csv("edited.csv", index=False)
    result = corrections(params, Path("edited.csv"))
    assert result.changed == 1 and result.new == ["misspelt"] and result.manifest["state"].iloc[0] == "misspelt"
    first.assign(state="x" * 999).to_csv("long.csv", index=False)
    with pytest.raises(DuplexError, match="999 characters"):
        corrections(params, Path("long.csv"))
    edit(SourceOptions("table", table.parent, table))
    for work in (
        lambda: corrections(params, Path("edited.csv")),
        lambda: rank_suspects(open_labelled("own", params=params)),
    ):
        with pytest.raises(DuplexError, match="has to be prepared again"):
            work()


def test_an_older_list_of_suspects_undoes_no_correction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, table = table_project(tmp_path, monkeypatch)
    prepare(ProjectData(params, "own"))
    extract(ProjectData(params, "own"))
    listed = rank_suspects(open_labelled("own", params=params))
    first, second = listed["image"][0], listed["image"][1]

    def corrected(rows: pd.DataFrame, image: str) -> pd.DataFrame:
        return rows.assign(state=rows["state"].where(rows["image"] != image, "corrected"))

    corrected(listed[:1], first).to_csv("fix.csv", index=False)
    write_manifest(corrections(params, Path("fix.csv")).manifest, table)
    prepare(ProjectData(params, "own"))
    corrected(listed, second).to_csv("old.csv", index=False)
    result = corrections(params, Path("old.csv"))
    assert result.changed == 1 and result.outdated == [first]
    states = result.manifest.set_index("image")["state"]
    assert states[first] == states[second] == "corrected" and (states == "corrected").sum() == 2
    listed.to_csv("old.csv", index=False)
    with pytest.raises(
        UsageError, match=rf"labels of own have changed since .*, for example that of '{first}'; `duplex suspects own`"
    ):
        corrections(params, Path("old.csv"))
    listed.drop(columns=["old_state", "old_object"])[1:3].pipe(corrected, second).to_csv("plain.csv", index=False)
    assert corrections(params, Path("plain.csv")).changed == 1, "a list of one's own needs no old labels"
    for wrong, right in (("Old_state", "old_state"), ("OLD_OBJECT", "old_object"), ("old state", "old_state")):
        corrected(listed, second).rename(columns={right: wrong}).to_csv("wrong.csv", index=False)
        with pytest.raises(DuplexError, match=f"unknown column '{wrong}'; call it '{right}'"):
            corrections(params, Path("wrong.csv"))
