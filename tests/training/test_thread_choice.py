"""Number of threads by timing: the faster one is taken, and training goes on as if nothing had been timed."""

import time
from pathlib import Path

import pytest
import torch

from duplex.system.threads import threads
from duplex.training import loop, thread_choice
from duplex.training.loop import ResumePoint
from duplex.training.thread_choice import choose_threads, time_threads
from tests.methods.world import small_method
from tests.training.test_loop import DUPLEX, SETTINGS, examples, images, run, same


@pytest.fixture(autouse=True)
def two_threads():
    with threads(2):
        yield


@pytest.mark.parametrize("fastest", [1, 2])
def test_a_step_gets_the_threads_with_which_it_is_fastest(fastest):
    def step():
        time.sleep(0.001 if torch.get_num_threads() == fastest else 0.01)

    seconds = time_threads(step, (1, 2), rounds=3)
    assert min(seconds, key=lambda count: seconds[count]) == fastest


def test_timing_leaves_method_random_numbers_and_threads_as_they_were():
    method = small_method(DUPLEX)
    before, random = {k: v.clone() for k, v in method.state_dict().items()}, torch.get_rng_state()
    count, seconds = choose_threads(method, images(), 8)
    assert count in seconds
    assert set(seconds) == {1, 2}
    assert all(torch.equal(before[name], value) for name, value in method.state_dict().items())
    assert all(parameter.grad is None for parameter in method.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert torch.get_num_threads() == 2


def test_timing_changes_no_result(monkeypatch):
    monkeypatch.setattr(loop, "choose_threads", lambda *_: (1, {}))
    untimed, _ = run()
    monkeypatch.undo()
    monkeypatch.setattr(thread_choice, "MARGIN", 0.0)
    timed, outcome = run()
    assert same(untimed, timed)
    assert outcome.timing["threads"] == 1


def test_a_resumed_run_keeps_the_number_that_was_chosen(tmp_path: Path, monkeypatch):
    path = tmp_path / "state"
    monkeypatch.setattr(loop, "choose_threads", lambda *_: (1, {}))
    stops = iter([0.5, 0.5])
    with pytest.raises(StopIteration):
        loop.train(small_method(DUPLEX), examples(), SETTINGS, 0, lambda _: next(stops), ResumePoint(path=path))
    monkeypatch.setattr(loop, "choose_threads", lambda *_: pytest.fail("timed again"))
    result = loop.train(small_method(DUPLEX), examples(), SETTINGS, 0, lambda _: 0.5, ResumePoint(path=path))
    assert result.timing["threads"] == 1
