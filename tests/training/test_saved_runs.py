"""A saved run is the run that is read back, and a data set stays the one that was loaded."""

import json
import shutil

import pandas as pd
import pytest

import duplex
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import load_params
from duplex.errors import UsageError
from duplex.project.extract import extract
from duplex.project.prepare import prepare
from duplex.project.run import ProjectData
from tests.projects import inside
from tests.training.test_ten_lines import arrays, project, small  # noqa: F401  # a fixture


def test_a_run_is_not_saved_beside_an_exported_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(UsageError, match="has an exported model, which would be loaded instead; use another folder"):
        duplex.fit(small(), "kg_sp", epochs=1).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "history.csv"])
def test_existing_files_are_not_replaced_by_a_run(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"{name} exists; .*force=True"):
        duplex.fit(small(), "kg_sp", epochs=1).save(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_the_metrics_of_the_run_before_do_not_stay_beside_a_new_one(tmp_path):
    data, files = small(), RunPaths(tmp_path)
    first, other = (duplex.fit(data, "kg_sp", epochs=1, seed=seed) for seed in (0, 1))
    evaluated = [files.metrics, files.curve, files.predictions]
    for run, kept in ((first, True), (other, False)):
        first.save(tmp_path, force=True)
        for file in evaluated:
            file.write_text(json.dumps({}))
        run.save(tmp_path, force=True)
        assert [file.exists() for file in evaluated] == [kept] * 3


def test_a_data_set_prepared_again_is_refused_until_it_is_loaded_again(project, tmp_path):  # noqa: F811
    folder = shutil.copytree(project.folder, tmp_path / "copy")
    with inside(folder):
        data = duplex.load_dataset("own")
        table = pd.read_csv("pictures.csv")
        pair = table.groupby(["state", "object"])["split"].transform("nunique") > 1
        first = table.loc[pair].iloc[0]
        same = (table["state"] == first["state"]) & (table["object"] == first["object"])
        table.loc[same, "split"] = table.loc[same, "split"].to_numpy()[::-1]
        table.to_csv("pictures.csv", index=False)
        params, paths = load_params(), ArtifactPaths()
        prepare(ProjectData(params, "own", paths))
        extract(ProjectData(params, "own", paths))
        with pytest.raises(UsageError, match="the data set was prepared again after it was loaded; load it again"):
            duplex.fit(data, "clip")
        again = duplex.load_dataset("own")
        assert not again.manifest.equals(data.manifest)
        duplex.fit(again, "clip")


def test_a_run_measured_on_another_split_of_its_images_is_reported(capsys):
    data, table = small(), arrays()["table"]
    split = list(table["split"])
    split[0], split[28] = split[28], split[0]  # a training image and a validation image of one pair
    run = duplex.fit(data, "kg_sp", epochs=1)
    duplex.evaluate(run, data)
    assert "another table" not in capsys.readouterr().err
    duplex.evaluate(run, small(table={**table, "split": split}))
    assert "the image table of 'arrays' differs from the one that run 'kg_sp' was trained on" in capsys.readouterr().err
