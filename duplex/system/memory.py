"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of this process, and of its GPU if `device` is one.

    Without this, larger models that the process trained before would count in the next measurement.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_resident() -> int:
    """Peak resident memory of this process in bytes: since the last reset on Linux, else since its start."""
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
