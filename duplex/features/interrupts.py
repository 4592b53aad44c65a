"""How a long run is stopped, and how it speaks."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """The first Ctrl-C (or a scheduler's SIGTERM) asks to stop after the block in hand; a second one is not caught."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(signalled: int, frame: object) -> None:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        say("stopping after this batch")

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(message: str) -> None:
    print(message, file=sys.stderr)
