"""Progress over pictures and bytes, on stderr and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from duplex.system.progress import Bar

Item = TypeVar("Item")


def tracked(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    with Bar(what, total) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.show(done)


@contextmanager
def transfer() -> Iterator[Progress]:
    """A bar that counts bytes."""
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        yield bar
