"""What every test may ask for."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.remembered  # noqa: F401
from tests.pretended import Pretended, register

# The same examples in every run, however slow the machine: what must pass does not fail by chance. Else they are new.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
if os.environ.get("DUPLEX_STEADY"):
    settings.load_profile("steady")

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="duplex-tests-")  # features of this run alone
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


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
