"""A live line on stderr, off where stderr is not a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """`with Bar("training", epochs) as bar: bar.show(3, {"loss": 0.2})`"""

    def __init__(self, label: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
        )
        console, hidden = Console(stderr=True), not sys.stderr.isatty() or total == 0
        # the time left comes from the whole run: a step may take longer than rich would look back
        self._progress = Progress(*columns, console=console, disable=hidden, speed_estimate_period=math.inf)
        self._task = self._progress.add_task(label, total=total, values="")

    def show(self, done: int, values: Mapping[str, float] | None = None) -> None:
        text = "  ".join(f"{name.removeprefix('loss_')} {value:.4g}" for name, value in (values or {}).items())
        self._progress.update(self._task, completed=done, values=text)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
