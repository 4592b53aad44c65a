"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pretended import Pretended, register

AVAILABLE = register()  # before the first backward pass, which is when torch counts its devices


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A test is not named after bytes: an archive holds the second it was made in, and each worker makes its own."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def pretended() -> Iterator[Pretended]:
    """The pretended device, entered."""
    if not AVAILABLE:
        pytest.skip(f"torch {torch.__version__} has no devices made in Python")
    with Pretended() as device:
        yield device
