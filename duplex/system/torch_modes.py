"""PyTorch's initial modes (gradients, autocast, default dtype and device), whatever the caller's are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def initial_modes() -> Iterator[None]:
    """Gradients on, autocast off, new tensors float32 on the CPU; a context manager or a decorator."""
    dtype = torch.get_default_dtype()
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    autocast = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]
    with torch.inference_mode(False), torch.enable_grad(), on_cpu, autocast[0], autocast[1]:
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
