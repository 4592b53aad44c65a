"""Settings and hooks of `duplex.fit` reach the training, or are refused in one line."""

from typing import Any

import numpy as np
import pytest
import torch

import duplex
from duplex.errors import UsageError
from tests.projects import inside
from tests.training.test_hooks import Ledger
from tests.training.test_ten_lines import arrays, small


@pytest.fixture(scope="module")
def with_text() -> duplex.Dataset:
    rows = len(arrays()["features"])
    return small(encoder="tiny", features=np.random.default_rng(1).normal(size=(rows, 128)))


def losses(data: duplex.Dataset, **settings: Any) -> list[float]:
    return duplex.fit(data, "csp", epochs=2, learning_rate=0.01, **settings).history["loss_semantic"].tolist()[1:]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_of_the_text_tower_is_used(with_text, precision):
    exact, other = losses(with_text), losses(with_text, precision=precision)
    assert exact == losses(with_text, precision="fp32")
    assert other == pytest.approx(exact, rel=0.05) and other != pytest.approx(exact, rel=1e-6)
    run = duplex.fit(with_text, "csp", epochs=1, precision=precision)
    assert run.record.encoder["text_precision"] == precision
    assert duplex.evaluate(run, with_text).auc >= 0


def test_every_setting_changes_training(with_text):
    plain = losses(with_text, batch_size=8)
    changes: dict[str, dict[str, Any]] = {
        "clip": {"clip": 1e-3}, "decay": {"optimiser": "adamw", "weight_decay": 0.5},
        "optimiser": {"optimiser": torch.optim.NAdam}, "schedule": {"schedule": lambda epoch: 0.0},
    }  # fmt: skip
    found = {name: losses(with_text, batch_size=8, **settings) for name, settings in changes.items()}
    assert all(values != plain for values in found.values())
    assert len({tuple(values) for values in found.values()}) == len(changes)


@pytest.mark.parametrize(
    ("own", "setting"),
    [({"optimiser": torch.optim.NAdam}, {"weight_decay": 0.1}), ({"schedule": lambda epoch: 0.5}, {"decay": 0.9})],
)
def test_settings_that_a_function_replaces_are_refused(own: dict[str, Any], setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(setting))} has no effect with your own {next(iter(own))}"):
        duplex.fit(small(), "kg_sp", epochs=2, **own, **setting)


def test_the_metric_that_selected_is_named(tmp_path):
    run = duplex.fit(small(), "kg_sp", epochs=2, select="hm")
    assert run.selected_by == run.record.selected_by == "hm" and "by hm" in repr(run)
    assert {"val_auc", "val_hm"} <= set(run.history)
    header = (run.save(tmp_path) / "history.csv").read_text().splitlines()[0]
    assert header.startswith("epoch,val_auc,val_hm")
    everywhere = duplex.fit(small(), "kg_sp", epochs=2, select_world="open")
    assert everywhere.selected_by == "auc_all" and {"val_auc", "val_auc_all"} <= set(everywhere.history)
    with pytest.raises(UsageError, match="leave out select_world"):
        duplex.fit(small(), "kg_sp", epochs=2, select="last", select_world="open")
    plain = duplex.fit(small(), "kg_sp", epochs=2)
    assert plain.selected_by == "auc" and "val_hm" not in plain.history and " by " not in repr(plain)


def test_a_log_is_written_into_the_current_folder_or_to_an_object(tmp_path):
    pytest.importorskip("tensorboard")
    with inside(tmp_path):
        duplex.fit(small(name="mine"), "kg_sp", seed=3, epochs=1, log="tensorboard")
    assert list((tmp_path / "tensorboard" / "mine" / "kg_sp" / "3").iterdir())
    log = Ledger()
    duplex.fit(small(), "kg_sp", epochs=1, log=log)
    assert log.calls[0] == ("epoch", 0) and log.calls[-1] == ("close", 0)
