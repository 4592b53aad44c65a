"""Freed memory stays with the process, counted in page faults."""

import os
import platform
import subprocess
import sys

import pytest

from duplex.system.threads import USER_SETTINGS

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns memory like this")
FAULTS = """
import resource, torch
import duplex.cli
from duplex.system.entry import run_command
def layers():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(8 << 20)  # 32 MiB, freed at once
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
torch.ones(1)
layers()
run_command(layers)
"""


@glibc
def test_a_command_keeps_freed_memory() -> None:
    given = {key: value for key, value in os.environ.items() if key not in USER_SETTINGS}
    done = subprocess.run([sys.executable, "-c", FAULTS], stdout=subprocess.PIPE, text=True, check=True, env=given)
    plain, kept = map(int, done.stdout.split())
    assert kept * 4 < plain
