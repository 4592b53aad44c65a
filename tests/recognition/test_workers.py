"""Processes that look at pictures: what they answer, how they die, and that none is left."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi")

from duplex import Recognizer
from duplex.errors import DuplexError
from duplex.recognition.workers import Asked, Gone, Job, staff
from tests.recognition.serving import Served, wait_until
from tests.subprocesses import duplex

PIXELS = 10**6


def test_answers_are_the_recognisers(trained):
    pictures = trained.pictures()[:6]
    own = Recognizer.load(trained.run(), device="cpu")
    job = Job(partial(Recognizer.load, trained.run(), device="cpu"), None, PIXELS, 1)
    tops = [1, 4, 2, 3, 4, 1]
    batch = [Asked(path.read_bytes(), top, top == 2) for path, top in zip(pictures, tops, strict=True)]
    with staff(job, 1) as (worker,):
        found = worker.answer([Asked(b"", 1), *batch[:3], Asked(b"none", 1), *batch[3:]])
    assert [found[place] for place in (0, 4)] == [({"error": "empty"}, None), ({"error": "not a picture"}, None)]
    good = [one for one in [*found[1:4], *found[5:]] if not isinstance(one, str)]
    assert len(good) == len(pictures)
    for (record, feature), path, top in zip(good, pictures, tops, strict=True):
        answer = own(path, top=top)[0].to_dict(top)
        assert [guess["score"] for guess in record["top"]] == pytest.approx(
            [guess["score"] for guess in answer["top"]], abs=1e-5
        )
        assert len(record["states"]) == len(answer["states"]) and (feature is not None) == (top == 2)


class Odd:
    """A recogniser for which the second picture is black, and then breaks or dies."""

    encoder = property(lambda self: self)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def panel(self, world):
        return self

    def image_transform(self, picture):
        return torch.zeros(3, 2, 2, dtype=torch.uint8) + picture.getpixel((0, 0))[0]

    def encode(self, pixels):
        value = int(pixels[0].max())
        if value == 1:
            raise ValueError("an odd picture")
        if value == 2 or (value == 3 and not (self.folder / "died").exists()):
            (self.folder / "died").touch()
            os._exit(9)
        return {"cls": torch.zeros(len(pixels), 2)}

    def answers(self, inputs, top):
        return [self] * len(inputs["cls"])

    def to_dict(self, top):
        return {"top": [os.getpid()]}


def flat(value: int) -> list[Asked]:
    out = io.BytesIO()
    Image.new("RGB", (2, 2), (value, 0, 0)).save(out, "PNG")
    return [Asked(out.getvalue(), 1)]


@pytest.mark.slow
def test_how_a_worker_breaks_and_dies(tmp_path):
    load: Any = partial(Odd, tmp_path)
    with staff(Job(load, None, PIXELS, 1), 1) as (worker,):
        assert worker.answer(flat(1)) == ["ValueError: an odd picture"]
        before = worker.pid
        mixed = worker.answer([*flat(1), *flat(0), *flat(1), *flat(0)])
        assert mixed == ["ValueError: an odd picture", ({"top": [before]}, None)] * 2, "only who sent it is told"
        assert worker.answer(flat(0))[0][0] == {"top": [before]} and worker.restarts == 0
        assert worker.answer(flat(3))[0][0]["top"] != [before], "it was looked at once more, by another"
        assert worker.restarts == 1
        with pytest.raises(Gone, match="exit code 9"):
            worker.answer(flat(2))
        assert worker.answer(flat(0))[0][0] == {"top": [worker.pid]} and worker.restarts == 3
        last = worker.pid
    assert gone(last)


def refuse_again(folder: Path) -> Odd:
    """Loads once."""
    if (folder / "loaded").exists():
        raise DuplexError("another model lies here")
    (folder / "loaded").touch()
    return Odd(folder)


@pytest.mark.slow
def test_one_that_cannot_be_started_again_is_told_of(tmp_path):
    load: Any = partial(refuse_again, tmp_path)
    with staff(Job(load, None, PIXELS, 1), 1) as (worker,):
        os.kill(worker.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(Gone, match=r"^a worker cannot begin: another model lies here$"):
                worker.answer(flat(0))


def test_one_that_cannot_begin_is_told_of(tmp_path):
    with pytest.raises(Gone, match="exit code 7"), staff(Job(partial(os._exit, 7), None, PIXELS, 1), 2):
        pass


def test_why_one_cannot_begin_is_said(tmp_path):
    absent: Any = partial(Recognizer.load, tmp_path / "absent")
    with pytest.raises(DuplexError, match=r"a worker cannot begin: .*absent"), staff(Job(absent, None, PIXELS, 1), 1):
        pass


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


# -- behind a server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(trained):
    with Served(trained.run(), trained.folder, "--workers", "2", "--seconds", "60") as running:
        yield running


@pytest.mark.slow
def test_both_take_part_and_are_counted_together(trained, server):
    def used() -> list[int]:
        stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in server.workers]
        return [int(stat[11]) + int(stat[12]) for stat in stats]

    before, pictures, rounds = server.numbers, trained.pictures()[:16], 0
    began = used()
    while min(now - then for now, then in zip(used(), began, strict=True)) < 5 and rounds < 50:
        with ThreadPoolExecutor(16) as clients:
            found = list(clients.map(lambda path: server.predict((path.name, path.read_bytes())), pictures))
        assert [status for status, _ in found] == [200] * 16
        rounds += 1
    after = server.numbers
    assert len(began) == 2 and rounds < 50, "one of them had nothing to do"
    assert after["duplex_pictures_total"] - before["duplex_pictures_total"] == 16 * rounds
    assert after["duplex_resident_bytes"] == pytest.approx(server.resident, rel=0.1)


@pytest.mark.slow
def test_a_killed_one_is_replaced(trained, server):
    """Idle, and while it looks at a picture: whoever asked gets the answer all the same."""
    good, before = ("good.png", trained.pictures()[0].read_bytes()), server.numbers["duplex_worker_restarts_total"]
    first = best(server.predict(good))
    old = server.workers
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(4) as clients:
        assert all(best(said) == first for said in clients.map(server.predict, [good] * 4))
    assert not set(old) & set(server.workers)
    out, answers = io.BytesIO(), list[tuple[int, dict]]()
    Image.effect_noise((4000, 4000), 60).save(out, "PNG")
    asking = threading.Thread(target=lambda: answers.append(server.predict(("noise.png", out.getvalue()))))
    asking.start()
    time.sleep(0.3)
    for pid in server.workers:
        os.kill(pid, signal.SIGKILL)
    asking.join(60)
    assert best(answers[0]) and best(server.predict(good)) == first
    assert server.numbers["duplex_worker_restarts_total"] > before


@pytest.mark.slow
def test_another_model_is_not_taken_for_the_first(trained, tmp_path):
    """A run that was trained again while the server ran: labels and scores would mix."""
    run = tmp_path / "run"
    shutil.copytree(trained.run(), run)
    with Served(run, trained.folder, "--workers", "1") as server:
        good = ("good.png", trained.pictures()[0].read_bytes())
        first = best(server.predict(good))
        shutil.copy(trained.run("closed_form") / "checkpoint.safetensors", run / "checkpoint.safetensors")
        assert best(server.predict(good)) == first
        os.kill(server.workers[0], signal.SIGKILL)
        status, found = server.predict(good)
    assert status == 503 and "holds another model than it did when the server started" in found["error"]


def best(said: tuple[int, dict]) -> tuple[str, str]:
    """Its digits depend on what it was encoded with."""
    status, found = said
    assert status == 200, found
    return found["answers"][0]["top"][0]["state"], found["answers"][0]["top"][0]["object"]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_none_is_left(trained, end):
    with Served(trained.run(), trained.folder, "--workers", "2") as server:
        workers = server.workers
        assert len(workers) == 2 and not any(map(gone, workers))
        server.process.send_signal(end)
        assert server.process.wait(30) == (0 if end != signal.SIGKILL else -end)
        wait_until(lambda: all(map(gone, workers)))


@pytest.mark.parametrize("number", ["0", "65", "many"])
def test_how_many_there_may_be(trained, number):
    done = duplex("serve", trained.run(), "--workers", number)
    assert done.returncode == 2 and "--workers" in done.stderr and "Traceback" not in done.stderr
