"""HTTP server that takes images and answers in JSON, with a web page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from duplex.errors import DuplexError
from duplex.labels import World
from duplex.recognition.batcher import Batcher
from duplex.recognition.neighbours import Neighbours
from duplex.recognition.recognizer import Recognizer
from duplex.recognition.server_metrics import ServerMetrics
from duplex.recognition.workers import ImageRequest
from duplex.system.process_pool import ProcessFailed, WorkerProcess
from duplex.system.version import __version__

POLICY = "default-src 'self'; img-src 'self' data: blob:; media-src blob:; style-src 'self' 'unsafe-inline'; "
HEADERS = [  # of every response
    ("Content-Security-Policy", POLICY + "script-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]
FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
FORM = {"schema": {"type": "object", "properties": {"file": FILES}}}
UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": FORM}}}


@dataclass(frozen=True)
class Limits:
    """The HTTP server's limits on each request, and on the number of connections."""

    bytes: int = 32 * 2**20
    pixels: int = 40_000_000  # per image
    images: int = 32
    seconds: float = 20.0  # for the body to arrive and be answered
    connections: int = 256


class PredictQuery(BaseModel, extra="forbid"):
    """Query parameters of /predict."""

    top: int = Field(3, ge=1, le=50, description="Number of most probable compositions per answer.")
    similar: int = Field(0, ge=0, le=20, description="Number of nearest training images per answer.")


def application(
    recognizer: Recognizer,
    workers: Sequence[WorkerProcess],
    limits: Limits,
    neighbours: Neighbours | None,
    world: World | None,
) -> Any:
    """The server as an ASGI application.

    recognizer: the model, for labels and candidates.
    workers: running processes, each with the same model, that recognise the images.
    neighbours: training images to search for similar ones; None: requests for similar images are ignored.
    world: closed (choose among the pairs of the data set) or open (among all pairs); None: the model's default.
    """
    batcher = Batcher(workers)
    metrics = ServerMetrics(batcher, workers)
    candidates = recognizer.candidates(world)
    app = FastAPI(
        title="duplex",
        version=__version__,
        lifespan=lambda _app: batcher.running(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lose the images
        exception_handlers={HTTPException: _error_as_json, RequestValidationError: _invalid_query_as_json},
    )

    @app.post("/predict", openapi_extra=UPLOAD, summary="Recognise the compositions in images")
    async def predict(request: Request, query: Annotated[PredictQuery, Query()]) -> JSONResponse:
        """One answer per image of the uploaded form, in order."""
        if batcher.full:
            raise HTTPException(429, "too many images are waiting; try again")
        try:
            answering = _answer_form(request, query, limits, batcher, neighbours)
            answers = await asyncio.wait_for(answering, limits.seconds)
        except asyncio.TimeoutError:
            message = f"no answer within {limits.seconds:g} s"
            raise HTTPException(408, message, headers={"Connection": "close"}) from None
        except DuplexError as error:
            raise HTTPException(503 if isinstance(error, ProcessFailed) else 500, str(error)) from error
        bad = sum("error" in answer for answer in answers)
        metrics.bad_images.inc(bad)
        return JSONResponse({"answers": answers}, status_code=422 if bad == len(answers) else 200)

    @app.get("/labels", summary="List the states, the objects and the compositions to choose from")
    def labels() -> dict[str, Any]:
        pairs = [list(pair) for pair, chosen in zip(candidates.pairs, candidates.feasible, strict=True) if chosen]
        return {"states": candidates.states, "objects": candidates.objects, "compositions": pairs}

    @app.get("/health", summary="Report that the server is running")
    def health() -> dict[str, Any]:
        kind = recognizer.trained.kind
        return {"status": "ok", "kind": kind, "compositions": len(candidates), "version": __version__}

    app.get("/metrics", response_class=PlainTextResponse, summary="Counters for Prometheus")(metrics.text)
    app.get("/", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("page.html"))
    app.get("/docs", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("docs.html"))
    return metrics.count_requests(app)


async def _answer_form(
    request: Request, query: PredictQuery, limits: Limits, batcher: Batcher, neighbours: Neighbours | None
) -> list[dict[str, Any]]:
    async def answer(file: UploadFile) -> dict[str, Any]:
        wants_feature = query.similar > 0 and neighbours is not None
        reply, feature = await batcher.answer(ImageRequest(await file.read(), query.top, wants_feature))
        record = {"image": (file.filename or "")[:200], **reply}
        if neighbours is not None and feature is not None:
            record["similar"] = await asyncio.to_thread(neighbours.nearest, feature, query.similar)
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
        raise HTTPException(503, f"the upload cannot be stored: {error.strerror}; try again later") from error
    except Exception as error:  # several kinds, of the parser and of clients that left
        raise HTTPException(400, "the form cannot be read") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if texts := [name for name, value in form.multi_items() if not isinstance(value, UploadFile)]:
            text = f"the field {texts[0][:80]!r} is text, not a file"
            raise HTTPException(400, f"{text}; send images as files, and options in the query")
        if not files:
            raise HTTPException(400, "the request has no image; send multipart/form-data with images in fields file")
        yield files
    finally:
        await form.close()


def _receive_limited(request: Request, limit: int) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
    """An ASGI function `receive` that raises HTTP error 413 if the request's body exceeds `limit` bytes."""
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdigit() and int(length) > limit else 0

    async def receive() -> MutableMapping[str, Any]:
        nonlocal size
        message: MutableMapping[str, Any] = await request.receive() if size <= limit else {}
        size += len(message.get("body", b""))
        if size > limit:  # uvicorn reads and drops the rest
            raise HTTPException(413, f"the request is larger than {limit} bytes")
        return message

    return receive


async def _error_as_json(_request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, status_code=error.status_code, headers=error.headers)


async def _invalid_query_as_json(_request: Request, error: Any) -> JSONResponse:
    fault = error.errors()[0]
    return JSONResponse({"error": f"{str(fault['loc'][-1])[:80]}: {fault['msg']}"}, status_code=422)


def _page(name: str) -> str:
    return (resources.files("duplex.recognition") / name).read_text(encoding="utf-8")
