"""Training images of which only the state or only the object is known: read, trained on, or refused."""

import re
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data.check import check_labels_of
from duplex.data.sources import load_source
from duplex.data.tables import count_dataset, read_manifest, resplit
from duplex.errors import DuplexError, UsageError
from duplex.labels import LabelSpace
from duplex.options import SourceOptions
from duplex.project import report, suspects
from duplex.project.evaluate import evaluate_stage
from duplex.project.extract import extract
from duplex.project.prepare import prepare
from duplex.project.run import ProjectData, ProjectRun, load_inputs
from duplex.project.train import train_stage
from duplex.training.inputs import InputRequest
from tests.projects import edited_params

CELLS = MappingProxyType({0: "state", 1: "object"})  # what every third training image lacks in turn


def with_gaps(table: pd.DataFrame) -> pd.DataFrame:
    """The table, without the state or the object of every third training image; each pair keeps a full one."""
    table = table.astype(object).copy()
    train = table.index[table["split"] == "train"]
    first = table.loc[train].drop_duplicates(["state", "object"]).index
    for place, row in enumerate(train.difference(first)[::3]):
        table.loc[row, CELLS[place % 2]] = ""
    return table


@pytest.fixture
def partial(project: Path) -> Params:
    """The project, prepared and encoded again with gaps in the table."""
    with edited_params(project / "params.yaml") as record:
        source = record["datasets"]["own"]["source"]
        with_gaps(pd.read_csv(source["table"])).to_csv(project / "gaps.csv", index=False)
        source["table"] = str(project / "gaps.csv")
    params = load_params(project / "params.yaml")
    prepare(ProjectData(params, "own"))
    extract(ProjectData(params, "own"))
    return params


@pytest.mark.slow
def test_methods_with_two_classifiers_train_on_them_and_others_are_refused_by_name(partial, command):
    paths = ArtifactPaths()
    manifest, labels = read_manifest(paths.manifest("own")), LabelSpace.load(paths.labels("own"))
    gaps = (manifest["state"] == "") ^ (manifest["object"] == "")
    assert gaps.sum() > 20 and set(manifest.loc[gaps, "split"]) == {"train"}
    found = (
        load_inputs(ProjectData(partial, "own", paths), InputRequest(frozenset({"cls"}))).examples["train"].compositions
    )
    assert int((found < 0).sum()) == gaps.sum()
    assert (labels.pairs["train"] == np.unique(found[found >= 0].numpy())).all()
    for method in ("kg_sp", "linear"):
        train_stage(ProjectRun("own", method, 0, partial))
        metrics = evaluate_stage(ProjectRun("own", method, 0, partial))
        assert metrics["closed"]["auc"] > 0 and set(metrics["groups"]) >= {"head", "unseen"}
    page = report.write_own_page(ProjectData(partial, "own", paths)).read_text()
    pairs = len(manifest[~gaps][["state", "object"]].drop_duplicates())
    assert f"labelled pairs {pairs:,} " in " ".join(re.sub("<[^>]*>", " ", page).split())
    for method in ("csp", "closed_form", "linear_pairs"):
        done = command("train", "--dataset", "own", "--method", method, "--seed", "0")
        kind = {"csp": "prompts", "linear_pairs": "linear"}.get(method, method)
        assert done.refused(f"{kind} with these options", f"images ({gaps.sum()}) have only a state or object")
        assert done.err.count("\n") == 1


def test_counts_and_checks_leave_them_out_of_pairs(tmp_path):
    source = table_source(tmp_path, with_gaps(TABLE))
    data, whole = load_source(source), load_source(table_source(tmp_path, TABLE))
    assert data.labels == whole.labels
    counts, full = (count_dataset(each.labels, each.manifest) for each in (data, whole))
    assert counts.splits == full.splits and counts.shares["test"]["unseen"] == full.shares["test"]["unseen"]
    assert [str(issue) for issue in check_labels_of(data)] == [str(issue) for issue in check_labels_of(whole)]
    with pytest.raises(UsageError, match=r"needs the state and object of every image; add what '.*' lacks"):
        resplit(data, 1)


ROWS = [("red", "star"), ("red", "moon"), ("blue", "star")]
TABLE = pd.DataFrame(
    [(f"{s}{o}{k}.jpg", s, o, split) for split in ("train", "val", "test") for s, o in ROWS for k in range(4)],
    columns=["image", "state", "object", "split"],
)
TABLE["image"] = [f"{row}-{image}" for row, image in enumerate(TABLE["image"])]
TABLE.loc[TABLE.index[-1], ["state", "object"]] = "blue", "moon"


def table_source(folder: Path, table: pd.DataFrame) -> SourceOptions:
    path = folder / "table.csv"
    table.to_csv(path, index=False)
    return SourceOptions("table", folder, table=path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"split": "val", "state": ""}, "line 2: the state is empty; fill it in"),
        ({"split": "test", "object": ""}, "line 2: the object is empty; fill it in"),
        ({"state": "", "object": ""}, "line 2: the state is empty; fill it in"),
        ({"state": "green", "object": ""}, "every image of the state 'green' lacks its object"),
    ],
)
def test_other_gaps_are_refused_in_one_line(tmp_path, changes, says):
    table = TABLE.astype(object).copy()
    for name, cell in changes.items():
        table.loc[0, name] = cell
    with pytest.raises(DuplexError, match=says) as refused:
        load_source(table_source(tmp_path, table))
    assert "\n" not in str(refused.value)


def test_a_table_without_splits_has_no_gaps(tmp_path):
    table = with_gaps(TABLE).drop(columns="split")
    with pytest.raises(DuplexError, match="only training images may lack"):
        load_source(table_source(tmp_path, table))


@pytest.mark.slow
def test_suspects_are_sought_among_full_labels(partial):
    source = suspects.open_labelled("own", params=partial)
    manifest = read_manifest(ArtifactPaths().manifest("own"))
    full = (manifest["state"] != "") & (manifest["object"] != "")
    assert set(suspects.rank_suspects(source)["image"]) == set(manifest["image"][full])
