"""Settings of the process that torch computes in: memory, precision, threads and modes.

By default glibc returns large freed blocks to the kernel; keeping them makes convolutional
encoders on a CPU up to three times faster. Functions import torch themselves: every command
imports this module.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from duplex.errors import UsageError, require

if TYPE_CHECKING:
    import torch

Threads = int | Literal["auto"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TRIM_THRESHOLD = -1  # parameters of mallopt, from malloc.h
MMAP_THRESHOLD = -3
MAPPED = 1 << 30  # bytes; larger blocks still come from the kernel
KEPT = (1 << 31) - 1  # free bytes at the heap's end that stay; mallopt's largest value
USER_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for reuse; False without glibc, or if the user has configured it."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USER_SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, MAPPED) and mallopt(TRIM_THRESHOLD, KEPT))


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of peak memory, for this process and a GPU `device`."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_resident() -> int:
    """Peak resident memory of this process in bytes, on Linux since the last reset."""
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def dtype_of(precision: str) -> torch.dtype:
    import torch

    require(precision, PRECISIONS, "precision")
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def require_precision(precision: str, device: torch.device, option: str) -> None:
    """Raise `UsageError`, which names the `option`, for bf16 on a GPU that can only emulate it."""
    import torch

    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        problem = f"{option} is bf16, in which the GPU ({name}) cannot compute"
        raise UsageError(f"{problem}; set it to fp32 or the device to cpu")


def bf16_products(precision: str, device: torch.device) -> torch.autocast:
    """Context manager: matrix products in bf16 if `precision` is "bf16", with weights as they are at each use."""
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


@contextmanager
def float32_arithmetic(precision: str) -> Iterator[None]:
    """Context manager, around backward passes too: allow TF32 on GPUs if `precision` is "tf32"."""
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def cpu_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads(wanted: Threads) -> Iterator[None]:
    """Context manager: let torch use `wanted` CPU threads; "auto" keeps torch's own number."""
    import torch

    before = torch.get_num_threads()
    if wanted != "auto":
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def in_initial_modes() -> Iterator[None]:
    """Context manager or decorator: gradients on, autocast off, new tensors float32 on the CPU."""
    import torch

    dtype = torch.get_default_dtype()
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    no_autocast = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), on_cpu, no_autocast[0], no_autocast[1]:
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
