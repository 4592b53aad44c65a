"""`training.log` of params.yaml: the pipeline writes it, and it retrains nothing."""

import dataclasses

import pandas as pd
import pytest

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.project.run import ProjectData, ProjectRun
from duplex.project.train import train_stage


def with_log(params: Params, log: str) -> Params:
    entry = params.datasets["own"]
    training = dataclasses.replace(entry.training, log=log)
    return params.model_copy(update={"datasets": {"own": entry.model_copy(update={"training": training})}})


def test_the_pipeline_writes_the_log_and_the_same_checkpoint(params, project):
    pytest.importorskip("dvclive")
    checkpoint = ArtifactPaths().run("own", "csp", 0).checkpoint
    train_stage(ProjectRun("own", "csp", 0, params))
    before = checkpoint.read_bytes()
    result = train_stage(ProjectRun("own", "csp", 0, with_log(params, "dvclive")))
    assert checkpoint.read_bytes() == before
    table = pd.read_csv(project / "dvclive/own/csp/0/plots/metrics/epoch/val_auc.tsv", sep="\t")
    assert table["val_auc"].tolist() == pytest.approx([row["val_auc"] for row in result.history])


def test_another_log_is_no_reason_to_train_again(params):
    plain, logged = (
        ProjectData(each, "own").run("csp", 0).settings("train") for each in (params, with_log(params, "tensorboard"))
    )
    assert plain == logged and "log" not in plain["training"]
