"""How a long run is asked to stop."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from duplex.features.interrupts import stop_requests

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def before():
    """Handlers of our own, that count."""
    heard: list[int] = []
    kept = [signal.signal(number, lambda signalled, _: heard.append(signalled)) for number in NUMBERS]
    yield heard
    for number, handler in zip(NUMBERS, kept, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_request_is_taken_and_a_second_goes_where_it_went_before(before, capsys, number: int) -> None:
    with stop_requests() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set() and before == []
        assert capsys.readouterr().err == "stopping after this batch\n"
        for again in NUMBERS:
            os.kill(os.getpid(), again)
        assert before == list(NUMBERS)


def test_afterwards_every_request_goes_where_it_went_before(before) -> None:
    with pytest.raises(ValueError, match="anything"), stop_requests():
        raise ValueError("anything")
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    assert before == list(NUMBERS)


def test_in_another_thread_nobody_is_listened_to(before) -> None:
    """Python hands signals to the main thread alone; asking for them elsewhere is an error."""
    seen: list[bool] = []

    def elsewhere() -> None:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            seen.append(stop.wait(0.05))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [False] and before == [signal.SIGINT]
