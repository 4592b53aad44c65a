"""What every test may ask for."""

import atexit
import functools
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from duplex.system import entry, plugins
from duplex.training import logs
from tests.pretended import Pretended, register

# The same examples in every run, however slow the machine: what must pass does not fail by chance. Else they are new.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
if os.environ.get("DUPLEX_STEADY"):
    settings.load_profile("steady")

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="duplex-tests-")  # features of this run alone
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@functools.cache
def _entry_points(path: tuple[str, ...], chosen: tuple[tuple[str, str], ...]) -> Any:
    return importlib.metadata.entry_points(**dict(chosen))


def entry_points(**chosen: str) -> Any:
    """Those of the packages on the path, whose files are read once; each command would read them many times."""
    return _entry_points(tuple(sys.path), tuple(chosen.items()))


for module in (entry, logs, plugins):
    module.entry_points = entry_points  # type: ignore[attr-defined]

# Before the first backward pass, which is when torch counts its devices; a second kind of device breaks a real one.
AVAILABLE = not torch.cuda.is_available() and register()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A test is not named after bytes: an archive holds the second it was made in, and each worker makes its own."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def pretended() -> Iterator[Pretended]:
    if not AVAILABLE:
        pytest.skip(f"torch {torch.__version__} has no devices made in Python")
    with Pretended() as device:
        yield device
