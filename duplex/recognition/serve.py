"""HTTP server that takes images and answers in JSON, with a web page and metrics for Prometheus.

The server process collects the images of concurrent requests into batches for worker processes,
each with its own recognizer.
"""

from __future__ import annotations

import asyncio
import io
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import chain, compress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from torch import Tensor

from duplex.data.images import BadImageFile, decode_image
from duplex.errors import DuplexError
from duplex.evaluation.new_share import NewShare
from duplex.labels import World
from duplex.recognition.answers import Candidates, NeighbourIndex
from duplex.recognition.limits import Limits
from duplex.recognition.recognizer import Recognizer
from duplex.system.processes import BrokenProcessPool, ProcessFailed, WorkerProcess
from duplex.system.version import __version__

MAX_BATCH_BYTES = 16 * 2**20  # a batch that exceeds this gets no further file
PATHS = ("/", "/predict", "/labels", "/health", "/metrics", "/docs", "/openapi.json")  # others: "other"
SOURCES = "default-src 'self'; img-src 'self' data: blob:; media-src blob:; style-src 'self' 'unsafe-inline'"
SCRIPTS = "script-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
HEADERS = [  # of every response
    ("Content-Security-Policy", f"{SOURCES}; {SCRIPTS}"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]
FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
FORM = {"schema": {"type": "object", "properties": {"file": FILES}}}
UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": FORM}}}

WINDOW = 400  # images from whose answers the share of new pairs is estimated


class Reply(NamedTuple):
    """A worker's answer to an image."""

    record: dict[str, Any]
    feature: NDArray[Any] | None = None  # if asked for
    unseen: float | None = None  # probability of all unseen candidates at r = 1/2


Failure = str  # the error that an image caused in the worker


@dataclass(frozen=True)
class ImageRequest:
    data: bytes  # of the file
    top: int  # number of compositions to return
    feature: bool = False  # whether to return its feature


WaitingImage = tuple[ImageRequest, asyncio.Future[Reply]]


@contextmanager
def recognizer_workers(
    load: Callable[[], Recognizer], count: int, *, world: World | None, max_pixels: int, threads: int
) -> Iterator[list[WorkerProcess]]:
    """Worker processes with loaded models in this context; they are killed at its end."""
    workers: list[WorkerProcess] = []
    try:
        for _ in range(count):
            workers.append(WorkerProcess(partial(WorkerRecognizer, load, world, max_pixels, threads)))
        for worker, future in zip(workers, [worker.submit() for worker in workers], strict=True):
            try:
                future.result()
            except BrokenProcessPool as error:
                raise worker_death_error(worker) from error
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def worker_death_error(worker: WorkerProcess) -> ProcessFailed:
    end = worker.describe_end()
    return ProcessFailed(f"a worker process {end}, perhaps out of memory; try fewer --workers")


class WorkerRecognizer:
    """Recognises batches of images; an object of this class lives in each worker process."""

    def __init__(self, load: Callable[[], Recognizer], world: World | None, max_pixels: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._recognizer = load()
        self._max_pixels = max_pixels
        self._candidates = self._recognizer.candidates(world)
        self._transform = self._recognizer.encoder.image_transform

    def __call__(self, batch: Sequence[ImageRequest], share: NewShare) -> list[Reply | Failure]:
        """One reply or error per image; if a batch fails, its images are tried one by one.

        share: the expected share of new pairs.
        """
        try:
            return [*self._answer(batch, share)]
        except Exception as error:
            if len(batch) == 1:
                return [f"{type(error).__name__}: {error}"]
        return [self([request], share)[0] for request in batch]

    def _answer(self, batch: Sequence[ImageRequest], share: NewShare) -> list[Reply]:
        pixels = [self._decode(request.data) for request in batch]
        good = [place for place, image in enumerate(pixels) if not isinstance(image, str)]
        replies = [Reply({"error": reason}) for reason in pixels]
        if not good:
            return replies
        inputs = self._recognizer.encode([cast(Tensor, pixels[place]) for place in good])
        blocks = list(self._candidates.blocks(inputs, max(batch[place].top for place in good)))
        answers = chain.from_iterable(block.answers(share) for block in blocks)
        unseen = np.concatenate([block.unseen for block in blocks])
        for place, answer, feature, q in zip(good, answers, inputs["cls"], unseen, strict=True):
            request = batch[place]
            record = answer.to_dict(request.top)
            record["top"] = record["top"][: request.top]
            replies[place] = Reply(record, feature.cpu().numpy() if request.feature else None, float(q))
        return replies

    def _decode(self, data: bytes) -> Tensor | str:
        if not data:
            return "empty"
        try:
            return cast(Tensor, self._transform(decode_image(io.BytesIO(data), self._max_pixels)))
        except BadImageFile as error:
            return error.reason
        except (ValueError, ZeroDivisionError, MemoryError):
            return "cannot be resized"


class RecentShares:
    """The stored share of new pairs or, if `estimated`, that of the last `WINDOW` images."""

    def __init__(self, candidates: Candidates, *, estimated: bool = False) -> None:
        self._candidates = candidates
        self._unseen: deque[float] = deque(maxlen=WINDOW)
        self._estimated = estimated
        self.share = self._estimate() if estimated else candidates.stored_share

    def add(self, unseen: Iterable[float | None]) -> None:
        """Take answered images into account, by their probabilities of all unseen candidates."""
        if self._estimated:
            self._unseen.extend(q for q in unseen if q is not None)
            self.share = self._estimate()

    def _estimate(self) -> NewShare:
        return self._candidates.estimate_from(np.array(self._unseen))

    def to_dict(self) -> dict[str, Any]:
        """The share, its standard error, and the number of images that it was estimated from."""
        return {"value": self.share.value, "error": self.share.error, "images": len(self._unseen), "of": WINDOW}


class Batcher:
    """Queue that gives each free worker a batch; `await answer(request)` answers one image.

    A batch is an even share of the images in progress, for which a free worker waits at most
    `wait` seconds.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        shares: RecentShares,
        size: int = 32,
        wait: float = 0.01,
        room: int = 512,
    ) -> None:
        self._workers = workers
        self._shares = shares
        self._size = size
        self._wait = wait
        self._room = room
        self._queue: deque[WaitingImage] = deque()
        self._in_progress: set[asyncio.Future[Reply]] = set()
        self._peak = 0  # the most images that were lately in progress at once
        self._arrived = asyncio.Event()
        self._turn = asyncio.Lock()
        self.batches = 0
        self.images = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send batches to the workers in this context, and wait for their answers at its end."""
        tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]
        yield
        if self._in_progress:
            await asyncio.wait(self._in_progress)
        for task in tasks:
            task.cancel()

    @property
    def full(self) -> bool:
        return len(self._queue) >= self._room

    async def answer(self, request: ImageRequest) -> Reply:
        done: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._in_progress.add(done)
        self._peak = max(self._peak, len(self._in_progress))
        self._queue.append((request, done))
        self._arrived.set()
        try:
            return await done
        finally:
            self._in_progress.discard(done)

    @property
    def _share(self) -> int:
        return max(1, min(self._size, math.ceil(self._peak / len(self._workers))))

    async def _serve(self, worker: WorkerProcess) -> None:
        while True:
            async with self._turn:  # workers fill their batches one after another
                batch = await self._next_batch()
            replies: Sequence[Reply | Failure | Exception]
            try:
                replies = await _ask(worker, [request for request, _ in batch], self._shares.share)
                self._shares.add(reply.unseen for reply in replies if isinstance(reply, Reply))
                self.batches += 1
                self.images += len(batch)
            except Exception as error:
                replies = [error] * len(batch)
            for (_, done), reply in zip(batch, replies, strict=True):
                if done.done():  # its client has left
                    continue
                if isinstance(reply, Reply):
                    done.set_result(reply)
                else:
                    done.set_exception(DuplexError(reply) if isinstance(reply, str) else reply)

    async def _next_batch(self) -> list[WaitingImage]:
        batch: list[WaitingImage] = []
        while not batch:
            await self._wait_for(lambda: 1)
            try:
                await asyncio.wait_for(self._wait_for(lambda: self._share), self._wait)
            except TimeoutError:  # fewer clients than before
                self._peak = len(self._in_progress)
            share = self._share
            size = 0
            while self._queue and len(batch) < share and size < MAX_BATCH_BYTES:
                request, done = self._queue.popleft()
                if not done.done():
                    batch.append((request, done))
                    size += len(request.data)
        return batch

    async def _wait_for(self, count: Callable[[], int]) -> None:
        while len(self._queue) < count():
            self._arrived.clear()
            await self._arrived.wait()


async def _ask(worker: WorkerProcess, batch: Sequence[ImageRequest], share: NewShare) -> list[Reply | Failure]:
    with suppress(BrokenProcessPool):
        return await asyncio.wrap_future(worker.submit(batch, share))
    try:  # once more, by its replacement
        return await asyncio.wrap_future(worker.submit(batch, share))
    except BrokenProcessPool as error:
        raise worker_death_error(worker) from error


class ServerMetrics(Collector):
    """One server's metrics for Prometheus, in a registry of its own."""

    def __init__(self, batcher: Batcher, workers: Sequence[WorkerProcess]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("duplex_requests", "Requests", ["path", "status"], registry=self.registry)
        self.seconds = Histogram("duplex_request_seconds", "Seconds per request", registry=self.registry)
        self.running = Gauge("duplex_requests_running", "Requests in progress", registry=self.registry)
        self.bad_images = Counter("duplex_bad_images", "Uploaded files that are not images", registry=self.registry)
        self._batcher = batcher
        self._workers = workers
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the server's own metrics; `prometheus_client` calls this."""
        restarts = sum(worker.restarts for worker in self._workers)
        own = _resident_bytes("self")
        memory = own + sum(_resident_bytes(worker.pid) for worker in self._workers)
        yield CounterMetricFamily("duplex_images", "Images answered", self._batcher.images)
        yield CounterMetricFamily("duplex_batches", "Batches of images", self._batcher.batches)
        yield CounterMetricFamily("duplex_worker_restarts", "Worker processes replaced", restarts)
        yield GaugeMetricFamily("duplex_resident_bytes", "Memory of the server and its workers", memory)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def count_requests(self, app: Any) -> Any:
        """Wrap an ASGI application so that each request is counted by its status."""

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status = 500

            async def noting_status(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                with self.seconds.time(), self.running.track_inprogress():
                    await app(scope, receive, noting_status)
            finally:
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.requests.labels(path, status).inc()

        return counted


def _resident_bytes(process: int | str) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * 4096
    except OSError:  # not on this system
        return 0


class PredictQuery(BaseModel, extra="forbid"):
    """Query parameters of /predict."""

    top: int = Field(3, ge=1, le=50, description="Number of compositions per answer.")
    similar: int = Field(0, ge=0, le=20, description="Number of training images per answer.")


def application(
    recognizer: Recognizer,
    workers: Sequence[WorkerProcess],
    limits: Limits,
    neighbours: NeighbourIndex | None,
    world: World | None,
    shares: RecentShares,
) -> Any:
    """The server's ASGI application; `workers`: running processes, each with the same model."""
    batcher = Batcher(workers, shares)
    metrics = ServerMetrics(batcher, workers)
    candidates = recognizer.candidates(world)
    handlers: dict[Any, Any] = {HTTPException: _error_as_json, RequestValidationError: _invalid_query_as_json}
    app = FastAPI(
        title="duplex",
        version=__version__,
        lifespan=lambda _app: batcher.running(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lose the images
        exception_handlers=handlers,
    )

    @app.post("/predict", openapi_extra=UPLOAD, summary="Recognise the compositions in images")
    async def predict(request: Request, query: Annotated[PredictQuery, Query()]) -> JSONResponse:
        """One answer per image in the uploaded form, in order."""
        if batcher.full:
            raise HTTPException(429, "too many images are waiting; try again later")
        try:
            answering = _answer_form(request, query, limits, batcher, neighbours)
            answers = await asyncio.wait_for(answering, limits.seconds)
        except TimeoutError:
            problem = f"no answer within {limits.seconds:g} s"
            message = f"{problem}; send fewer images per request, or try again later"
            raise HTTPException(408, message, headers={"Connection": "close"}) from None
        except DuplexError as error:
            status = 503 if isinstance(error, ProcessFailed) else 500
            raise HTTPException(status, str(error)) from error
        bad = sum("error" in answer for answer in answers)
        metrics.bad_images.inc(bad)
        return JSONResponse({"answers": answers}, status_code=422 if bad == len(answers) else 200)

    @app.get("/labels", summary="List the states, the objects and the compositions to choose from")
    def labels() -> dict[str, Any]:
        pairs = list(compress(candidates.pairs, candidates.feasible))
        return {"states": candidates.states, "objects": candidates.objects, "compositions": pairs}

    @app.get("/health", summary="Report that the server is running")
    def health() -> dict[str, Any]:
        kind = recognizer.trained.kind
        about = {"kind": kind, "compositions": len(candidates), "new_share": shares.to_dict()}
        return {"status": "ok", **about, "version": __version__}

    app.get("/metrics", response_class=PlainTextResponse, summary="Counters for Prometheus")(metrics.text)
    app.get("/", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("page.html"))
    app.get("/docs", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("docs.html"))
    return metrics.count_requests(app)


async def _answer_form(
    request: Request, query: PredictQuery, limits: Limits, batcher: Batcher, neighbours: NeighbourIndex | None
) -> list[dict[str, Any]]:
    async def answer(file: UploadFile) -> dict[str, Any]:
        wants_feature = query.similar > 0 and neighbours is not None
        asked = ImageRequest(await file.read(), query.top, wants_feature)
        reply = await batcher.answer(asked)
        record = {"image": (file.filename or "")[:200], **reply.record}
        if neighbours is not None and reply.feature is not None:
            record["similar"] = await asyncio.to_thread(neighbours.nearest, reply.feature, query.similar)
        return record

    async with _uploaded_files(request, limits) as files:
        return await asyncio.gather(*map(answer, files))


@asynccontextmanager
async def _uploaded_files(request: Request, limits: Limits) -> AsyncIterator[list[UploadFile]]:
    try:
        limited = Request(request.scope, _receive_limited(request, limits.bytes))
        form = await limited.form(max_files=limits.images, max_fields=8)
    except HTTPException:
        raise
    except OSError as error:  # no space for the upload
        problem = f"the upload cannot be stored: {error.strerror}"
        raise HTTPException(503, f"{problem}; try again later") from error
    except Exception as error:  # several kinds, of the parser and of clients that left
        problem = "the form cannot be read; send images as multipart/form-data"
        raise HTTPException(400, problem) from error
    try:
        files: list[UploadFile] = []
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                problem = f"the field {name[:80]!r} is text, not a file"
                raise HTTPException(400, f"{problem}; send images as files, and options in the query")
            files.append(value)
        if not files:
            fix = "send each as a field `file` of multipart/form-data"
            raise HTTPException(400, f"the request has no image; {fix}")
        yield files
    finally:
        await form.close()


def _receive_limited(request: Request, limit: int) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdigit() and int(length) > limit else 0

    async def receive() -> MutableMapping[str, Any]:
        nonlocal size
        message: MutableMapping[str, Any] = await request.receive() if size <= limit else {}
        size += len(message.get("body", b""))
        if size > limit:  # uvicorn reads and drops the rest
            problem = f"the request is larger than {limit} bytes"
            raise HTTPException(413, f"{problem}; send fewer or smaller images")
        return message

    return receive


async def _error_as_json(_request: Request, error: Any) -> JSONResponse:
    content = {"error": str(error.detail)}
    return JSONResponse(content, status_code=error.status_code, headers=error.headers)


async def _invalid_query_as_json(_request: Request, error: Any) -> JSONResponse:
    fault = error.errors()[0]
    parameter = str(fault["loc"][-1])[:80]
    return JSONResponse({"error": f"{parameter}: {fault['msg']}"}, status_code=422)


def _page(name: str) -> str:
    return (resources.files("duplex.recognition") / name).read_text(encoding="utf-8")
