"""Freed memory stays with the process until it is needed again.

glibc takes large blocks straight from the kernel and gives them back when they are freed, so that each layer of a
network over a batch finds its output's pages untouched: the kernel clears them again, page by page, while the processor
waits. A convolutional encoder spends most of its time so. With both thresholds raised the next layer gets the pages
that the last one freed.
"""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # what malloc.h calls them
MAPPED = 1 << 30  # blocks of a GiB come from the kernel all the same
KEPT = (1 << 31) - 1  # bytes free at the heap's end that stay; the most that mallopt takes
OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")  # whoever set one of these knows better


def keep_freed_memory() -> bool:
    """Raise both thresholds of this process and of those it forks; False where there is no glibc, or where its user
    has set them. To be called where a process starts: blocks that are there already keep their kind."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in OWN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, MAPPED) and mallopt(TRIM_THRESHOLD, KEPT))
