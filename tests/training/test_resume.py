"""The random numbers of a GPU in the state of an unfinished run; test_loop.py interrupts whole runs."""

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
