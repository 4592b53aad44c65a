"""Requests to stop a long run."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from duplex.features.interrupts import stop_requests

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def before():
    """Handlers that note each signal."""
    heard: list[int] = []
    kept = [signal.signal(number, lambda signalled, _: heard.append(signalled)) for number in NUMBERS]
    yield heard
    for number, handler in zip(NUMBERS, kept, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_sets_the_event_and_a_second_reaches_the_old_handler(before, capsys, number: int) -> None:
    with stop_requests() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set() and before == []
        assert capsys.readouterr().err == "stopping after this batch\n"
        for again in NUMBERS:
            os.kill(os.getpid(), again)
        assert before == list(NUMBERS)


def test_after_the_block_signals_reach_the_old_handler(before) -> None:
    with pytest.raises(ValueError, match="anything"), stop_requests():
        raise ValueError("anything")
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    assert before == list(NUMBERS)


def test_in_another_thread_signals_are_not_caught(before) -> None:
    """Python delivers signals only to the main thread; handlers cannot be set elsewhere."""
    seen: list[bool] = []

    def elsewhere() -> None:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            seen.append(stop.wait(0.05))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [False] and before == [signal.SIGINT]
