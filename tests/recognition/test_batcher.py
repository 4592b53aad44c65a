"""Images that arrive together are encoded together, and a lone image does not wait."""

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from duplex.errors import DuplexError
from duplex.evaluation.new_share import NewShare
from duplex.recognition.serve import Batcher, ImageRequest, RecentShares, Reply

NEVER = 600.0  # seconds; no test lasts as long


def stored() -> RecentShares:
    """A share of new pairs that is not estimated."""
    candidates: Any = SimpleNamespace(stored_share=NewShare(0.1))
    return RecentShares(candidates)


class FakeWorker:
    """A worker that records batch sizes and replies with each image's bytes; some bytes fail."""

    def __init__(self, sizes: list[int], delay: float = 0.0) -> None:
        self.sizes, self.delay, self.thread = sizes, delay, ThreadPoolExecutor(1)

    def submit(self, batch, share) -> Future:
        return self.thread.submit(self.replies, batch)

    def replies(self, batch):
        self.sizes.append(len(batch))
        time.sleep(self.delay)
        if any(request.data == b"batch fails" for request in batch):
            raise ValueError("batch fails")
        return [
            "image fails" if request.data == b"image fails" else Reply({"data": request.data, "top": request.top})
            for request in batch
        ]


def batch_sizes(client: Any, workers: int = 1, delay: float = 0.0, **options: Any) -> list[int]:
    async def run() -> list[int]:
        sizes: list[int] = []
        fakes: list[Any] = [FakeWorker(sizes, delay) for _ in range(workers)]
        batcher = Batcher(fakes, stored(), **options)
        async with batcher.running():
            await asyncio.wait_for(client(batcher), 60)
        return sizes

    return asyncio.run(run())


def ask(batcher: Batcher, *images: bytes) -> Any:
    return asyncio.gather(*(batcher.answer(ImageRequest(data, top=1)) for data in images))


@pytest.mark.parametrize(
    ("groups", "options", "sizes"),
    [([1, 1, 1], {"wait": NEVER}, [1, 1, 1]), ([1, 1, 1], {"wait": NEVER, "workers": 2}, [1, 1, 1]),
     ([4, 1, 1], {"wait": 0.01}, [4, 1, 1]), ([4], {"size": 3}, [3, 1])],
)  # fmt: skip
def test_batches_wait_neither_alone_nor_long_and_have_at_most_size_images(groups, options, sizes):
    async def client(batcher):
        for images in groups:
            assert await ask(batcher, *[b"a"] * images) == [Reply({"data": b"a", "top": 1})] * images

    assert sorted(batch_sizes(client, **options)) == sorted(sizes)


def test_large_files_are_split_into_several_batches():
    async def client(batcher):
        await ask(batcher, *[bytes(12 * 2**20)] * 4)

    assert batch_sizes(client) == [2, 2]


def test_an_error_reaches_the_images_of_its_batch_only():
    async def client(batcher):
        with pytest.raises(ValueError, match="batch fails"):
            await ask(batcher, b"batch fails")
        await ask(batcher, b"good")

    assert batch_sizes(client) == [1, 1]


def test_an_image_that_fails_alone_does_not_affect_its_batch():
    async def client(batcher):
        await ask(batcher, *[b"a"] * 3)  # batches of three from now on
        images = [batcher.answer(ImageRequest(data, 1)) for data in (b"a", b"image fails", b"b")]
        first, failed, last = await asyncio.gather(*images, return_exceptions=True)
        assert isinstance(failed, DuplexError) and str(failed) == "image fails"
        assert (first[0]["data"], last[0]["data"]) == (b"a", b"b")

    assert batch_sizes(client, wait=NEVER) == [3, 3]


def test_an_image_whose_client_has_left_is_not_encoded():
    async def client(batcher):
        first = asyncio.ensure_future(ask(batcher, b"slow"))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(ask(batcher, b"left"))
        await asyncio.sleep(0.01)
        second.cancel()
        await first
        await asyncio.sleep(0.1)
        assert not batcher.full

    assert batch_sizes(client, delay=0.3, room=1) == [1]


def test_a_worker_that_never_replies_does_not_block_the_end():
    class StuckWorker:
        def submit(self, batch, share) -> Future:
            return Future()

    async def run() -> None:
        stuck: Any = StuckWorker()
        batcher = Batcher([stuck], stored())
        async with batcher.running():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(ask(batcher, b"a"), 0.1)

    asyncio.run(asyncio.wait_for(run(), 10))
