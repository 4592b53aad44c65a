"""Worker processes of the server: their answers, their deaths, and that none outlives the server."""

import asyncio
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
from duplex.evaluation.new_share import NewShare
from duplex.recognition.serve import Batcher, ImageRequest, Reply, recognizer_workers
from duplex.system.processes import ProcessFailed
from tests.data.makers import encoded
from tests.recognition.serving import RunningServer
from tests.recognition.test_batcher import stored
from tests.waiting import has_ended, wait_until

OPTIONS: Any = {"world": None, "max_pixels": 10**6, "threads": 1}


class FragileRecognizer:
    """A recognizer that fails or dies over images of some colours and replies with its process id otherwise."""

    encoder = property(lambda self: self)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def candidates(self, world):
        return self

    def image_transform(self, image):
        return torch.zeros(3, 2, 2, dtype=torch.uint8) + image.getpixel((0, 0))[0]

    def encode(self, pixels):
        value = int(pixels[0].max())
        if value == 1:
            raise ValueError("a wrong colour")
        if value == 2 or (value == 3 and not (self.folder / "died").exists()):
            (self.folder / "died").touch()
            os._exit(9)
        return {"cls": torch.zeros(len(pixels), 2)}

    def blocks(self, inputs, top):
        self.unseen = [0.5] * len(inputs["cls"])
        return [self]

    def answers(self, share):
        return [self] * len(self.unseen)

    def to_dict(self, top):
        return {"top": [os.getpid()]}


def colour(value: int) -> ImageRequest:
    return ImageRequest(encoded(Image.new("RGB", (2, 2), (value, 0, 0))), 1)


def answer(workers: Any, *images: ImageRequest) -> list[Any]:
    async def run() -> list[Any]:
        batcher = Batcher(workers, stored())
        async with batcher.running():
            return await asyncio.gather(*map(batcher.answer, images))

    return asyncio.run(run())


@pytest.mark.slow
def test_a_failing_image_is_reported_alone_and_a_dying_worker_is_replaced(tmp_path):
    load: Any = partial(FragileRecognizer, tmp_path)
    with recognizer_workers(load, 1, **OPTIONS) as workers:
        (worker,) = workers
        first = worker.pid
        mixed = worker.submit([colour(1), colour(0), colour(1), colour(0)], NewShare(0.1)).result(60)
        assert mixed == ["ValueError: a wrong colour", Reply({"top": [first]}, unseen=0.5)] * 2
        assert answer(workers, colour(0))[0][0] == {"top": [first]} and worker.restarts == 0
        assert answer(workers, colour(3))[0][0]["top"] != [first], "another process tried the image once more"
        assert worker.restarts == 1
        with pytest.raises(ProcessFailed, match="ended with exit code 9"):
            answer(workers, colour(2))
        assert answer(workers, colour(0))[0][0] == {"top": [worker.pid]} and worker.restarts == 3
        last = worker.pid
    assert has_ended(last)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        pytest.param(partial(os._exit, 7), "exit code 7", marks=pytest.mark.slow, id="the process dies"),
        pytest.param(partial(Recognizer.load, "absent"), r"could not start: .*absent", id="the model is missing"),
    ],
)
def test_a_worker_that_cannot_load_its_model_is_reported_with_the_reason(load, message):
    with pytest.raises(ProcessFailed, match=message), recognizer_workers(load, 1, **OPTIONS):
        pass


@pytest.fixture(scope="module")
def server(trained):
    with RunningServer(trained.run(), trained.folder, "--workers", "2", "--seconds", "60") as running:
        yield running


@pytest.mark.slow
def test_both_workers_take_part_and_are_counted_together(trained, server):
    def seconds_used() -> list[int]:
        stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in server.workers]
        return [int(stat[11]) + int(stat[12]) for stat in stats]

    before, paths, rounds = server.metrics, trained.images()[:16], 0
    start = seconds_used()
    while min(now - then for now, then in zip(seconds_used(), start, strict=True)) < 5 and rounds < 50:
        with ThreadPoolExecutor(16) as clients:
            replies = list(clients.map(lambda path: server.predict((path.name, path.read_bytes())), paths))
        assert [status for status, _ in replies] == [200] * 16
        rounds += 1
    after = server.metrics
    assert len(start) == 2 and rounds < 50, "a worker had nothing to do"
    assert after["duplex_images_total"] - before["duplex_images_total"] == 16 * rounds
    assert after["duplex_resident_bytes"] == pytest.approx(server.resident, rel=0.1)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_image_is_answered(trained, server):
    good, before = ("good.png", trained.images()[0].read_bytes()), server.metrics["duplex_worker_restarts_total"]
    first = best(server.predict(good))
    killed = server.workers
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(4) as clients:
        assert all(best(reply) == first for reply in clients.map(server.predict, [good] * 4))
    assert not set(killed) & set(server.workers)
    noise, replies = encoded(Image.effect_noise((4000, 4000), 60)), list[tuple[int, dict]]()
    client = threading.Thread(target=lambda: replies.append(server.predict(("noise.png", noise))))
    client.start()
    time.sleep(0.3)
    for pid in server.workers:
        os.kill(pid, signal.SIGKILL)
    client.join(60)
    assert best(replies[0]) and best(server.predict(good)) == first
    assert server.metrics["duplex_worker_restarts_total"] > before


@pytest.mark.slow
def test_a_replacement_refuses_a_model_that_has_changed(trained, tmp_path):
    """Labels and scores would mix if a run was trained again while the server ran."""
    run = shutil.copytree(trained.run(), tmp_path / "run")
    with RunningServer(run, trained.folder, "--workers", "1", "--seconds", "60") as server:
        good = ("good.png", trained.images()[0].read_bytes())
        first = best(server.predict(good))
        shutil.copy(trained.run("closed_form") / "checkpoint.safetensors", run / "checkpoint.safetensors")
        assert best(server.predict(good)) == first
        os.kill(server.workers[0], signal.SIGKILL)
        status, reply = server.predict(good)
    assert status == 503 and "has changed since the server started" in reply["error"]


def best(reply: tuple[int, dict]) -> tuple[str, str]:
    status, body = reply
    assert status == 200, body
    guess = body["answers"][0]["top"][0]  # the digits of its score depend on the batch
    return guess["state"], guess["object"]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_no_worker_outlives_the_server(trained, end):
    with RunningServer(trained.run(), trained.folder, "--workers", "2") as server:
        workers = server.workers
        assert len(workers) == 2 and not any(map(has_ended, workers))
        server.process.send_signal(end)
        assert server.process.wait(30) == (0 if end != signal.SIGKILL else -end)
        wait_until(lambda: all(map(has_ended, workers)))
