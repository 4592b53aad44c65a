"""Progress on stderr for what takes more than two seconds; silent where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn, track

Item = TypeVar("Item")


def tracked(items: Iterable[Item], what: str, total: int) -> Iterable[Item]:
    return track(items, what, total, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


@contextmanager
def transfer() -> Iterator[Progress]:
    """A bar that counts bytes."""
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        yield bar
