"""Training logs: files of DVCLive and TensorBoard, logs of other packages, and missing packages."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pandas as pd
import pytest

from duplex.errors import DuplexError, UsageError
from duplex.training import logs
from duplex.training.logs import StepReport, open_log
from tests.methods.world import small_method
from tests.training.test_hooks import DUPLEX, SETTINGS, Ledger, trained


def logged(name: str, folder: Path):
    return trained("hm", log=open_log(name, folder))[1]


@pytest.mark.slow
def test_dvclive_has_a_line_per_step_and_per_epoch_that_dvc_finds(tmp_path):
    pytest.importorskip("dvclive")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    folder = tmp_path / "dvclive" / "shapes" / "duplex" / "0"
    with contextlib.chdir(tmp_path), pytest.raises(DuplexError, match="needs a commit"):
        open_log("dvclive", folder)
    outcome = logged("dvclive", folder)
    last = outcome.history[-1]
    table = pd.read_csv(folder / "plots" / "metrics" / "epoch" / "val_hm.tsv", sep="\t")
    assert table["step"].tolist() == [0, 1, 2, 3, 4]
    assert table["val_hm"].tolist() == pytest.approx([row["val_hm"] for row in outcome.history])
    rates = pd.read_csv(folder / "plots" / "metrics" / "train" / "learning_rate.tsv", sep="\t")
    assert rates["step"].tolist() == list(range(1, 29))
    assert rates["learning_rate"].unique().tolist() == [SETTINGS.learning_rate]
    assert json.loads((folder / "metrics.json").read_text())["epoch"]["val_auc"] == pytest.approx(last["val_auc"])
    shown = subprocess.run(
        [sys.executable, "-m", "dvc", "metrics", "show", "--json"], cwd=tmp_path, check=True, capture_output=True
    )
    (metrics,) = json.loads(shown.stdout)[""]["data"].values()
    assert metrics["data"]["epoch"]["val_hm"] == pytest.approx(last["val_hm"])


def test_tensorboard_has_a_point_per_step_and_per_epoch(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    outcome = logged("tensorboard", tmp_path)
    reader = events.EventAccumulator(str(tmp_path)).Reload()
    points = {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}
    assert [point.step for point in points["epoch/val_hm"]] == [0, 1, 2, 3, 4]
    assert [point.value for point in points["epoch/val_hm"]] == pytest.approx([r["val_hm"] for r in outcome.history])
    assert [point.step for point in points["train/loss_semantic"]] == list(range(1, 29))
    log = open_log("tensorboard", tmp_path / "rates")
    log.step(StepReport(small_method(DUPLEX), 1, 1, {}, (0.1, 0.2)))
    log.close()
    tags = events.EventAccumulator(str(tmp_path / "rates")).Reload().Tags()["scalars"]
    assert set(tags) == {"train/learning_rate_0", "train/learning_rate_1"}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a run's file: LevelDB's log format, in blocks of 32 KiB, after a header of seven bytes."""
    place, record, block = 7, b"", 1 << 15
    while place < len(data):
        if block - place % block < 7:  # no room for a header: zeros
            place += block - place % block
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_writes_a_run_without_a_network(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    from wandb.proto.wandb_internal_pb2 import Record

    folder = tmp_path / "wandb" / "shapes" / "duplex" / "0"
    outcome = logged("wandb", folder)
    wandb.teardown()  # its service has then ended, and with it the writing of the run's file
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows, named = [], []
    for data in wandb_records(written.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        named += [(record.run.project, record.run.display_name)] if record.HasField("run") else []
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    assert named[0] == ("duplex", "shapes/duplex/0")
    epochs = [row for row in rows if "epoch/val_hm" in row]
    assert [row["epoch/number"] for row in epochs] == [0, 1, 2, 3, 4]
    assert [row["epoch/val_hm"] for row in epochs] == pytest.approx([row["val_hm"] for row in outcome.history])
    assert [row["train/number"] for row in rows if "train/loss_semantic" in row] == list(range(1, 29))


@pytest.mark.slow
def test_mlflow_writes_a_run_without_a_server(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(DuplexError, match="needs the environment variable MLFLOW_TRACKING_URI; set it to, say"):
        open_log("mlflow", tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    outcome = logged("mlflow", Path("mlflow", "shapes", "duplex", "0"))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("shapes").experiment_id])
    assert run.info.run_name == "duplex/0" and run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, "epoch/val_hm")
    assert [point.step for point in points] == [0, 1, 2, 3, 4]
    assert [point.value for point in points] == pytest.approx([row["val_hm"] for row in outcome.history])
    assert len(client.get_metric_history(run.info.run_id, "train/loss_semantic")) == 28
    open_log("mlflow", Path("mlflow", "shapes", "duplex", "1")).close()
    assert len(client.search_runs([run.info.experiment_id])) == 2, "one experiment for all runs of a data set"


class Registered(Ledger):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder


def test_another_package_registers_a_log(monkeypatch, tmp_path):
    point = EntryPoint("mine", f"{__name__}:Registered", logs.GROUP)
    monkeypatch.setattr(logs, "entry_points", lambda group: [point])
    log = open_log("mine", tmp_path)
    assert type(log).__name__ == "Registered" and log.folder == tmp_path
    with pytest.raises(
        UsageError, match=r"unknown training\.log 'mind'; known: dvclive, tensorboard, wandb, mlflow, mine, none"
    ):
        open_log("mind", tmp_path)


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DuplexError, match=r"training.log is wandb.*pip install 'duplex-czsl\[wandb\]'") as caught:
        open_log("wandb", tmp_path / "log")
    assert "\n" not in str(caught.value)
