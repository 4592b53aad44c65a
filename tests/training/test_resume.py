"""The state of an unfinished run is restored completely, and only for its own run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from duplex.training.loop import TrainingState


def state(key: str = "k", device: str = "cpu", seed: int = 0) -> TrainingState:
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


def test_a_restored_state_continues_like_the_original(tmp_path: Path) -> None:
    first = stepped(state(), 2)
    first.best_epoch, first.best_value, first.best = 1, 0.25, {"weight": torch.ones(2, 3)}
    first.save(tmp_path / "s")
    whole = stepped(first, 3)
    drawn = torch.rand(5)
    other = state(seed=7)
    torch.manual_seed(99)
    other.load(tmp_path / "s")
    assert (other.epoch, other.best_epoch, other.best_value, len(other.history)) == (2, 1, 0.25, 2)
    assert torch.equal(other.best["weight"], torch.ones(2, 3)) and set(other.best) == {"weight"}
    again = stepped(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(again.method.parameters(), whole.method.parameters(), strict=True))
    assert again.history == whole.history and torch.equal(torch.rand(5), drawn)
    assert [group["lr"] for group in again.optimiser.param_groups] == [0.1 * 0.5**5, 0.2 * 0.5**5]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_random_state_of_a_gpu_is_restored_on_a_gpu_only(tmp_path: Path, monkeypatch, device: str) -> None:
    restored = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(3, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda numbers: restored.append(numbers.tolist()))
    state(device=device).save(tmp_path / "s")
    assert ("random.cuda" in load_file(tmp_path / "s")) == (device == "cuda")
    state().load(tmp_path / "s")
    assert restored == []
    state(device="cuda").load(tmp_path / "s")
    assert restored == ([[0, 1, 2]] if device == "cuda" else [])
