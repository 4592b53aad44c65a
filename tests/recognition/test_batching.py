"""Pictures that come together are encoded together, shared out evenly; nobody waits for nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, cast

import pytest

from duplex.errors import DuplexError
from duplex.recognition.batching import Batcher
from duplex.recognition.workers import Asked
from tests.recognition.serving import wait_until

LONG = 600.0  # seconds that no test would live through
LEAVE = 30.0  # seconds after which a stuck worker gives up


class Noting:
    """Notes how many pictures came at once; the record of a picture is its bytes. One breaks a batch, one itself."""

    def __init__(self, sizes: list[int], slow: float = 0.0) -> None:
        self.sizes, self.slow = sizes, slow

    def answer(self, batch):
        self.sizes.append(len(batch))
        time.sleep(self.slow)
        if any(one.data == b"broken" for one in batch):
            raise ValueError("broken")
        return ["odd" if one.data == b"odd" else ({"data": one.data, "top": one.top}, None) for one in batch]


def served(talk: Any, workers: int = 1, slow: float = 0.0, **options: Any) -> list[int]:
    async def run() -> list[int]:
        sizes: list[int] = []
        hands: list[Any] = [Noting(sizes, slow) for _ in range(workers)]
        batcher = Batcher(hands, **options)
        batcher.start()
        await asyncio.wait_for(talk(batcher), 60)
        await batcher.stop()
        return sizes

    return asyncio.run(run())


def asked(batcher: Batcher, count: int) -> Any:
    return asyncio.gather(*(batcher.ask(Asked(b"%d" % k, k)) for k in range(count)))


@pytest.mark.parametrize("workers", [1, 2])
def test_who_asks_alone_does_not_wait(workers):
    async def talk(batcher):
        for _ in range(3):
            record, feature = await batcher.ask(Asked(b"a", 3))
            assert record == {"data": b"a", "top": 3} and feature is None

    assert served(talk, workers, wait=LONG) == [1, 1, 1]


def test_a_batch_waits_for_as_many_as_asked_before_but_not_for_ever():
    async def together(batcher):
        await asked(batcher, 4)
        first = asyncio.create_task(batcher.ask(Asked(b"a", 1)))
        await asyncio.sleep(0.05)
        await asyncio.gather(first, asked(batcher, 3))

    assert served(together, wait=LONG) == [4, 4]

    async def fewer(batcher):
        await asked(batcher, 4)
        await batcher.ask(Asked(b"a", 1))
        await batcher.ask(Asked(b"a", 1))

    assert served(fewer, wait=0.01) == [4, 1, 1]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_gets_its_own_and_the_shares_are_even(workers):
    async def talk(batcher):
        found = await asked(batcher, 12)
        assert [record for record, _ in found] == [{"data": b"%d" % k, "top": k} for k in range(12)]

    assert served(talk, workers, slow=0.05) == [12 // workers] * workers


def test_batches_have_a_size():
    async def talk(batcher):
        await asked(batcher, 10)

    assert sum(sizes := served(talk, size=4)) == 10 and max(sizes) == 4


def test_heavy_files_go_apart():
    async def talk(batcher):
        await asyncio.gather(*(batcher.ask(Asked(bytes(12 * 2**20), 1)) for _ in range(4)))

    assert served(talk) == [2, 2]


def test_what_breaks_is_told_to_those_who_asked():
    async def talk(batcher):
        with pytest.raises(ValueError, match="broken"):
            await batcher.ask(Asked(b"broken", 1))
        await batcher.ask(Asked(b"whole", 1))

    assert served(talk) == [1, 1]


def test_a_picture_that_fails_alone_is_told_to_who_sent_it_alone():
    async def talk(batcher):
        await asked(batcher, 3)  # three come together from then on
        asking = (batcher.ask(Asked(data, 1)) for data in (b"a", b"odd", b"b"))
        first, odd, last = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(odd, DuplexError) and str(odd) == "odd"
        assert (first[0]["data"], last[0]["data"]) == (b"a", b"b")

    assert served(talk, wait=LONG) == [3, 3]


def test_who_has_gone_is_not_looked_at():
    async def talk(batcher):
        first = asyncio.create_task(batcher.ask(Asked(b"slow", 1)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(batcher.ask(Asked(b"gone", 1)))
        await asyncio.sleep(0.01)
        second.cancel()
        await first
        await asyncio.sleep(0.1)
        assert not batcher.full

    assert served(talk, slow=0.3, room=1) == [1]


def test_one_that_never_answers_does_not_keep_the_server():
    let_go, released = threading.Event(), []

    class Stuck:
        def answer(self, batch):
            released.append(let_go.wait(LEAVE))
            return [({}, None) for _ in batch]

    async def run() -> None:
        batcher = Batcher([cast(Any, Stuck())])
        batcher.start()
        impatient = asyncio.ensure_future(batcher.ask(Asked(b"a", 1)))
        while not batcher._under_way or batcher._queue:  # until the worker has it
            await asyncio.sleep(0.01)
        impatient.cancel()
        await asyncio.wait({impatient})
        await batcher.stop()
        assert not released, "the end waited for its answer"

    asyncio.run(run())
    let_go.set()
    wait_until(lambda: released == [True])


def test_what_has_been_asked_is_answered_before_the_end():
    async def talk(batcher):
        talk.asked = [asyncio.create_task(batcher.ask(Asked(b"a", 1))) for _ in range(5)]
        await asyncio.sleep(0)

    assert sum(served(talk, slow=0.05, size=2)) == 5
    assert all(one.result()[0]["data"] == b"a" for one in talk.asked)
