"""Pictures that come together are encoded together; nobody waits for nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from duplex.recognition.answers import Answer
from duplex.recognition.batching import Batcher

LONG = 600.0  # seconds that no test would live through


class Encoder:
    """Notes how many pictures came at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def encode(self, pixels):
        self.sizes.append(len(pixels))
        return {"cls": torch.stack(list(pixels))}

    def answers(self, inputs, top):
        return [Answer((), {str(float(row[0])): 1.0}, {}) for row in inputs["cls"]]


def served(talk: Any, **options: Any) -> list[int]:
    async def run() -> list[int]:
        encoder: Any = Encoder()
        batcher = Batcher(encoder, encoder, **options)
        batcher.start()
        await asyncio.wait_for(talk(batcher), 60)
        await batcher.stop()
        return encoder.sizes

    return asyncio.run(run())


def test_who_asks_alone_does_not_wait():
    async def talk(batcher):
        answer, feature = await batcher.ask(torch.full((2,), 3.0), 1)
        assert answer.states == {"3.0": 1.0} and feature.tolist() == [3.0, 3.0]

    assert served(talk, wait=LONG) == [1]


def test_a_batch_waits_for_what_is_being_decoded_but_not_for_ever():
    async def talk(batcher):
        with batcher.decoding():
            first = asyncio.create_task(batcher.ask(torch.zeros(2), 1))
            await asyncio.sleep(0.05)
        await asyncio.gather(first, batcher.ask(torch.ones(2), 1))

    assert served(talk, wait=LONG) == [2]

    async def slow(batcher):
        with batcher.decoding():
            await batcher.ask(torch.zeros(2), 1)

    assert served(slow, wait=0.01) == [1]


def test_each_gets_its_own_and_batches_have_a_size():
    async def talk(batcher):
        found = await asyncio.gather(*(batcher.ask(torch.full((2,), float(k)), 1) for k in range(10)))
        assert [answer.states for answer, _ in found] == [{str(float(k)): 1.0} for k in range(10)]

    assert sum(sizes := served(talk, size=4)) == 10 and max(sizes) == 4
