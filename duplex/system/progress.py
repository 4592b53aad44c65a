"""Progress bar on stderr, hidden if stderr is not a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")


class ProgressBar:
    """A progress bar with values behind it: `with ProgressBar("epochs", 9) as bar: bar.show(3, {"loss": 0.2})`.

    label: text before the bar.
    total: number of steps; 0 hides the bar.
    """

    def __init__(self, label: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
        )
        hidden = not sys.stderr.isatty() or total == 0
        # the time left is estimated from the whole run: a step may take longer than rich looks back by default
        self._progress = Progress(
            *columns, console=Console(stderr=True), disable=hidden, speed_estimate_period=math.inf
        )
        self._task = self._progress.add_task(label, total=total, values="")

    def show(self, done: int, values: Mapping[str, float] | None = None) -> None:
        """Set the number of finished steps and the values displayed behind the bar."""
        text = "  ".join(f"{name.removeprefix('loss_')} {value:.4g}" for name, value in (values or {}).items())
        self._progress.update(self._task, completed=done, values=text)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def track(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Yield the items while a progress bar counts them."""
    with ProgressBar(label, total) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.show(done)
