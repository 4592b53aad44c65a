"""Training logs: files of DVCLive and TensorBoard, logs of other packages, and missing packages."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pandas as pd
import pytest

from duplex.errors import DuplexError, UsageError
from duplex.training import logs
from duplex.training.logs import open_log
from tests.training.test_hooks import SETTINGS, Ledger, trained


def logged(name: str, folder: Path):
    log = open_log(name, folder)
    return trained("hm", log=log)[1]


@pytest.mark.slow
def test_dvclive_has_a_line_per_step_and_per_epoch_that_dvc_finds(tmp_path):
    pytest.importorskip("dvclive")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    folder = tmp_path / "dvclive" / "shapes" / "duplex" / "0"
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


class Registered(Ledger):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder


def test_another_package_registers_a_log(monkeypatch, tmp_path):
    point = EntryPoint("mine", f"{__name__}:Registered", logs.GROUP)
    monkeypatch.setattr(logs, "entry_points", lambda group: [point])
    log = open_log("mine", tmp_path)
    assert type(log).__name__ == "Registered" and log.folder == tmp_path
    with pytest.raises(UsageError, match=r"unknown training\.log 'mind'; known: dvclive, tensorboard, mine, none"):
        open_log("mind", tmp_path)


@pytest.mark.parametrize(("name", "module"), [("dvclive", "dvclive"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(monkeypatch, tmp_path, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DuplexError, match=rf"training.log is {name}.*pip install 'duplex-czsl\[{name}\]'") as caught:
        open_log(name, tmp_path / "log")
    assert "\n" not in str(caught.value)
