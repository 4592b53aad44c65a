"""The state of an unfinished run is restored completely, and only for its own run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from duplex.errors import DuplexError
from duplex.training.loop import TrainingState, saved_epoch


def state(key: str = "k", device: str = "cpu", seed: int = 0) -> TrainingState:
    """A network of one layer with two parameter groups, a schedule and a random order."""
    torch.manual_seed(seed)
    network = nn.Linear(3, 2)
    optimiser = torch.optim.Adam([{"params": [network.weight], "lr": 0.1}, {"params": [network.bias], "lr": 0.2}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)
    order = torch.Generator().manual_seed(seed)
    return TrainingState(key, network, optimiser, schedule, order, torch.device(device))  # type: ignore[arg-type]


def stepped(one: TrainingState, steps: int) -> TrainingState:
    for step in range(steps):
        one.optimiser.zero_grad()
        one.method(torch.randn(4, 3, generator=one.order)).square().sum().backward()
        one.optimiser.step()
        one.schedule.step()
        one.epoch, one.history = step + 1, [*one.history, {"loss": float(torch.rand(()))}]
    return one


def record(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return {"names": set(file.keys()), **json.loads(file.metadata()["duplex"])}


def test_a_restored_state_continues_like_the_original(tmp_path: Path) -> None:
    first = stepped(state(), 2)
    first.best_epoch, first.best_value, first.best = 1, 0.25, {"weight": torch.ones(2, 3)}
    first.save(tmp_path / "s")
    whole = stepped(first, 3)
    drawn = torch.rand(5)
    other = state(seed=7)
    torch.manual_seed(99)
    assert other.load(tmp_path / "s") is None
    assert (other.epoch, other.best_epoch, other.best_value, len(other.history)) == (2, 1, 0.25, 2)
    assert torch.equal(other.best["weight"], torch.ones(2, 3)) and set(other.best) == {"weight"}
    again = stepped(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(again.method.parameters(), whole.method.parameters(), strict=True))
    assert again.history == whole.history and torch.equal(torch.rand(5), drawn)
    assert [group["lr"] for group in again.optimiser.param_groups] == [0.1 * 0.5**5, 0.2 * 0.5**5]


def test_another_key_or_format_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped(state(), 1).save(tmp_path / "s")
    assert record(tmp_path / "s")["format"] == 5
    fresh = state("other", seed=3)
    before = {name: tensor.clone() for name, tensor in fresh.method.state_dict().items()}
    assert fresh.load(tmp_path / "s") == "belongs to another run"
    monkeypatch.setattr("duplex.training.loop.FORMAT", 6)
    assert state().load(tmp_path / "s") == "has format 5, this version reads format 6"
    assert all(torch.equal(before[name], tensor) for name, tensor in fresh.method.state_dict().items())
    assert fresh.epoch == 0


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"\0" * 99)
    with pytest.raises(DuplexError, match=r"s cannot be read .*; delete it to start from the beginning"):
        state().load(tmp_path / "s")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_random_state_of_a_gpu_is_restored_on_a_gpu_only(tmp_path: Path, monkeypatch, device: str) -> None:
    restored = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(3, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda numbers: restored.append(numbers.tolist()))
    state(device=device).save(tmp_path / "s")
    assert ("random.cuda" in record(tmp_path / "s")["names"]) == (device == "cuda")
    assert state().load(tmp_path / "s") is None
    assert restored == []
    assert state(device="cuda").load(tmp_path / "s") is None
    assert restored == ([[0, 1, 2]] if device == "cuda" else [])


def test_a_run_that_was_never_begun_has_no_finished_epoch(tmp_path):
    assert saved_epoch(tmp_path / "none") == 0
