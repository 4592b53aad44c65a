"""State of an unfinished training run in one safetensors file, from which a killed run continues."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from duplex.errors import DuplexError
from duplex.methods.base import Method
from duplex.system.files import write_tensors

FORMAT = 5
SAVED = ("key", "threads", "epoch", "best_epoch", "best_value", "history")


@dataclass
class TrainingState:
    """State of training: everything that the next epoch depends on. `key` is a hash of options, data and seed."""

    key: str
    method: Method[Any]
    optimiser: torch.optim.Optimizer
    schedule: LRScheduler
    order: torch.Generator  # draws the order of the images
    device: torch.device
    threads: int = 0  # CPU threads of training, once they are chosen
    epoch: int = 0
    best_epoch: int = 0
    best_value: float = -math.inf  # of the validation metric that chooses the epoch
    history: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)  # tensors of the best epoch

    def save(self, path: Path) -> None:
        """Write the training state to a file atomically."""
        moments = self.optimiser.state_dict()
        tensors = {f"method.{name}": tensor for name, tensor in self.method.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for row, state in moments["state"].items():
            tensors |= {f"optimiser.{row}.{name}": tensor for name, tensor in state.items()}
        tensors |= {"random.order": self.order.get_state(), "random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        record = {
            "format": FORMAT,
            **{
                name: getattr(self, name) for name in ("key", "threads", "epoch", "best_epoch", "best_value", "history")
            },
            "groups": moments["param_groups"],
            "schedule": self.schedule.state_dict(),
        }
        on_cpu = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        write_tensors(path, on_cpu, {"duplex": json.dumps(record)})

    def load(self, path: Path) -> str | None:
        """Restore the training state from a file and return None, or return the reason why the file does not fit.

        A file of another format or of another run changes nothing. Raises `DuplexError` if the file cannot be read.
        """
        try:
            with safe_open(path, "pt") as file:
                record = json.loads(file.metadata()["duplex"])
                if record.get("format") != FORMAT:
                    return f"has format {record.get('format')}, this version reads format {FORMAT}"
                if record["key"] != self.key:
                    return "belongs to another run"
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise DuplexError(f"{path} cannot be read ({error}); delete it to start from the beginning") from error
        self.method.load_state_dict(_under("method.", tensors))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("optimiser.", tensors).items():
            row, key = name.split(".")
            moments.setdefault(int(row), {})[key] = tensor
        self.optimiser.load_state_dict({"state": moments, "param_groups": record["groups"]})
        self.schedule.load_state_dict(record["schedule"])
        self.best = {name: tensor.to(self.device) for name, tensor in _under("best.", tensors).items()}
        self.order.set_state(tensors["random.order"])
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"])
        self.threads, self.epoch, self.best_epoch = record["threads"], record["epoch"], record["best_epoch"]
        self.best_value, self.history = record["best_value"], record["history"]
        return None


def saved_epoch(path: Path) -> int:
    """Return the number of finished epochs in the file of an unfinished run; 0 if there is none."""
    try:
        with safe_open(path, "pt") as file:
            return int(json.loads(file.metadata()["duplex"])["epoch"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return 0


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
