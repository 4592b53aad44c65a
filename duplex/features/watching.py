"""What a person at the terminal sees of a long run, and how they stop it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """The first Ctrl-C (or a scheduler's SIGTERM) asks to stop after the block in hand; a second one is not caught."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    caught = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in caught]

    def request(signalled: int, frame: object) -> None:
        stop.set()
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)
        say("stopping after this batch")

    for number in caught:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def progress_bar(total: int, done: int, wanted: bool, noun: str = "pictures") -> Iterator[Callable[[int], None]]:
    """Rate and time left on stderr, where somebody is looking."""
    console = Console(stderr=True)
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (wanted and console.is_terminal), transient=True) as bar:
        task = bar.add_task(noun, total=total, completed=done, rate="")

        def advance(count: int) -> None:
            bar.advance(task, count)
            speed = bar.tasks[task].speed
            bar.update(task, rate=f"{speed:.1f}/s" if speed else "")

        yield advance


def say(message: str) -> None:
    print(message, file=sys.stderr)
